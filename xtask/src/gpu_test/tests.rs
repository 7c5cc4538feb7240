use super::*;

#[test]
fn the_artifact_of_a_target_is_found_among_the_messages() {
    let lines = [
        r#"{"reason":"compiler-artifact","target":{"name":"cudarc"},"filenames":["libx.rlib"],"executable":null}"#,
        r#"{"reason":"build-script-executed","package_id":"x"}"#,
        r#"{"reason":"compiler-artifact","target":{"name":"gpu"},"filenames":["t/gpu-1"],"executable":"t/gpu-1"}"#,
        r#"{"reason":"compiler-artifact","target":{"name":"plugin"},"filenames":["t/l.rlib","t/l.so"],"executable":null}"#,
        r#"{"reason":"build-finished","success":true}"#,
    ];
    let find = |target: &str| {
        let parse = |line| serde_json::from_str::<Message>(line).expect("valid");
        lines.into_iter().map(parse).find_map(|message| message.artifact(target))
    };
    assert_eq!(find("gpu"), Some("t/gpu-1".into()));
    assert_eq!(find("plugin"), Some("t/l.so".into()));
    assert_eq!(find("cudarc"), None);
}

#[test]
fn every_test_program_is_in_the_bundle() {
    for test in TESTS {
        let is_product = PRODUCTS.iter().any(|product| product.file == *test);
        let is_script = SCRIPTS.iter().any(|script| script.ends_with(&format!("/{test}")));
        assert!(is_product || is_script, "{test}");
    }
}

#[test]
fn the_bench_script_finds_its_program_and_passes_the_absence_of_a_gpu_on() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folder = tempfile::tempdir().expect("a folder");
    copy_folder(&root.join("peers"), &folder.path().join("peers")).expect("copies");
    fs::write(folder.path().join("bench.sh"), script_of(BENCH)).expect("writes");
    // Without the permission, as a copy may be.
    let program = format!("#!/bin/sh\nexit {NO_GPU}\n");
    fs::write(folder.path().join("alloc-lab"), program).expect("writes");
    let mut command = Command::new("bash");
    let output = command.arg(folder.path().join("bench.sh")).current_dir(&folder).output();
    let output = output.expect("bash");
    let error = String::from_utf8_lossy(&output.stderr);
    let expected = if has_python() { i32::from(NO_GPU) } else { 1 };
    assert_eq!(output.status.code(), Some(expected), "{error}");
}

/// Without PyTorch, as here, it measures ours alone; without a GPU it says so.
#[test]
fn the_host_bench_runs_with_and_without_a_peer() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).expect("writes");
    write("bench_host.sh", &script_of(BENCH_HOST));
    write("alloc-host-cuda-bench", &format!("#!/bin/sh\necho $@ in $FOUND\nexit {NO_GPU}\n"));
    let run = || {
        let mut command = Command::new("bash");
        let script = folder.path().join("bench_host.sh");
        let output = command.arg(script).arg("3").env_remove("FOUND").output().expect("bash");
        assert_eq!(output.status.code(), Some(i32::from(NO_GPU)));
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    write("build_peer_host.sh", "exit 1");
    assert_eq!(run(), "beside - 3 in");
    write("build_peer_host.sh", "echo export FOUND=here");
    let peer = folder.path().join("peer_host");
    assert_eq!(run(), format!("beside {} 3 in here", peer.display()));
}

fn has_python() -> bool {
    Command::new("python3").arg("--version").output().is_ok()
}

