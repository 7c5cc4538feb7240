//! Traces of device-memory operations: `time_us,op,id,bytes,stream`, one a line.
//!
//! | `op` | meaning |
//! |---|---|
//! | `alloc` | the program allocates `bytes` on `stream`; `id` names the allocation |
//! | `free` | the program frees `id`; `bytes` and `stream` may be empty |
//! | `segment_alloc` | the recorded allocator took a segment of `bytes` at address `id` from the driver |
//!
//! The first line is the header. Numbers are decimal. Empty lines are skipped.

use std::io::BufRead;
use std::path::Path;

use alloc_core::backend::SEGMENT_ALIGN;

use crate::error::Failure;
use crate::workload::{RecordedSegment, Workload, WorkloadBuilder};

/// What the first line must be.
pub const HEADER: &str = "time_us,op,id,bytes,stream";

/// Reads a trace from `input`, which is called `path` in messages.
///
/// # Errors
/// [`Failure::Input`] with the line of the first thing that is wrong.
pub fn read(path: &Path, mut input: impl BufRead) -> Result<Workload, Failure> {
    let mut builder = WorkloadBuilder::new(path);
    let mut buffer = Vec::new();
    let mut line = 0u32;
    loop {
        buffer.clear();
        line = line.checked_add(1).ok_or_else(|| Failure::input(path, "too many lines"))?;
        let fail = |what: String| Failure::input_at(path, line.into(), what);
        let read = input.read_until(b'\n', &mut buffer);
        if read.map_err(|e| fail(format!("cannot read on: {e}")))? == 0 {
            break;
        }
        let text = std::str::from_utf8(&buffer).map_err(|_| fail("not text".to_owned()))?.trim();
        if line == 1 {
            check_header(text).map_err(fail)?;
        } else if !text.is_empty() {
            let row = parse_row(text).map_err(fail)?;
            apply(&mut builder, line, row)?;
        }
    }
    if line == 1 {
        return Err(Failure::input(path, "is empty"));
    }
    Ok(builder.finish())
}

/// A row as it stands in the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Row {
    Alloc { time_us: u64, id: u64, bytes: u64, stream: u32 },
    Free { time_us: u64, id: u64 },
    Segment(RecordedSegment),
}

fn check_header(text: &str) -> Result<(), String> {
    if text.trim_start_matches('\u{feff}') == HEADER {
        return Ok(());
    }
    Err(format!("not a trace: the first line must be {HEADER:?}, not {}", quote(text)))
}

fn parse_row(text: &str) -> Result<Row, String> {
    let mut columns = text.split(',');
    let mut column = || columns.next();
    let (Some(time), Some(op), Some(id), Some(bytes), Some(stream), None) =
        (column(), column(), column(), column(), column(), column())
    else {
        let found = text.split(',').count();
        return Err(format!("{found} columns instead of 5 ({HEADER}): {}", quote(text)));
    };
    let time_us = number("time_us", time)?;
    let id = number("id", id)?;
    match op {
        "alloc" => {
            let stream = number("stream", stream)?;
            let stream = u32::try_from(stream).map_err(|_| format!("no such stream: {stream}"))?;
            Ok(Row::Alloc { time_us, id, bytes: number("bytes", bytes)?, stream })
        }
        "free" => {
            for (name, text) in [("bytes", bytes), ("stream", stream)] {
                if !text.is_empty() {
                    number(name, text)?;
                }
            }
            Ok(Row::Free { time_us, id })
        }
        "segment_alloc" => segment(id, number("bytes", bytes)?).map(Row::Segment),
        _ => Err(format!("unknown op {}: expected alloc, free or segment_alloc", quote(op))),
    }
}

fn segment(addr: u64, bytes: u64) -> Result<RecordedSegment, String> {
    if addr == 0 || !addr.is_multiple_of(SEGMENT_ALIGN) {
        return Err(format!("segment address {addr} is not a multiple of 2 MiB"));
    }
    if bytes == 0 || addr.checked_add(bytes).is_none() {
        return Err(format!("impossible segment of {bytes} bytes at {addr}"));
    }
    Ok(RecordedSegment { addr, bytes })
}

