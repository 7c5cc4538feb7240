//! `alloc-lab bench`, beside the driver that measures the peers.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Output};

use crate::trace;

/// The arguments of every mode, small.
const MODES: [&[&str]; 7] = [
    &["pingpong", "1024", "40"],
    &["churn", "16", "400", "22", "7"],
    &["threads", "3", "16", "200", "20"],
    &["shared", "3", "16", "200", "20"],
    &["live", "50", "100"],
    &["replay", "t.csv"],
    &["whole", "t.csv"],
];

const TRACE: &str = "time_us,op,id,bytes,stream\n0,alloc,7,600,0\n1,alloc,9,3145728,1\n2,free,7,,\n\
    3,free,9,,\n4,alloc,10,1000,0\n";

fn bench(args: &[&str]) -> Output {
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::write(directory.path().join("t.csv"), TRACE).expect("a file");
    std::fs::write(directory.path().join("empty.csv"), &TRACE[..27]).expect("a file");
    let mut command = Command::new(env!("CARGO_BIN_EXE_alloc-lab"));
    // A GPU that this machine may have is not to be found.
    command.arg("bench").args(args).env("CUDA_VISIBLE_DEVICES", "-1");
    command.current_dir(directory.path()).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

/// The names in a line of JSON, or in a format string of C, in order.
fn names(line: &str) -> Vec<String> {
    let plain = line.replace('\\', "");
    let parts: Vec<_> = plain.split("\":").collect();
    let name = |part: &&str| part.rsplit('"').next().unwrap_or_default().to_owned();
    parts[..parts.len() - 1].iter().map(name).collect()
}

/// What the peers' driver prints, by mode: the names of the fields.
fn peer_fields() -> BTreeMap<String, Vec<String>> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let source = std::fs::read_to_string(root.join("../../peers/peer.cpp")).expect("a source");
    let mut fields = BTreeMap::new();
    for line in source.lines().filter(|line| line.contains("printf(\"{")) {
        // Threaded modes share one format string, whose mode is an argument.
        let (_, rest) = line.split_once("\\\"mode\\\":\\\"").expect("a mode");
        let modes = match rest.split_once('\\').expect("a quote").0 {
            "%s" => vec!["threads", "shared"],
            mode => vec![mode],
        };
        for mode in modes {
            fields.insert(mode.to_owned(), names(line));
        }
    }
    fields
}

#[test]
fn every_mode_prints_the_fields_of_the_peers_before_its_own() {
    let peers = peer_fields();
    assert_eq!(peers.len(), 6);
    for args in MODES {
        let output = bench(&[args, &["--json"]].concat());
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
        let mut fields = names(text(&output.stdout));
        // Peers do not tell hits from misses.
        let hits: &[&str] = match args[0] {
            "replay" => &["misses", "hit_p50_ns", "hit_p99_ns"],
            _ => &[],
        };
        let own = fields.split_off(fields.len() - hits.len() - 3);
        assert_eq!(own, [hits, &["policy", "api", "backend"]].concat());
        match peers.get(args[0]) {
            Some(theirs) => assert_eq!(&fields, theirs),
            None => assert_eq!(args[0], "live"),
        }
    }
}

#[test]
fn every_mode_runs_with_every_policy_and_interface() {
    for args in MODES {
        for policy in ["pytorch", "ours"] {
            for api in ["handle", "raw"] {
                let own = ["--policy", policy, "--api", api, "--json", "--rounds", "2"];
                let output = bench(&[args, &own].concat());
                assert_eq!(output.status.code(), Some(0), "{args:?} {own:?}");
                let lines: Vec<_> = text(&output.stdout).lines().collect();
                assert_eq!(lines.len(), 2);
                let row: serde_json::Value = serde_json::from_str(lines[0]).expect("JSON");
                assert_eq!((&row["policy"], &row["api"]), (&policy.into(), &api.into()));
                assert_eq!((&row["mode"], &row["backend"]), (&args[0].into(), &"mock".into()));
            }
        }
    }
}

