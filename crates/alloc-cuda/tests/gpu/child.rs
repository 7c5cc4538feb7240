//! What is better seen from outside: a process whose GPU context is lost, one that exits with an
//! allocator in a static, and one with cudarc, which panics where it cannot go on.

use crate::Scenario;
use crate::ipc;
use crate::rig::{FIRST, MIB, Rig};
use alloc_core::{Addr, Config};
use alloc_cuda::CudaAllocator;
use cuda_driver::fake::Outcome;
use std::process::{Command, ExitCode};
use std::sync::OnceLock;

pub(crate) const SCENARIOS: &[Scenario] = &[
    ("child::context_lost", |rig| spawn(rig, "context_lost")),
    ("child::exit_with_live_memory", |rig| spawn(rig, "exit")),
    #[cfg(feature = "cudarc")]
    ("child::cudarc", |rig| spawn(rig, "cudarc")),
];

pub(crate) const OPTION: &str = "--child=";

/// The part to play, if this process was started by [`spawn`].
pub(crate) fn requested(arguments: &[String]) -> Option<&str> {
    arguments.iter().find_map(|argument| argument.strip_prefix(OPTION))
}

fn spawn(rig: &Rig, part: &str) -> Outcome {
    if !rig.is_real {
        return Outcome::Skipped("needs a process with a real context");
    }
    let program = std::env::current_exe().expect("this program has a path");
    let output = Command::new(program).arg(format!("{OPTION}{part}")).output().expect("starts");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{part}: {}\n{text}", output.status);
    Outcome::Done
}

pub(crate) fn run(part: &str) -> ExitCode {
    let (part, seed) = part.split_once(':').unwrap_or((part, "0"));
    let seed = seed.parse().expect("a number");
    match part {
        "consumer" => ipc::consumer(seed),
        "producer" => ipc::producer(seed),
        "context_lost" => context_lost(),
        "exit" => exit_with_live_memory(),
        #[cfg(feature = "cudarc")]
        "cudarc" => cudarc(),
        _ => return ExitCode::FAILURE,
    }
    ExitCode::SUCCESS
}

/// A kernel writes where nothing is. From then on calls that need the context fail; nothing crashes
/// or hangs. (The driver's virtual memory goes on giving memory even then.)
fn context_lost() {
    let rig = Rig::on_gpu().expect("a GPU");
    let mut config = Config::ours();
    config.settings.expandable_segments = Some(false);
    let allocator = rig.allocator(config);
    let (stream, side) = (rig.stream(), rig.stream());
    let block = allocator.allocate(4 * MIB, &stream).expect("room");
    let aside = allocator.allocate(4 * MIB, &stream).expect("room");
    allocator.record_stream(&aside, &side).expect("records");
    rig.fill(&stream, Addr::new(0x10_0000), 4096, 1);
    assert!(stream.synchronize().is_err(), "the fault is reported");
    let error = allocator.allocate(900 * MIB, &stream).expect_err("the context is lost");
    assert!(error.is_device_lost(), "{error}");
    let _ = allocator.free(block);
    let _ = allocator.free(aside);
    drop(allocator);
}

/// The process ends with everything still allocated, and a thread that has never heard of CUDA.
fn exit_with_live_memory() {
    static KEPT: OnceLock<CudaAllocator> = OnceLock::new();
    let rig = Rig::on_gpu().expect("a GPU");
    let stream = rig.stream();
    let allocator = KEPT.get_or_init(|| rig.allocator(Config::ours()));
    let addr = allocator.allocate_raw(64 * MIB, &stream).expect("room");
    rig.fill(&stream, addr, 64 * MIB, 1);
    let leaked = allocator.buffer::<u8>(1000, &stream).expect("room");
    std::mem::forget(leaked);
    std::thread::spawn(move || {
        let _ = KEPT.get().map(|allocator| allocator.stats(FIRST));
    })
    .join()
    .expect("thread");
}

/// Streams and slices go to cudarc and back.
#[cfg(feature = "cudarc")]
fn cudarc() {
    let rig = Rig::on_gpu().expect("a GPU");
    let allocator = rig.allocator(Config::ours());
    let context = cudarc::driver::CudaContext::new(0).expect("context");
    let theirs = context.new_stream().expect("stream");
    let ours = allocator.backend().adopt_cudarc(&theirs).expect("adopts");
    let buffer = allocator.buffer::<f32>(1000, &ours).expect("room");
    let addr = buffer.addr();
    let mut slice = buffer.into_cudarc(&theirs).expect("its own stream");
    theirs.memcpy_htod(&vec![2.5f32; 1000], &mut slice.view_mut()).expect("copies");
    let copy = theirs.clone_dtoh(&*slice).expect("copies");
    assert!(copy.iter().all(|value| *value == 2.5));
    let buffer = slice.into_buffer();
    assert_eq!(buffer.addr(), addr);
    assert!(buffer.to_vec().expect("copies").iter().all(|value| *value == 2.5));
    let other = context.new_stream().expect("stream");
    let buffer = buffer.into_cudarc(&other).expect_err("another stream").0;
    drop(buffer.into_cudarc(&theirs).expect("its own stream"));
    let again = allocator.buffer::<f32>(1000, &ours).expect("room");
    assert_eq!(again.addr(), addr, "back in the cache");

    let made_here = rig.stream();
    let for_cudarc = made_here.to_cudarc(&context).expect("the same device");
    assert_eq!(for_cudarc.cu_stream().cast(), made_here.raw());
    assert!(ours.to_cudarc(&context).is_err(), "cudarc has that one already");
}
