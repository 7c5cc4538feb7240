use super::*;
use crate::symbols::Symbols;
use crate::*;
use std::sync::mpsc;

const MIB: u64 = 1 << 20;

fn context(session: &Session, ordinal: u16) -> std::sync::Arc<Context> {
    Context::retain(session.driver().device(ordinal).expect("device")).expect("context")
}

/// Holds a stream up until the sender is used or dropped.
fn gate(stream: &Stream) -> mpsc::Sender<()> {
    let (open, wait) = mpsc::channel();
    stream
        .call_host(move || {
            let _ = wait.recv();
        })
        .expect("host function");
    open
}

#[test]
fn the_imitation_has_every_function() {
    for name in Symbols::NAMES {
        let name = std::ffi::CString::new(*name).expect("no NUL");
        // A name that lives as long as the lookup asks for.
        let name: &'static CStr = Box::leak(name.into_boxed_c_str());
        assert!(exports::lookup(name).is_some(), "{name:?}");
    }
}

#[test]
fn a_missing_function_and_an_old_driver_are_errors_at_start() {
    let session = Session::new(&[64 * MIB]);
    let without = |hidden: &'static CStr| {
        start(&move |name| if name == hidden { None } else { exports::lookup(name) })
    };
    assert_eq!(
        without(c"cuMemSetAccess").err(),
        Some(LoadError::MissingSymbol { name: "cuMemSetAccess" })
    );
    unsafe extern "C" fn old(out: *mut std::ffi::c_int) -> u32 {
        // SAFETY: the caller passes a place for the result.
        unsafe { out.write(11_080) };
        0
    }
    let aged = start(&|name| match name.to_bytes() {
        b"cuDriverGetVersion" => NonNull::new(old as *mut c_void),
        _ => exports::lookup(name),
    });
    let found = Version { major: 11, minor: 8 };
    assert_eq!(aged.err(), Some(LoadError::TooOld { found }));
    assert!(LoadError::TooOld { found }.to_string().contains("at least 12.0"));
    session.fail("cuInit", 0, code::NO_DEVICE);
    let error = start(&exports::lookup).expect_err("no device");
    assert!(error.to_string().contains("no GPU is visible"), "{error}");
}

