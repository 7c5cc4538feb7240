//! The program as a user meets it: output, messages, exit codes.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};

use flate2::Compression;
use flate2::write::GzEncoder;
use tempfile::TempDir;

use crate::{golden_dir, trace};

const HEADER: &str = "time_us,op,id,bytes,stream";

/// 20 MiB and 40 MiB, then 40 MiB again once the first two are gone.
const ROWS: &str = "\
0,segment_alloc,16777216,20971520,0
1,alloc,1,20971520,0
20,segment_alloc,67108864,41943040,0
21,alloc,2,41943040,0
30,free,1,,
31,free,2,,
40,alloc,3,41943040,0
";

/// Runs the program in `directory`.
fn lab(directory: &TempDir, args: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_alloc-lab");
    let run = Command::new(program).args(args).current_dir(directory.path()).output();
    run.expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// A directory that holds `t.csv` with these rows.
fn with_trace(rows: &str) -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    write(&directory, "t.csv", format!("{HEADER}\n{rows}").as_bytes());
    directory
}

fn write(directory: &TempDir, name: &str, content: &[u8]) {
    std::fs::write(directory.path().join(name), content).expect("a file");
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(content).expect("memory");
    encoder.finish().expect("memory")
}

/// The one object on the standard output.
fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// What the program says on `replay t.csv` of these rows; nothing may be printed but that.
#[track_caller]
fn assert_refused(rows: &str, message: &str) {
    let output = lab(&with_trace(rows), &["replay", "t.csv"]);
    assert_eq!(text(&output.stderr), format!("alloc-lab: {message}\n"));
    assert_eq!((text(&output.stdout).as_str(), output.status.code()), ("", Some(2)));
}

#[test]
fn replay_compares_the_standard_configurations() {
    let output = lab(&with_trace(ROWS), &["replay", "t.csv"]);
    let out = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(out.starts_with("t.csv: 5 operations in 0.000 s, peak requested 60.00 MiB"), "{out}");
    for line in ["  pytorch  ", "  pytorch expandable_segments:True  ", "  ours  "] {
        assert_eq!(out.matches(line).count(), 1, "{out}");
    }
    assert!(out.ends_with("pytorch: took exactly the 2 recorded segments\n"), "{out}");
}

#[test]
fn replay_prints_json() {
    let args = ["replay", "t.csv", "--policy", "pytorch", "--json"];
    let row = json(&lab(&with_trace(ROWS), &args));
    for (key, value) in [
        ("file", "t.csv".into()),
        ("policy", "pytorch".into()),
        ("conf", "".into()),
        ("ops", 5.into()),
        ("requested_peak", 62_914_560.into()),
        ("allocated_peak", 62_914_560.into()),
        ("reserved_peak", 62_914_560.into()),
        ("segments", 2.into()),
        ("driver_calls", 2.into()),
        ("feed", "exact".into()),
        ("error", serde_json::Value::Null),
    ] {
        assert_eq!(row[key], value, "{key}");
    }
    assert!(row["stall_ms"].as_f64().expect("a number") > 0.05);
    assert!(row["ns_per_op"].as_f64().expect("a number") > 0.0);
}

