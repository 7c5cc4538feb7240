//! What a first pin consists of, and how long each part takes: the variants that the defaults are
//! chosen from.

use crate::{DEVICE, GIB, MIB, Pinned, pinned_with};
use alloc_core::host::HostConfig;
use alloc_host_cuda::{HostFlags, PinOptions, PinTimes, Touch};
use std::fs;
use std::time::{Duration, Instant};

/// How often each variant is measured; the fastest counts, as anything else on the machine only slows.
const ROUNDS: usize = 3;

/// Whether a variant of that name is wanted.
pub(crate) type Wanted<'a> = &'a dyn Fn(&str) -> bool;

/// Measures all variants that are wanted: their names begin with `parts`.
pub(crate) fn measure(wanted: Wanted<'_>) {
    if !wanted("parts") {
        return;
    }
    describe_machine();
    let driver = HostConfig { register: false, ..HostConfig::ours() };
    variant(wanted, "parts_driver", &driver, PinOptions::default(), GIB);
    for (touch, how) in [(Touch::First, "first"), (Touch::Meanwhile, "meanwhile")] {
        let options = PinOptions { touch, ..PinOptions::default() };
        for threads in [1, 4, 8, 16, 32] {
            let name = format!("parts_{how}_{threads}");
            variant(wanted, &name, &with_threads(threads), options, GIB);
        }
        let small = PinOptions { huge_pages: false, ..options };
        variant(wanted, &format!("parts_{how}_16_small_pages"), &with_threads(16), small, GIB);
        let own = PinOptions { flags: HostFlags::default(), ..options };
        variant(wanted, &format!("parts_{how}_16_not_portable"), &with_threads(16), own, GIB);
        for mib in [64, 128, 256, 512] {
            let config = HostConfig { piece_bytes_max: (mib * MIB) as u64, ..with_threads(16) };
            variant(wanted, &format!("parts_{how}_pieces_{mib}"), &config, options, GIB);
        }
        variant(wanted, &format!("parts_{how}_4_gib"), &with_threads(16), options, 4 * GIB);
    }
    for count in [2, 4, 8, 16] {
        side_by_side(wanted, count);
    }
    cross_border(wanted);
}

fn with_threads(register_threads: u16) -> HostConfig {
    HostConfig { register_threads, ..HostConfig::ours() }
}

/// What the figures depend on.
fn describe_machine() {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let nodes = read("/sys/devices/system/node/has_memory");
    let huge = read("/sys/kernel/mm/transparent_hugepage/enabled");
    println!(
        "{{\"name\":\"machine\",\"cores\":{cores},\"nodes\":\"{nodes}\",\"huge_pages\":\"{huge}\"}}"
    );
}

/// Time of a request that pins, and what it consists of.
fn pin(pinned: &Pinned, bytes: usize) -> (Duration, PinTimes) {
    let start = Instant::now();
    let buffer = pinned.buffer(bytes).expect("memory");
    let total = start.elapsed();
    drop(buffer);
    pinned.empty_cache().expect("given back");
    (total, pinned.pin_times())
}

/// The fastest of some pins, after one that starts the threads.
fn variant(wanted: Wanted<'_>, name: &str, config: &HostConfig, options: PinOptions, bytes: usize) {
    if !wanted(name) {
        return;
    }
    let pinned = pinned_with(config.clone(), options);
    pin(&pinned, 64 * MIB);
    let rounds = (0..ROUNDS).map(|_| pin(&pinned, bytes));
    let Some((total, times)) = rounds.min_by_key(|(total, _)| *total) else { return };
    let PinTimes { map, touch, register } = times;
    let [total, map, touch, register] = [total, map, touch, register].map(millis);
    println!(
        "{{\"name\":\"{name}\",\"map_ms\":{map:.2},\"touch_ms\":{touch:.2},\
         \"register_ms\":{register:.2},\"total_ms\":{total:.2}}}"
    );
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// A GiB in equal shares, pinned by as many threads at once: what could be won if registrations ran
/// at the same time.
fn side_by_side(wanted: Wanted<'_>, count: usize) {
    let name = format!("parts_threads_{count}");
    if !wanted(&name) {
        return;
    }
    let pinned = pinned_with(with_threads(1), PinOptions::default());
    let round = || {
        let start = Instant::now();
        let mut buffers = Vec::new();
        std::thread::scope(|scope| {
            let one = || pinned.buffer(GIB / count).expect("memory");
            let threads: Vec<_> = (0..count).map(|_| scope.spawn(one)).collect();
            buffers.extend(threads.into_iter().map(|thread| thread.join().expect("no panic")));
        });
        let total = start.elapsed();
        drop(buffers);
        pinned.empty_cache().expect("given back");
        total
    };
    let fastest = (0..ROUNDS).map(|_| round()).min().unwrap_or_default();
    println!("{{\"name\":\"{name}\",\"total_ms\":{:.2}}}", millis(fastest));
}

/// Whether the driver copies from a range that two registrations share: 1 or 0. This crate's own
/// copies are cut there, those of others are not.
fn cross_border(wanted: Wanted<'_>) {
    if !wanted("parts_cross_border") {
        return;
    }
    let pieces = HostConfig { piece_bytes_max: 4 * MIB as u64, ..HostConfig::ours() };
    let (pieces, whole) = (crate::pinned(pieces), crate::pinned(HostConfig::ours()));
    let source = pieces.buffer(16 * MIB).expect("memory");
    let stream = whole.streams().create(DEVICE).expect("a stream");
    let target = whole.buffer(16 * MIB).expect("memory");
    let copied = match target.copy_from_address(source.addr().get(), &stream) {
        Ok(copy) => copy.wait().map(drop).map_err(|error| error.to_string()),
        Err(refused) => Err(refused.error.to_string()),
    };
    let (crosses, why) = match copied {
        Ok(()) => (1, String::new()),
        Err(error) => (0, error.replace('"', "'")),
    };
    println!("{{\"name\":\"parts_cross_border\",\"copied\":{crosses},\"error\":\"{why}\"}}");
}