#[test]
fn codes_this_crate_does_not_list_get_the_drivers_name() {
    let session = Session::new(&[64 * MIB]);
    session.fail("cuDeviceGetCount", 0, 910);
    let error = session.driver().device_count().expect_err("scripted");
    assert_eq!(error.name, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE");
    session.fail("cuDeviceGetCount", 0, 12_345);
    let error = session.driver().device_count().expect_err("scripted");
    assert_eq!((error.name, error.code), ("unrecognized error code", 12_345));
}

#[test]
fn every_call_puts_the_current_context_back_even_when_it_fails() {
    let session = Session::new(&[64 * MIB, 64 * MIB]);
    let (first, second) = (context(&session, 0), context(&session, 1));
    assert_eq!(session.current_device(), None);
    let memory = DeviceMemory::allocate(&second, MIB).expect("room");
    assert_eq!(session.current_device(), None);

    let outer = first.enter().expect("enter");
    assert!(DeviceMemory::allocate(&second, 65 * MIB).is_err());
    assert_eq!(session.current_device(), Some(0));
    let stream = Stream::create(&second).expect("stream");
    stream.synchronize().expect("idle");
    assert_eq!(session.current_device(), Some(0));
    drop(outer);
    assert_eq!(session.current_device(), None);
    memory.free().expect("free");
}

#[test]
fn work_is_done_in_order_and_events_tell_when() {
    let session = Session::new(&[64 * MIB]);
    let context = context(&session, 0);
    let (stream, other) = (Stream::create(&context), Stream::create(&context));
    let (stream, other) = (stream.expect("stream"), other.expect("stream"));
    let memory = DeviceMemory::allocate(&context, 1000).expect("room");
    let event = Event::create(&context).expect("event");
    assert!(event.is_reached().expect("query"), "never recorded counts as reached");

    let open = gate(&stream);
    // SAFETY: device memory of our own.
    unsafe { stream.fill(memory.addr(), 7, 1000) }.expect("fill");
    event.record(&stream).expect("record");
    other.wait_event(&event).expect("wait");
    let mut seen = [0u8; 1000];
    // SAFETY: the target outlives the synchronisation below.
    unsafe { other.copy_to_host(seen.as_mut_ptr(), memory.addr(), 1000) }.expect("copy");
    assert!(!event.is_reached().expect("query"));
    assert!(!other.is_idle().expect("query"));
    drop(open);
    other.synchronize().expect("synchronize");
    assert_eq!(seen, [7; 1000]);
    assert!(event.is_reached().expect("query"));
    memory.free().expect("free");
}

#[test]
fn the_legacy_stream_waits_for_every_threads_default_stream() {
    let session = Session::new(&[64 * MIB]);
    let context = context(&session, 0);
    let (legacy, own) = (Stream::legacy(&context), Stream::per_thread(&context));
    let event = Event::create(&context).expect("event");
    let theirs = std::thread::scope(|scope| {
        scope.spawn(|| (gate(&own), own.unique_id().expect("id"))).join().expect("thread")
    });
    assert_ne!(own.unique_id().expect("id"), theirs.1, "one handle, two streams");
    event.record(&own).expect("record");
    assert!(event.is_reached().expect("query"), "this thread's stream is idle");
    event.record(&legacy).expect("record");
    assert!(!event.is_reached().expect("query"), "the other thread's is not");
    drop(theirs.0);
    event.synchronize().expect("synchronize");
}

#[test]
fn a_stream_tells_its_device() {
    let session = Session::new(&[64 * MIB, 64 * MIB]);
    let (first, second) = (context(&session, 0), context(&session, 1));
    let stream = Stream::create(&second).expect("stream");
    // SAFETY: alive.
    let found = unsafe { session.driver().device_of_stream(stream.raw()) };
    assert_eq!(found, Ok(1));
    // SAFETY: a special handle.
    let null = || unsafe { session.driver().device_of_stream(std::ptr::null_mut()) };
    assert_eq!(null().expect_err("nothing is current").code, code::INVALID_CONTEXT);
    let _current = first.enter().expect("enter");
    assert_eq!(null(), Ok(0));
    assert_eq!(session.current_device(), Some(0));
}

#[test]
fn virtual_memory_grows_moves_and_refuses_what_is_wrong() {
    let session = Session::new(&[8 * MIB]);
    let context = context(&session, 0);
    let kind = PhysicalKind::default();
    let page = context.granularity(kind).expect("granularity");
    let range = AddressRange::reserve(&context, 16 * page, page).expect("addresses");
    let at = range.base();
    let one = PhysicalMemory::create(&context, page, kind).expect("room");
    let two = PhysicalMemory::create(&context, 2 * page, kind).expect("room");
    range.map(at, &one).expect("map");
    range.map(at + page, &two).expect("map");
    assert!(range.map(at + 2 * page, &one).is_err(), "taken");
    assert!(range.map(at + 16 * page, &one).is_err(), "outside");
    // SAFETY: device memory of our own.
    let written = unsafe { context.copy_to_device(at, &[9; 100]) };
    assert!(written.is_err(), "no access yet");
    range.set_access(at, 3 * page, context.device()).expect("access over both");
    // SAFETY: as above.
    unsafe { context.copy_to_device(at + page - 50, &[9; 100]) }.expect("across the border");
    assert!(range.unmap(at + page, page).is_err(), "half a page");
    range.unmap(at, page).expect("unmap");
    range.map(at + 4 * page, &one).expect("elsewhere");
    range.set_access(at + 4 * page, page, context.device()).expect("access");
    let mut tail = [0u8; 50];
    context.copy_to_host(&mut tail, at + 5 * page - 50).expect("copy");
    assert_eq!(tail, [9; 50], "the data moved with the page");

    let error = PhysicalMemory::create(&context, 2 * page, kind).expect_err("8 MiB");
    assert_eq!(error.code, code::OUT_OF_MEMORY);
    let refused = range.free().expect_err("mapped");
    let range = refused.value;
    range.unmap(at + page, 2 * page).expect("unmap");
    range.unmap(at + 4 * page, page).expect("unmap");
    range.free().expect("free");
    one.release().expect("release");
    two.release().expect("release");
    drop(context);
    assert_eq!(session.outstanding(), 0);
}

#[test]
fn captured_work_runs_at_launch_and_relaxed_calls_are_allowed_meanwhile() {
    let session = Session::new(&[64 * MIB]);
    let context = context(&session, 0);
    let stream = Stream::create(&context).expect("stream");
    let memory = DeviceMemory::allocate(&context, 4).expect("room");
    let read = || {
        let mut seen = [0u8; 4];
        context.copy_to_host(&mut seen, memory.addr()).expect("copy");
        seen
    };
    stream.begin_capture(CaptureMode::Global).expect("begin");
    assert!(matches!(stream.capture_status(), Ok(CaptureStatus::Active(_))));
    // SAFETY: device memory of our own.
    unsafe { stream.fill_words(memory.addr(), 0x0403_0201, 1) }.expect("fill");
    let relaxed = session.driver().relax_captures().expect("relax");
    let more = DeviceMemory::allocate(&context, 4).expect("allowed");
    drop(relaxed);
    let mut graph = stream.end_capture().expect("end").instantiate().expect("instantiate");
    assert_eq!(read(), [0; 4]);
    // SAFETY: the memory is still there.
    unsafe { graph.launch(&stream) }.expect("launch");
    stream.synchronize().expect("synchronize");
    assert_eq!(read(), [1, 2, 3, 4]);
    more.free().expect("free");
    memory.free().expect("free");
}

#[test]
fn a_forbidden_call_breaks_the_captures_that_forbid_it() {
    let session = Session::new(&[64 * MIB]);
    let context = context(&session, 0);
    let stream = Stream::create(&context).expect("stream");
    let allocate = || DeviceMemory::allocate(&context, 4);
    let elsewhere = || std::thread::scope(|scope| scope.spawn(allocate).join().expect("ends"));
    for (mode, own, other) in [
        (CaptureMode::Global, false, false),
        (CaptureMode::ThreadLocal, false, true),
        (CaptureMode::Relaxed, true, true),
    ] {
        for (allowed, here) in [(own, true), (other, false)] {
            stream.begin_capture(mode).expect("begin");
            let memory = if here { allocate() } else { elsewhere() };
            assert_eq!(memory.is_ok(), allowed, "{mode:?}");
            let status = stream.capture_status().expect("status");
            assert_eq!(status == CaptureStatus::Invalidated, !allowed, "{mode:?}");
            let ended = stream.end_capture().map(drop).map_err(|error| error.code);
            assert_eq!(ended.is_ok(), allowed, "{mode:?}");
            assert!(ended.is_ok() || ended == Err(code::STREAM_CAPTURE_INVALIDATED));
            assert_eq!(stream.capture_status(), Ok(CaptureStatus::None));
            if let Ok(memory) = memory {
                memory.free().expect("free");
            }
        }
    }
}

/// The nodes before what a stream does next.
fn past(stream: &Stream) -> std::collections::HashSet<usize> {
    let mut past = std::collections::HashSet::new();
    // SAFETY: nobody else uses the stream.
    unsafe { stream.walk_captured_past(|node| past.insert(node)) }.expect("past");
    past
}

fn tips(stream: &Stream) -> Vec<usize> {
    // SAFETY: nobody else uses the stream.
    unsafe { stream.capture_tips() }.expect("tips").expect("it captures").nodes
}

#[test]
fn captures_fork_join_and_tell_their_order() {
    let session = Session::new(&[64 * MIB]);
    let context = context(&session, 0);
    let [main, side] = [0; 2].map(|_| Stream::create(&context).expect("stream"));
    let event = Event::create(&context).expect("event");
    let memory = DeviceMemory::allocate(&context, 8).expect("room");
    let fill = |stream: &Stream, at: u64, word| {
        // SAFETY: device memory of our own.
        unsafe { stream.fill_words(memory.addr() + at, word, 1) }.expect("fill");
    };
    let order = |before: &Stream, after: &Stream| {
        event.record(before).expect("record");
        after.wait_event(&event).expect("wait");
    };
    main.begin_capture(CaptureMode::Global).expect("begin");
    fill(&main, 0, 1);
    order(&main, &side);
    assert_eq!(side.capture_status(), main.capture_status());
    assert_eq!(tips(&side), tips(&main));
    fill(&side, 4, 2);
    let used = tips(&side);
    fill(&main, 0, 3);
    assert!(!past(&main).contains(&used[0]) && past(&main).len() == 2);
    order(&side, &main);
    assert_eq!((past(&main).len(), tips(&main).len()), (3, 2));
    fill(&main, 0, 4);
    assert_eq!((past(&main).len(), tips(&main).len()), (4, 1));
    let mut graph = main.end_capture().expect("end").instantiate().expect("instantiate");
    assert_eq!(side.capture_status(), Ok(CaptureStatus::None));
    // SAFETY: the memory is still there.
    unsafe { graph.launch(&side) }.expect("launch");
    side.synchronize().expect("synchronize");
    let mut seen = [0u8; 8];
    context.copy_to_host(&mut seen, memory.addr()).expect("copy");
    assert_eq!(seen, [4, 0, 0, 0, 2, 0, 0, 0]);

    main.begin_capture(CaptureMode::Global).expect("begin");
    order(&main, &side);
    fill(&side, 0, 5);
    let unjoined = main.end_capture().map(drop).map_err(|error| error.code);
    assert_eq!(unjoined, Err(code::STREAM_CAPTURE_UNJOINED));
    event.record(&side).expect("record");
    main.begin_capture(CaptureMode::Relaxed).expect("begin");
    let isolated = main.wait_event(&event).map_err(|error| error.code);
    assert_eq!(isolated, Err(code::STREAM_CAPTURE_ISOLATION));
    assert_eq!(main.capture_status(), Ok(CaptureStatus::Invalidated));
    assert!(main.end_capture().is_err());
    main.begin_capture(CaptureMode::Relaxed).expect("begin");
    event.record(&main).expect("record");
    assert_eq!(event.is_reached().map_err(|error| error.code), Err(code::CAPTURED_EVENT));
    let ended = std::thread::scope(|scope| {
        scope.spawn(|| main.end_capture().map(drop)).join().expect("ends")
    });
    assert_eq!(ended.map_err(|error| error.code), Err(code::STREAM_CAPTURE_INVALIDATED));
    drop(graph);
    memory.free().expect("free");
}

#[test]
fn kernels_get_their_arguments_and_a_fault_sticks() {
    let session = Session::new(&[64 * MIB]);
    let run = |memory: &mut KernelMemory<'_>, arguments: &[u64]| {
        let value = arguments[1] as u8;
        memory
            .visit(arguments[0], 3, |_, piece| piece.fill(value))
            .map_err(|_| code::ILLEGAL_ADDRESS)
    };
    session.define_kernel("fill", FakeKernel { parameters: 2, run });
    let context = context(&session, 0);
    let stream = Stream::create(&context).expect("stream");
    let memory = DeviceMemory::allocate(&context, 3).expect("room");
    let module = Module::load_ptx(&context, c"").expect("load");
    assert_eq!(module.kernel(c"drain").expect_err("unknown").code, code::NOT_FOUND);
    let kernel = module.kernel(c"fill").expect("kernel");
    let shape = Shape { blocks: 1, threads: 1 };
    let arguments = [Argument::Long(memory.addr()), Argument::Word(5)];
    // SAFETY: two parameters, which are device memory and a number.
    unsafe { kernel.launch(&stream, shape, &arguments) }.expect("launch");
    let mut seen = [0; 3];
    context.copy_to_host(&mut seen, memory.addr()).expect("copy");
    assert_eq!(seen, [5; 3]);

    let wrong = [Argument::Long(0xdead), Argument::Word(5)];
    // SAFETY: as above; the address is nobody's.
    unsafe { kernel.launch(&stream, shape, &wrong) }.expect("queued");
    let error = stream.synchronize().expect_err("fault");
    assert!(error.is_sticky());
    assert_eq!(memory.free().expect_err("lost").error.code, code::ILLEGAL_ADDRESS);
}

