//! Files that the laboratory reads, one module a format.
//!
//! A workload format ends in a [`WorkloadBuilder`](crate::workload::WorkloadBuilder), which checks
//! it; to add one, write its module and teach [`read_workload`] to recognise it by its content.

pub mod golden;
pub mod trace_csv;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;

use crate::error::Failure;
use crate::workload::Workload;

/// First bytes of every gzip file.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Opens a file for reading, through gzip if its first bytes say so; the name does not matter.
///
/// # Errors
/// [`Failure::Input`] if it cannot be opened.
pub fn open(path: &Path) -> Result<Box<dyn BufRead>, Failure> {
    let file = File::open(path).map_err(|e| Failure::input(path, format!("cannot open: {e}")))?;
    let mut plain = BufReader::with_capacity(1 << 16, file);
    let head = plain.fill_buf().map_err(|e| Failure::input(path, format!("cannot read: {e}")))?;
    if head.starts_with(&GZIP_MAGIC) {
        Ok(Box::new(BufReader::with_capacity(1 << 16, MultiGzDecoder::new(plain))))
    } else {
        Ok(Box::new(plain))
    }
}

/// Whether a file looks like a [recording](golden::Recording): whether it is JSON.
///
/// # Errors
/// [`Failure::Input`] if it cannot be read.
pub fn is_recording(path: &Path) -> Result<bool, Failure> {
    let mut content = open(path)?;
    let head = content.fill_buf();
    let head = head.map_err(|e| Failure::input(path, format!("cannot read: {e}")))?;
    Ok(head.trim_ascii_start().starts_with(b"{"))
}

/// Reads a workload of any known format.
///
/// # Errors
/// [`Failure::Input`] naming file and line if it is not one.
pub fn read_workload(path: &Path) -> Result<Workload, Failure> {
    trace_csv::read(path, open(path)?)
}
