//! The C interface: programs in C and C++ are compiled, linked with the library and run, and the
//! header is compared with what the library exports.

#![cfg(test)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

/// Where cargo has put the library that this test is built with.
fn library_folder() -> PathBuf {
    let folder = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    assert!(folder.join("libmemory_manager.so").is_file(), "{}", folder.display());
    folder
}

/// Compiles a program, with these flags more; the program, unless there is no such compiler here.
fn compile(compiler: &str, source: &str, flags: &[&str], folder: &Path) -> Option<PathBuf> {
    let program = folder.join("program");
    let mut command = Command::new(compiler);
    command.args(["-Wall", "-Wextra", "-Werror", "-O1", "-g"]).args(flags);
    command.arg("-I").arg(root().join("include")).arg(root().join("tests/c").join(source));
    command.arg("-L").arg(library_folder()).arg("-lmemory_manager").arg("-o").arg(&program);
    command.arg(format!("-Wl,-rpath,{}", library_folder().display()));
    match command.output() {
        Err(error) => {
            println!("skipped: no {compiler} here ({error})");
            None
        }
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{compiler} {source}: {text}");
            Some(program)
        }
    }
}

fn run(program: &Path, arguments: &[&str]) {
    // What the process keeps on purpose (the imitation, what was out at the shutdown) is no leak.
    let output = Command::new(program)
        .args(arguments)
        .env("ASAN_OPTIONS", "detect_leaks=0")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}: {text}{errors}", output.status);
    assert_eq!(text, "the story ended well\n", "{errors}");
}

fn story(flags: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let standard = ["-std=c99"];
    let flags = [&standard, flags].concat();
    if let Some(program) = compile("cc", "story.c", &flags, folder.path()) {
        run(&program, &["pools"]);
        run(&program, &[]);
    }
}

#[test]
fn a_c_program_uses_every_function() {
    story(&[]);
}

/// The C side of the edge is watched: what it frees, keeps and is called back with.
#[test]
fn a_c_program_under_the_address_sanitizer() {
    story(&["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]);
}

#[test]
fn a_cpp_program_uses_the_class() {
    let folder = tempfile::tempdir().unwrap();
    if let Some(program) = compile("c++", "seed.cpp", &["-std=c++11"], folder.path()) {
        run(&program, &[]);
    }
}

/// Names that start with `mm_` and are followed by a parenthesis.
fn functions(text: &str, before: &str) -> BTreeSet<String> {
    let name = |start: &str| {
        let rest = start.trim_start_matches(['*', ' ']);
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_')?;
        let (name, rest) = rest.split_at(end);
        (name.starts_with("mm_") && rest.starts_with('(')).then(|| name.to_owned())
    };
    text.match_indices(before).filter_map(|(at, _)| name(&text[at + before.len()..])).collect()
}

#[test]
fn the_header_declares_what_the_library_exports() {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).unwrap();
    let header = read("include/memory_manager.h");
    let mut declared = functions(&header, "\nmm_status ");
    declared.extend(functions(&header, "\nconst char "));
    let sources = ["mod", "streams", "data"].map(|name| read(&format!("src/abi/{name}.rs")));
    let exported: BTreeSet<_> = sources.iter().flat_map(|text| functions(text, "fn ")).collect();
    assert!(declared.len() > 30, "{declared:?}");
    assert_eq!(declared, exported);
}

#[test]
fn numbers_are_the_same_on_both_sides() {
    use memory_manager::DeviceAllocatorMode::{AsyncStreamOrdered, Caching, CudaAsyncPool};
    assert_eq!([Caching, AsyncStreamOrdered, CudaAsyncPool].map(|mode| mode as i32), [0, 1, 2]);
    let header = std::fs::read_to_string(root().join("include/memory_manager.h")).unwrap();
    for (name, value) in [
        ("MM_MODE_CACHING", 0),
        ("MM_MODE_ASYNC_STREAM_ORDERED", 1),
        ("MM_MODE_CUDA_ASYNC_POOL", 2),
    ] {
        assert!(header.contains(&format!("{name} = {value}")), "{name}");
    }
}