#[test]
fn pinned_memory_pools_and_peers() {
    let session = Session::new(&[64 * MIB, 64 * MIB]);
    let (first, second) = (context(&session, 0), context(&session, 1));
    let flags = HostFlags { portable: true, ..HostFlags::default() };
    let pinned = first.host_allocate(4096, flags).expect("room");
    // SAFETY: ours, not yet freed.
    unsafe { first.host_free(pinned) }.expect("free");
    let mut page = Box::new([0u8; 4096]);
    let start = NonNull::from(&mut *page).cast::<u8>();
    // SAFETY: the box outlives the registration.
    unsafe { first.host_register(start, 4096, flags) }.expect("register");
    // SAFETY: as above.
    let again = unsafe { first.host_register(start, 4096, flags) };
    assert_eq!(again.expect_err("twice").code, code::HOST_MEMORY_ALREADY_REGISTERED);
    // SAFETY: nothing uses it.
    unsafe { first.host_unregister(start) }.expect("unregister");

    let stream = Stream::create(&first).expect("stream");
    let pool = MemoryPool::default_of(first.device()).expect("pool");
    pool.set_release_threshold(u64::MAX).expect("set");
    let memory = pool.allocate(3 * MIB, &stream).expect("room");
    assert_eq!(pool.counter(PoolCounter::UsedNow).expect("counter"), 4 * MIB);
    memory.free(&stream).expect("free");
    pool.trim(0).expect("trim");
    assert_eq!(first.memory_info().expect("info").free, 64 * MIB);

    assert!(first.device().can_access_peer(&second.device()).expect("ask"));
    first.enable_peer_access(&second).expect("enable");
    session.fail("cuCtxEnablePeerAccess", 0, code::PEER_ACCESS_ALREADY_ENABLED);
    first.enable_peer_access(&second).expect("enabled already is fine");
}

