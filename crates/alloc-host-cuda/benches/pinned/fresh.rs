//! First pins of a process: ours and the driver's in turn, each in a process of its own.
//!
//! What a process pins first takes longer than what it pins later, here and in the driver; and what one
//! process does, the next on the same machine need not pay for. So both are measured alike, some times
//! over, and the second pin of each process beside the first.

use crate::{DEVICE, GIB, is_wanted, pinned_with};
use alloc_core::host::HostConfig;
use alloc_host_cuda::{HostFlags, PinOptions, PinTimes};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The word that makes this program a child.
pub(crate) const CHILD: &str = "pin-in-child";

/// Who pins: the allocator as it comes, or `cuMemHostAlloc` alone, which `cudaHostAlloc` calls.
const PINNERS: [&str; 2] = ["ours", "driver"];

/// GiB, and processes of each kind that pin so much.
const SIZES: [(usize, usize); 2] = [(1, 5), (4, 3)];

/// Milliseconds of one pin, and of its parts where it has some.
#[derive(Clone, Copy)]
struct Pin {
    total: f64,
    map: f64,
    touch: f64,
    register: f64,
}

/// The first and the second pin of a process.
type Pins = [Pin; 2];

/// Measures first pins of 1 and 4 GiB, if wanted.
pub(crate) fn measure(words: &[String]) {
    let sizes = SIZES.map(|(gib, rounds)| (gib, rounds, format!("fresh_pin_{gib}_gib")));
    for (gib, rounds, _) in sizes.into_iter().filter(|(_, _, name)| is_wanted(words, name)) {
        let rounds: Vec<[Pins; 2]> =
            (0..rounds).map(|_| PINNERS.map(|pinner| in_child(pinner, gib))).collect();
        for (nth, when) in ["fresh", "later"].into_iter().enumerate() {
            report(&format!("{when}_pin_{gib}_gib"), &rounds, nth);
        }
    }
}

/// Prints what the nth pins took, and what of it was which part.
fn report(name: &str, rounds: &[[Pins; 2]], nth: usize) {
    let mut medians = [0.0; 2];
    for (who, pinner) in PINNERS.into_iter().enumerate() {
        let part = |part: fn(&Pin) -> f64| -> Vec<f64> {
            rounds.iter().map(|both| part(&both[who][nth])).collect()
        };
        let totals = part(|pin| pin.total);
        medians[who] = median(&totals);
        let (median, worst) = (medians[who], totals.iter().copied().fold(0.0, f64::max));
        let parts = match pinner {
            "ours" => format!(
                ",\"map_ms\":{:.1?},\"touch_ms\":{:.1?},\"register_ms\":{:.1?}",
                part(|pin| pin.map),
                part(|pin| pin.touch),
                part(|pin| pin.register)
            ),
            _ => String::new(),
        };
        println!(
            "{{\"policy\":\"{pinner}\",\"name\":\"{name}\",\"ms\":{totals:.1?},\
             \"median_ms\":{median:.1},\"worst_ms\":{worst:.1}{parts}}}"
        );
    }
    let [ours, driver] = medians;
    println!("{{\"name\":\"{name}\",\"times_faster\":{:.2}}}", driver / ours);
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Has a new process pin twice.
fn in_child(pinner: &str, gib: usize) -> Pins {
    let program = std::env::current_exe().expect("this program");
    let bytes = (gib * GIB).to_string();
    let mut command = Command::new(program);
    let output = command.args([CHILD, pinner, &bytes]).stderr(Stdio::inherit()).output();
    let output = output.expect("this program starts again");
    assert!(output.status.success(), "a child failed: {}", output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    let numbers: Vec<f64> =
        text.split_whitespace().map(|number| number.parse().expect("a number")).collect();
    let pin = |at: usize| Pin {
        total: numbers[at],
        map: numbers[at + 1],
        touch: numbers[at + 2],
        register: numbers[at + 3],
    };
    [pin(0), pin(4)]
}

/// What the child does: pins, gives back, pins again, and prints how long each took.
pub(crate) fn child(arguments: &[String]) {
    let [pinner, bytes] = arguments else { panic!("{CHILD} takes who pins, and how much") };
    let bytes = bytes.parse().expect("bytes");
    let (config, options) = match pinner.as_str() {
        "ours" => (HostConfig::ours(), PinOptions::default()),
        _ => {
            let options = PinOptions { flags: HostFlags::default(), ..PinOptions::default() };
            (HostConfig { register: false, ..HostConfig::ours() }, options)
        }
    };
    let pinned = pinned_with(config, options);
    // Makes the context, as any program has done that is about to copy.
    drop(pinned.streams().create(DEVICE).expect("a stream"));
    for _ in 0..2 {
        let start = Instant::now();
        let buffer = pinned.buffer(bytes).expect("memory");
        let total = start.elapsed();
        drop(buffer);
        pinned.empty_cache().expect("given back");
        let PinTimes { map, touch, register } = pinned.pin_times();
        let [total, map, touch, register] = [total, map, touch, register].map(millis);
        println!("{total} {map} {touch} {register}");
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