#[test]
fn the_figures_are_those_of_the_work() {
    let row = |args: &[&str]| -> serde_json::Value {
        serde_json::from_slice(&bench(&[args, &["--json"]].concat()).stdout).expect("JSON")
    };
    let replay = row(&["replay", "t.csv", "--policy", "pytorch"]);
    assert_eq!((&replay["file"], &replay["ops"]), (&"t.csv".into(), &5.into()));
    assert_eq!(replay["requested_peak"], 600 + 3_145_728);
    // A small segment for the first stream, a large one for the second.
    assert_eq!(replay["reserved_peak"], (2 << 20) + (20 << 20));
    assert!(replay["p50_ns"].as_f64() <= replay["p99_ns"].as_f64());
    assert!(replay["max_us"].as_f64() > Some(0.0));
    // The last request finds the block of the first.
    assert_eq!(replay["misses"], 2);
    assert!(replay["hit_p50_ns"].as_f64() <= replay["hit_p99_ns"].as_f64());
    let whole = row(&["whole", "t.csv", "--policy", "pytorch"]);
    for same in ["file", "ops", "requested_peak", "reserved_peak"] {
        assert_eq!(whole[same], replay[same], "{same}");
    }
    assert!(whole["total_ms"].as_f64() > Some(0.0));
    let pingpong = row(&["pingpong", "64MiB", "10"]);
    assert_eq!(pingpong["bytes"], 64 << 20);
    assert!(pingpong["ns_per_pair"].as_f64() > Some(0.0));
    let churn = row(&["churn", "16", "400", "22", "7", "--conf", "expandable_segments:False"]);
    assert_eq!(churn["conf"], "expandable_segments:False");
    assert_eq!((&churn["slots"], &churn["maxlog"]), (&16.into(), &22.into()));
    let live = row(&["live", "1000", "10"]);
    assert!(live["reserved_peak"].as_u64() > Some(1000 * 512));
}

#[test]
fn without_json_it_is_a_table() {
    let output = bench(&["replay", "t.csv"]);
    let table = text(&output.stdout);
    assert!(table.starts_with("ours, handle interface, mock device\n"), "{table}");
    assert!(table.contains("  replay: t.csv   "), "{table}");
}

#[test]
fn wrong_arguments_say_so() {
    let fails = |args: &[&str], code: i32, message: &str| {
        let output = bench(args);
        let error = text(&output.stderr);
        assert!(error.contains(message), "{args:?}: {error}");
        assert_eq!(output.status.code(), Some(code), "{args:?}");
        assert_eq!(text(&output.stdout), "");
    };
    fails(&[], 2, "alloc-lab bench");
    fails(&["ping"], 2, "unrecognized subcommand 'ping'");
    fails(&["pingpong", "1024"], 2, "<N>");
    fails(&["pingpong", "0", "1"], 2, "a size of 0 bytes makes no sense here");
    fails(&["pingpong", "1", "0"], 2, "<N>");
    fails(&["churn", "8", "8", "9", "1"], 2, "9 is not in 10..=32");
    fails(&["churn", "8", "8", "33", "1"], 2, "33 is not in 10..=32");
    fails(&["churn", "8", "8", "22"], 2, "<SEED>");
    fails(&["threads", "0", "8", "8", "22"], 2, "0 is not in 1..=1024");
    fails(&["shared", "2", "8", "8", "22", "1"], 2, "unexpected argument '1'");
    fails(&["replay", "none.csv"], 2, "alloc-lab: none.csv: cannot open");
    fails(&["replay", "empty.csv"], 2, "alloc-lab: empty.csv: has no operations to measure");
    fails(&["whole", "none.csv"], 2, "alloc-lab: none.csv: cannot open");
    fails(&["whole", "empty.csv"], 2, "alloc-lab: empty.csv: has no operations to measure");
    fails(&["live", "1", "1", "--conf", "x:1"], 2, "alloc-lab: --conf: setting `x`");
    fails(&["live", "1", "1", "--rounds", "0"], 2, "--rounds");
    fails(&["pingpong", "1TiB", "1"], 1, "alloc-lab: out of memory on device 0");
    fails(&["pingpong", "8", "1", "--backend", "cuda"], 77, "--backend cuda needs a GPU: ");
}

#[test]
fn replay_on_a_gpu_needs_one() {
    let file = trace("unet_res").display().to_string();
    let run = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_alloc-lab"));
        command.args(["replay", &file, "--backend", "cuda"]).args(more);
        command.env("CUDA_VISIBLE_DEVICES", "-1").output().expect("the program starts")
    };
    let output = run(&[]);
    assert!(text(&output.stderr).contains("--backend cuda needs a GPU: "));
    assert_eq!(output.status.code(), Some(77));
    let output = run(&["--capacity", "1GiB"]);
    assert!(text(&output.stderr).contains("describe a simulated device"));
    assert_eq!(output.status.code(), Some(2));
}