#[test]
fn gzip_is_known_by_its_content() {
    let directory = with_trace("");
    let content = gzip(format!("{HEADER}\n{ROWS}").as_bytes());
    write(&directory, "t.csv", &content);
    let args = ["replay", "t.csv", "--policy", "ours", "--json"];
    assert_eq!(json(&lab(&directory, &args))["ops"], 5);

    write(&directory, "t.csv", &content[..content.len() - 12]);
    let output = lab(&directory, &args);
    let message = text(&output.stderr);
    assert!(message.starts_with("alloc-lab: t.csv:") && message.contains("cannot read on"));
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn recorded_addresses_can_be_left_out_and_differences_are_named() {
    let feed = |rows: &str, more: &[&str]| {
        let args = [&["replay", "t.csv", "--policy", "pytorch", "--json"], more].concat();
        json(&lab(&with_trace(rows), &args))["feed"].clone()
    };
    assert_eq!(feed(ROWS, &["--no-feed"]), serde_json::Value::Null);
    let other = ROWS.replace("67108864,41943040", "67108864,44040192");
    assert_eq!(feed(&other, &[]), "segment 2 has 41943040 bytes, the recorded one 44040192");
    let more = format!("{ROWS}50,segment_alloc,134217728,2097152,0\n");
    assert_eq!(feed(&more, &[]), "only 2 of the 3 recorded segments were taken");
    let fewer = ROWS.replace("20,segment_alloc,67108864,41943040,0\n", "");
    assert_eq!(
        feed(&fewer, &[]),
        "segment 2 of 41943040 bytes was taken after the 1 recorded ones"
    );
}

/// PyTorch emptied its cache before it took the second segment; a replay does not, and so still
/// holds the first one.
#[test]
fn recorded_segments_that_overlap_are_a_difference() {
    let rows = "0,segment_alloc,16777216,20971520,0\n0,alloc,1,5242880,0\n0,free,1,,\n\
        9,segment_alloc,16777216,20971520,0\n9,alloc,2,6291456,0\n9,alloc,3,20971520,0\n";
    let args = ["replay", "t.csv", "--policy", "pytorch", "--json"];
    let row = json(&lab(&with_trace(rows), &args));
    let feed = row["feed"].as_str().expect("text").to_owned();
    assert!(feed.starts_with("segment 2 lies at 0x"), "{feed}");
    assert!(feed.ends_with("the recorded one at 0x1000000"), "{feed}");
    assert_eq!((&row["ops"], &row["error"]), (&4.into(), &serde_json::Value::Null));
}

#[test]
fn broken_files_stop_with_their_line() {
    let free = "0,alloc,1,512,0\n1,free,2,512,0\n";
    assert_refused(free, "t.csv:3: free of id 2, which is not live: never allocated");
    let twice = "0,alloc,1,512,0\n1,free,1,512,0\n2,free,1,512,0\n";
    assert_refused(twice, "t.csv:4: free of id 1, which is not live: freed at line 3");
    let again = "0,alloc,1,512,0\n1,alloc,1,512,0\n";
    assert_refused(again, "t.csv:3: alloc of id 1, live since line 2");
    let row = "0,alloc,1,many,0\n";
    assert_refused(row, "t.csv:2: bytes is not a number: \"many\"");
    let op = "0,realloc,1,1,0\n";
    assert_refused(op, "t.csv:2: unknown op \"realloc\": expected alloc, free or segment_alloc");
}

#[test]
fn a_missing_file_and_wrong_usage_say_so() {
    let directory = with_trace(ROWS);
    let fails = |args: &[&str], message: &str| {
        let output = lab(&directory, args);
        let error = text(&output.stderr);
        assert!(error.contains(message), "{args:?}: {error}");
        assert_eq!(output.status.code(), Some(2), "{args:?}");
    };
    fails(&["replay", "none.csv"], "alloc-lab: none.csv: cannot open: No such file");
    fails(&["replay"], "<FILE>...");
    fails(&["replay", "t.csv", "--policy", "best"], "[possible values: pytorch, ours]");
    fails(&["replay", "t.csv", "--capacity", "16X"], "\"16X\" is not a size");
    fails(&["replay", "t.csv", "--capacity", "33T"], "can have at most 32 TiB");
    fails(
        &["replay", "t.csv", "--policy", "ours", "--conf", "max_split:1"],
        "alloc-lab: --conf: setting `max_split`",
    );
    fails(&["segments", "t.csv", "--at", "6"], "--at 6: t.csv has only 5 operations");
    fails(&["segments", "t.csv", "--at", "soon"], "expected a number of operations");
    fails(&["verify", "t.csv"], "alloc-lab: t.csv: not a recording: ");
    fails(&["verify", "."], "alloc-lab: .: no recordings (*.json, *.json.gz) in there");
    fails(&["replay", "t.csv", "--timeline", "no/such/dir.svg"], "cannot write no/such/dir.svg");
}

#[test]
fn a_workload_that_does_not_fit_stops_with_line_and_report() {
    let args = ["replay", "t.csv", "--policy", "pytorch", "--capacity", "48MiB"];
    let directory = with_trace(ROWS);
    let output = lab(&directory, &args);
    let error = text(&output.stderr);
    assert!(
        error.starts_with(
            "alloc-lab: t.csv:5: does not fit: an allocation of 40.00 MiB (41943040 bytes) failed \
             with pytorch on a device of 48.00 MiB, after 1 operations\n  out of memory on device 0"
        ),
        "{error}"
    );
    assert!(text(&output.stdout).contains("pytorch: STOPPED at line 5"));
    assert_eq!(output.status.code(), Some(1));

    let row = json(&lab(&directory, &[&args[..], &["--json"]].concat()));
    assert_eq!((&row["ops"], &row["ns_per_op"]), (&1.into(), &serde_json::Value::Null));
    assert!(row["error"].as_str().expect("text").starts_with("t.csv:5: does not fit"));
}

#[test]
fn sizes_near_the_end_of_64_bits_do_not_fit_anywhere() {
    let rows = format!("0,alloc,1,{},0\n", u64::MAX);
    for policy in ["pytorch", "ours"] {
        let output = lab(&with_trace(&rows), &["replay", "t.csv", "--policy", policy]);
        assert!(text(&output.stderr).starts_with("alloc-lab: t.csv:2: does not fit: "));
        assert_eq!(output.status.code(), Some(1));
    }
}

#[test]
fn the_timeline_is_a_small_drawing_with_a_legend() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = trace("unet_res").display().to_string();
    let args = ["replay", &file, "--policy", "pytorch", "--timeline", "out.svg"];
    let output = lab(&directory, &args);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let svg = read(&directory.path().join("out.svg"));
    assert!(svg.len() < 300_000);
    for part in [
        "unet_res",
        "memory, GiB",
        "time, s",
        "requested, peak 7.46 GiB",
        "reserved by pytorch, peak 12.60 GiB (1.689 × requested)",
    ] {
        assert!(svg.contains(part), "{part}");
    }
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).expect("a file")
}