fn apply(builder: &mut WorkloadBuilder, line: u32, row: Row) -> Result<(), Failure> {
    match row {
        Row::Alloc { time_us, id, bytes, stream } => {
            builder.alloc(line, time_us, id, bytes, stream)
        }
        Row::Free { time_us, id } => builder.free(line, time_us, id),
        Row::Segment(segment) => {
            builder.segment(segment);
            Ok(())
        }
    }
}

fn number(name: &str, text: &str) -> Result<u64, String> {
    let digits = text.trim();
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(format!("{name} is not a number: {}", quote(text)));
    }
    digits.parse().map_err(|_| format!("{name} is more than 64 bits can count: {}", quote(text)))
}

/// Text from a file, in quotes, safe to print and not too long.
fn quote(text: &str) -> String {
    const LONGEST: usize = 60;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Action;

    fn parse(text: &str) -> Result<Workload, String> {
        read(Path::new("t.csv"), text.as_bytes()).map_err(|e| e.to_string())
    }

    /// The message for a trace whose second line is `row`.
    fn error_of(row: &str) -> String {
        parse(&format!("{HEADER}\n{row}\n")).unwrap_err()
    }

    #[test]
    fn a_trace_is_read() {
        let w = parse(
            "time_us,op,id,bytes,stream\n0,segment_alloc,4194304,2097152,0\n3,alloc,1,1000,0\n\n\
             9,free,1,1000,0\r\n",
        )
        .unwrap();
        assert_eq!(w.segments, [RecordedSegment { addr: 4 << 20, bytes: 2 << 20 }]);
        assert_eq!(w.ops.len(), 2);
        assert_eq!(w.ops[0].action, Action::Alloc { bytes: 1000, stream: 0 });
        assert_eq!((w.ops[1].action, w.ops[1].line), (Action::Free { bytes: 1000 }, 5));
        assert_eq!((w.requested_peak, w.wall_us), (1000, 9));
    }

    #[test]
    fn a_free_needs_neither_bytes_nor_stream() {
        assert_eq!(parse(&format!("{HEADER}\n0,alloc,1,8,0\n0,free,1,,\n")).unwrap().ops.len(), 2);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (row, message) in [
            (
                "1,alloc,2,3",
                "t.csv:2: 4 columns instead of 5 (time_us,op,id,bytes,stream): \"1,alloc,2,3\"",
            ),
            (
                "1,alloc,2,3,0,9",
                "t.csv:2: 6 columns instead of 5 (time_us,op,id,bytes,stream): \"1,alloc,2,3,0,9\"",
            ),
            ("x,alloc,2,3,0", "t.csv:2: time_us is not a number: \"x\""),
            ("1,alloc,2,-3,0", "t.csv:2: bytes is not a number: \"-3\""),
            ("1,alloc,,3,0", "t.csv:2: id is not a number: \"\""),
            (
                "1,malloc,2,3,0",
                "t.csv:2: unknown op \"malloc\": expected alloc, free or segment_alloc",
            ),
            (
                "1,alloc,2,99999999999999999999,0",
                "t.csv:2: bytes is more than 64 bits can count: \"99999999999999999999\"",
            ),
            ("1,alloc,2,3,4294967296", "t.csv:2: no such stream: 4294967296"),
            ("1,free,2,3,0", "t.csv:2: free of id 2, which is not live: never allocated"),
            ("1,free,2,three,0", "t.csv:2: bytes is not a number: \"three\""),
            (
                "1,segment_alloc,1048576,2097152,0",
                "t.csv:2: segment address 1048576 is not a multiple of 2 MiB",
            ),
            ("1,segment_alloc,2097152,0,0", "t.csv:2: impossible segment of 0 bytes at 2097152"),
        ] {
            assert_eq!(error_of(row), message);
        }
    }

    #[test]
    fn other_files_are_not_taken_for_traces() {
        assert_eq!(parse("").unwrap_err(), "t.csv: is empty");
        assert!(parse("{\"ops\": []}").unwrap_err().starts_with("t.csv:1: not a trace: "));
        assert_eq!(
            read(Path::new("t"), &b"\xff\xfe"[..]).unwrap_err().to_string(),
            "t:1: not text"
        );
        let long = "a".repeat(10_000);
        assert!(parse(&long).unwrap_err().len() < 200);
    }
}
