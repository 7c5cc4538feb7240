//! This crate's allocator beside another program that measures the same, in turn, in one run.

use crate::table::table;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

/// The word that makes this program measure beside another.
pub(crate) const BESIDE: &str = "beside";

/// Rounds unless a number is named.
const ROUNDS: usize = 2;

/// What both measure.
const WORDS: [&str; 6] = ["ours", "hit", "recorded", "threads", "first_pin", "copy"];

/// Runs this program and `PEER all` in turn, then first pins in fresh processes; prints their lines as
/// they come, then one table of what succeeded. Arguments: the peer, or `-` for none, and the number of rounds.
pub(crate) fn run(arguments: &[String]) -> ExitCode {
    let peer = arguments.first().filter(|peer| *peer != "-").map(Path::new);
    let rounds = arguments.get(1).map_or(Ok(ROUNDS), |rounds| rounds.parse());
    let Ok(rounds) = rounds else {
        eprintln!("usage: {BESIDE} PEER|- [ROUNDS]");
        return ExitCode::FAILURE;
    };
    let this = std::env::current_exe().expect("this program");
    let mut runs = Vec::new();
    for _ in 0..rounds {
        runs.push((this.as_path(), WORDS.as_slice()));
        runs.extend(peer.map(|peer| (peer, ["all"].as_slice())));
    }
    runs.push((&this, &["fresh"]));
    let (mut lines, mut failures) = (String::new(), 0);
    for (program, arguments) in runs {
        if let Err(reason) = run_one(program, arguments, &mut lines) {
            eprintln!("{}: {reason}", program.display());
            failures += 1;
        }
    }
    println!("\n{}", table(&lines));
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs a program. Its output is passed on line by line, and added to `lines`, also if it fails.
fn run_one(program: &Path, arguments: &[&str], lines: &mut String) -> Result<(), String> {
    let mut command = Command::new(program);
    let child = command.args(arguments).stdout(Stdio::piped()).spawn();
    let mut child = child.map_err(|error| error.to_string())?;
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            println!("{line}");
            lines.push_str(&line);
            lines.push('\n');
        }
    }
    let status = child.wait().map_err(|error| error.to_string())?;
    if status.success() { Ok(()) } else { Err(status.to_string()) }
}