#[test]
fn verify_is_exact_and_counts() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = golden_dir().join("default-large.json.gz").display().to_string();
    let output = lab(&directory, &["verify", &file]);
    let out = text(&output.stdout);
    assert!(out.ends_with("1 of 1 files exact, 1,409 operations compared\n"), "{out}");
    assert_eq!(output.status.code(), Some(0));
    let row = json(&lab(&directory, &["verify", &file, "--json"]));
    assert_eq!((&row["exact"], &row["trace_entries"]), (&true.into(), &2046.into()));
}

#[test]
fn verify_names_the_first_difference() {
    let directory = tempfile::tempdir().expect("a directory");
    let recording = serde_json::json!({
        "name": "t", "conf": "", "streams": 1, "device_total": 1 << 30, "stat_keys": ["num_ooms"],
        "ops": [
            {"op": ["alloc", 1, 1, 0], "ptr": 2_097_152, "stats": [0]},
            {"op": ["free", 1], "ptr": null, "stats": [1]},
        ],
        "trace": [
            ["segment_alloc", 2_097_152, 2_097_152, 0], ["alloc", 2_097_152, 1, 0],
            ["free_requested", 2_097_152, 1, 0], ["free_completed", 2_097_152, 1, 0],
        ],
    });
    write(&directory, "t.json", recording.to_string().as_bytes());
    let output = lab(&directory, &["verify", "t.json"]);
    let out = text(&output.stdout);
    assert!(
        out.contains("t.json: first difference: operation 1: num_ooms: expected 1, got 0\n"),
        "{out}"
    );
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn fit_finds_what_replay_confirms() {
    let directory = with_trace(ROWS);
    let row = json(&lab(&directory, &["fit", "t.csv", "--policy", "pytorch", "--json"]));
    assert_eq!(
        (&row["capacity"], &row["requested_peak"]),
        (&62_914_560.into(), &62_914_560.into())
    );
    let replays = |capacity: &str| {
        let args = ["replay", "t.csv", "--policy", "pytorch", "--capacity", capacity];
        lab(&directory, &args).status.code()
    };
    assert_eq!((replays("60MiB"), replays("58MiB")), (Some(0), Some(1)));
    let table = text(&lab(&directory, &["fit", "t.csv"]).stdout);
    assert!(table.contains("t.csv") && table.contains("ours"), "{table}");
}

#[test]
fn segments_draws_text_and_pictures() {
    let directory = with_trace(ROWS);
    let args = ["segments", "t.csv", "--policy", "pytorch", "--at", "3"];
    let output = lab(&directory, &args);
    let out = text(&output.stdout);
    assert!(
        out.starts_with("t, pytorch, after 3 operations\n2 segments, 60.00 MiB, 40.00 MiB alloc")
    );
    // The recorded addresses, and half a segment in use.
    assert!(
        out.contains("  0x1000000 20.00 MiB") && out.contains("  0x4000000 40.00 MiB"),
        "{out}"
    );
    let expandable = ["--conf", "expandable_segments:True", "--svg", "map.svg"];
    let output = lab(&directory, &[&args[..], &expandable].concat());
    assert_eq!((text(&output.stdout).as_str(), output.status.code()), ("", Some(0)));
    assert!(read(&directory.path().join("map.svg")).contains("pages 3 × 20.00 MiB"));
}

/// A recording is drawn with its own settings, and only as far as it is exact.
#[test]
fn segments_draws_recordings() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = golden_dir().join("exp-one.json.gz");
    let file = file.to_str().expect("UTF-8");
    let output = lab(&directory, &["segments", file, "--at", "50"]);
    let out = text(&output.stdout);
    let title = "exp-one, pytorch expandable_segments:True, after 50 operations\n";
    assert!(out.starts_with(title) && out.contains(", expandable, pages "), "{out}");
    let peak = text(&lab(&directory, &["segments", file]).stdout);
    assert!(peak.starts_with("exp-one, pytorch expandable_segments:True, after "), "{peak}");
    let output = lab(&directory, &["segments", file, "--svg", "map.svg"]);
    assert_eq!((text(&output.stdout).as_str(), output.status.code()), ("", Some(0)));
    assert!(read(&directory.path().join("map.svg")).starts_with("<svg"));
    for (wrong, why) in [
        (&["--policy", "ours"][..], "leave --policy, --conf, --capacity and --no-feed out"),
        (&["--capacity", "4GiB"], "leave --policy"),
        (&["--at", "99999999"], "operations"),
    ] {
        let output = lab(&directory, &[&["segments", file], wrong].concat());
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
        assert!(text(&output.stderr).contains(why), "{wrong:?}");
    }
    write(&directory, "broken.json", b"{\"name\": 1}");
    let output = lab(&directory, &["segments", "broken.json"]);
    assert!(text(&output.stderr).contains("broken.json: not a recording"));
}

