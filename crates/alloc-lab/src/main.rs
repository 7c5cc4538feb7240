//! Laboratory for caching GPU memory allocators; `alloc-lab --help` explains itself.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    alloc_lab::cli::run(std::env::args_os())
}
