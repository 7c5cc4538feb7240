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
/// they come, then one table. Arguments: the peer, or `-` for none, and the number of rounds.
pub(crate) fn run(arguments: &[String]) -> ExitCode {
    let peer = arguments.first().filter(|peer| *peer != "-").map(Path::new);
    let rounds = arguments.get(1).map_or(Ok(ROUNDS), |rounds| rounds.parse());
    let Ok(rounds) = rounds else {
        eprintln!("usage: {BESIDE} PEER|- [ROUNDS]");
        return ExitCode::FAILURE;
    };
    match all_lines(peer, rounds) {
        Ok(lines) => {
            println!("\n{}", table(&lines));
            ExitCode::SUCCESS
        }
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::FAILURE
        }
    }
}

fn all_lines(peer: Option<&Path>, rounds: usize) -> Result<String, String> {
    let this = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut lines = String::new();
    for _ in 0..rounds {
        lines += &lines_of(&this, &WORDS)?;
        if let Some(peer) = peer {
            lines += &lines_of(peer, &["all"])?;
        }
    }
    lines += &lines_of(&this, &["fresh"])?;
    Ok(lines)
}

/// Runs a program; its output, which is passed on line by line.
fn lines_of(program: &Path, arguments: &[&str]) -> Result<String, String> {
    let name = program.display();
    let failed = |reason: &dyn std::fmt::Display| format!("{name}: {reason}");
    let mut command = Command::new(program);
    let child = command.args(arguments).stdout(Stdio::piped()).spawn();
    let mut child = child.map_err(|error| failed(&error))?;
    let mut lines = String::new();
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).lines() {
            let line = line.map_err(|error| failed(&error))?;
            println!("{line}");
            lines += &line;
            lines.push('\n');
        }
    }
    let status = child.wait().map_err(|error| failed(&error))?;
    if status.success() { Ok(lines) } else { Err(failed(&status)) }
}