#[test]
fn the_table_has_medians_and_ratios() {
    let peer =
        |alloc: &str, rest: &str| format!("{{\"alloc\":\"{alloc}\",\"conf\":\"\",{rest}}}\n");
    let ours = |rest: &str| {
        let variant = "\"policy\":\"ours\",\"api\":\"handle\",\"backend\":\"cuda\"";
        peer("ours", &format!("{rest},{variant}"))
    };
    let pair = |ns: f64| format!("\"mode\":\"pingpong\",\"bytes\":1024,\"ns_per_pair\":{ns}");
    let rate = |rate: f64| {
        let figures = format!("\"mega_steps_per_s\":{rate},\"reserved_peak\":1");
        format!("\"mode\":\"threads\",\"threads\":16,{figures}")
    };
    let mut lines: String = [40.0, 900.0, 50.0].map(|ns| ours(&pair(ns))).concat();
    lines += &(peer("torch", &pair(400.0)) + &ours(&rate(100.0)) + &peer("torch", &rate(0.25)));
    let whole = |file: &str, ms: f64, reserved: i64| {
        let figures = format!("\"total_ms\":{ms},\"reserved_peak\":{reserved}");
        format!("\"mode\":\"whole\",\"file\":\"{file}.csv\",{figures}")
    };
    for (file, factor) in [("a", 1.0), ("b", 2.0)] {
        lines += &ours(&whole(file, 5.0 * factor, 90));
        lines += &peer("torch", &whole(file, 20.0 * factor, 150));
        let expandable = peer("torch", &whole(file, 30.0, 100));
        lines += &expandable.replace("\"conf\":\"\"", "\"conf\":\"expandable_segments:True\"");
        lines += &peer("async", &whole(file, 40.0 * factor, -1));
    }
    // Not in the sums: one trace is missing.
    lines += &peer("cub", &whole("a", 7.0, -1));
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("lines"), lines).expect("writes");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../peers/table.py");
    if !has_python() {
        return;
    }
    let mut command = Command::new("python3");
    let output = command.arg(script).arg(folder.path().join("lines")).output();
    let text = String::from_utf8(output.expect("python3").stdout).expect("UTF-8");
    for line in [
        "| pingpong 1024 B, ns a pair | 50.0 | 400 | – | – | – |",
        "| 16 threads, a stream each, M steps/s | 100 | 0.25 | – | – | – |",
        "| pingpong 1024 B | 8.00 × | – | – | – |",
        "| 16 threads, a stream each | 400 × | – | – | – |",
        "| a, whole, ms | 5.00 | 20.0 | 30.0 | 40.0 | 7.00 |",
        "| b, whole | 4.00 × | 3.00 × | 8.00 × | – |",
        "Sums over 2 whole replays:",
        "| ours | 15.0 | 0.250 | 0.900 |",
        "| torch | 60.0 | 1.000 | 1.500 |",
        "| async | 120 | 2.000 | – |",
    ] {
        assert!(text.contains(line), "{line} in\n{text}");
    }
    assert!(!text.contains("| cub | 7"), "{text}");
}

/// Runs the script in a folder of pretended test programs, the scripts without a GPU, and
/// returns its last line and code.
fn run_with(program: &str) -> (String, Option<i32>) {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("run.sh"), script_of(RUN)).expect("writes");
    for test in TESTS {
        let path = folder.path().join(test);
        let text = match test.strip_suffix(".py") {
            Some(_) => format!("raise SystemExit({NO_GPU})\n"),
            None => format!("#!/bin/sh\n{program}\n"),
        };
        fs::write(&path, text).expect("writes");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("sets");
    }
    let mut command = Command::new("bash");
    let output = command.arg(folder.path().join("run.sh")).output().expect("bash");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (text.lines().last().unwrap_or_default().to_owned(), output.status.code())
}

#[test]
fn the_script_adds_up_and_tells_failure_from_absence() {
    let programs = TESTS.iter().filter(|test| !test.ends_with(".py")).count();
    let total = |failed: usize| {
        format!("total: {programs} passed, {} failed, {programs} skipped", failed * programs)
    };
    let fine = "echo 'test a ... ok (1 ms)'; echo 'test b ... skipped: no peer'";
    assert_eq!(run_with(fine), (total(0), Some(0)));
    let failed = format!("{fine}; echo 'test c ... FAILED (2 ms)'; exit 1");
    assert_eq!(run_with(&failed), (total(1), Some(1)));
    assert_eq!(run_with(&format!("{fine}; kill -SEGV $$")), (total(1), Some(1)));
    let (line, code) = run_with(&format!("exit {NO_GPU}"));
    assert_eq!(line, "no GPU here: nothing was tested");
    assert_eq!(code, Some(i32::from(NO_GPU)));
}