#[test]
fn after_shut_down_everything_says_so_and_dropping_is_quiet() {
    let session = Session::new(&[64 * MIB]);
    let context = context(&session, 0);
    let (stream, event) = (Stream::create(&context), Event::create(&context));
    let memory = DeviceMemory::allocate(&context, MIB).expect("room");
    session.shut_down();
    let refused = memory.free().expect_err("gone");
    assert!(refused.error.is_teardown());
    assert_eq!(refused.value.bytes(), MIB, "the memory comes back");
    drop((stream, event, refused, context));
    assert!(session.outstanding() > 0, "nothing was called");
}

#[test]
fn pools_have_settings_counters_and_bounds() {
    let session = Session::new(&[64 * MIB]);
    let device = session.driver().device(0).expect("device");
    let context = Context::retain(device).expect("context");
    let stream = Stream::create(&context).expect("stream");
    let pool = MemoryPool::create(device, Some(8 * MIB)).expect("pool");
    let rules = [
        PoolReuseRule::FollowEvents,
        PoolReuseRule::Opportunistic,
        PoolReuseRule::InternalDependencies,
    ];
    for (off, rule) in rules.into_iter().enumerate() {
        assert!(pool.reuse(rule).expect("get"), "all are on at first");
        pool.set_reuse(rule, false).expect("set");
        let on = rules.into_iter().filter(|rule| pool.reuse(*rule).expect("get")).count();
        assert_eq!(on, 2 - off);
    }
    assert_eq!(pool.release_threshold().expect("get"), 0);
    pool.set_release_threshold(5).expect("set");
    assert_eq!(pool.release_threshold().expect("get"), 5);

    let counters = |pool: &MemoryPool| {
        use PoolCounter::*;
        [UsedNow, UsedPeak, ReservedNow, ReservedPeak].map(|c| pool.counter(c).expect("get") / MIB)
    };
    let memory = pool.allocate(6 * MIB, &stream).expect("room");
    assert_eq!(pool.allocate(4 * MIB, &stream).expect_err("bound").code, code::OUT_OF_MEMORY);
    assert_eq!(counters(&pool), [6; 4]);
    memory.free(&stream).expect("free");
    assert_eq!(counters(&pool), [0, 6, 0, 6]);
    pool.reset_peaks().expect("reset");
    assert_eq!(counters(&pool), [0; 4]);

    let last = pool.allocate(MIB, &stream).expect("room");
    assert_eq!(counters(&MemoryPool::default_of(device).expect("pool")), [0; 4], "apart");
    pool.destroy().expect("destroyed");
    last.free(&stream).expect("free, though the pool has ended");
    session.remove_memory_pools();
    let refused = MemoryPool::create(device, None).expect_err("none");
    assert_eq!(refused.code, code::NOT_SUPPORTED);
    assert!(!device.supports(Attribute::MemoryPools).expect("ask"));
    drop((stream, context));
    assert_eq!(session.outstanding(), 0);
}