/// Changed workloads stand beside the original, in tables, JSON and searches.
#[test]
fn workloads_can_be_varied() {
    let directory = with_trace(ROWS);
    let lines = |args: &[&str]| {
        let output = lab(&directory, args);
        assert_eq!(output.status.code(), Some(0));
        let lines = text(&output.stdout);
        let rows = lines.lines().map(|line| serde_json::from_str(line).expect("an object"));
        rows.collect::<Vec<serde_json::Value>>()
    };
    let vary = ["--vary", "scale:50", "--vary", "jitter:7", "--json", "--policy", "ours"];
    let rows = lines(&[&["replay", "t.csv"], &vary[..]].concat());
    let files: Vec<_> = rows.iter().map(|row| row["file"].as_str().expect("a file")).collect();
    assert_eq!(files, ["t.csv", "t.csv (scale:50)", "t.csv (jitter:7)"]);
    assert_eq!(rows[1]["requested_peak"], 31_457_280);
    assert_ne!(rows[2]["requested_peak"], rows[0]["requested_peak"]);
    let rows = lines(&["fit", "t.csv", "--vary", "all", "--json"]);
    assert_eq!(rows.len(), 11);
    let output = lab(&directory, &["fit", "t.csv", "--vary", "more"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("scale:PERCENT"));
}

#[test]
fn pages_says_what_pages_would_take() {
    let directory = with_trace(ROWS);
    let output =
        lab(&directory, &["pages", "t.csv", "--page", "8MiB", "--page", "32MiB", "--json"]);
    let rows: Vec<serde_json::Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let figures: Vec<_> =
        rows.iter().map(|row| [&row["reserved"], &row["created"], &row["moved"]]).collect();
    // 20 and 40 MiB side by side, then 40 where both were.
    assert_eq!(figures, [[64 << 20, 8, 0], [64 << 20, 2, 0]]);
    assert!(rows[0]["stall_ms"].as_f64() > rows[1]["stall_ms"].as_f64());
    let table = text(&lab(&directory, &["pages", "t.csv", "--vary", "scale:50"]).stdout);
    assert_eq!(table.matches("t.csv").count(), 2 * 7, "{table}");
    for wrong in [["--page", "0"], ["--page", "many"], ["--told", "-1"], ["--told", "long"]] {
        let output = lab(&directory, &[&["pages", "t.csv"][..], &wrong].concat());
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
        assert!(text(&output.stderr).contains(wrong[1]), "{wrong:?}");
    }
}

#[test]
fn help_teaches() {
    let directory = tempfile::tempdir().expect("a directory");
    for (args, part) in [
        (&["--help"][..], "alloc-lab verify crates/alloc-lab/tests/golden"),
        (&["replay", "--help"], "--timeline resnet.svg"),
        (&["verify", "--help"], "Nothing is skipped"),
        (&["fit", "--help"], "one that is 2 MiB smaller"),
        (&["pages", "--help"], "--told 3 --page 4MiB"),
        (&["segments", "--help"], "--at 40000"),
        (&["bench", "--help"], "bench churn 1024 1000000 22 7 --json"),
    ] {
        let output = lab(&directory, args);
        assert!(text(&output.stdout).contains(part), "{args:?}");
        assert_eq!(output.status.code(), Some(0));
    }
    let general = text(&lab(&directory, &["--help"]).stdout);
    assert!(general.contains("Exit codes:"));
}
