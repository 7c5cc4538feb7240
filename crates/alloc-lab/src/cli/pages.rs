//! `alloc-lab pages`.

use std::io::Write;

use super::args::PagesArgs;
use super::print;
use crate::error::Failure;
use crate::format::read_workload;
use crate::pages::{Paging, page};
use crate::progress::Progress;
use crate::report::{PagesRow, json, pages_table};

/// Runs every file on pages of every size.
pub(super) fn run(args: &PagesArgs, out: &mut dyn Write) -> Result<bool, Failure> {
    let mut workloads = Vec::new();
    for path in &args.files {
        workloads.extend(args.varying.of(read_workload(path)?)?);
    }
    let progress = Progress::new((workloads.len() * args.page.len()) as u64, "paging");
    let mut rows = Vec::new();
    for workload in &workloads {
        for page_bytes in &args.page {
            progress.set(rows.len() as u64, workload.name());
            let paging = Paging { page_bytes: *page_bytes, told: args.told };
            let row = PagesRow::new(workload, &paging, &page(workload, &paging)?);
            if args.json {
                print(out, &json(&row))?;
            }
            rows.push(row);
        }
    }
    drop(progress);
    if !args.json {
        print(out, &pages_table(&rows))?;
    }
    Ok(true)
}
