//! The map in characters, one cell a character.

use std::fmt::Write;

use alloc_core::Bytes;

use super::{Cell, Group, Map, cells, page_sizes};
use crate::engine::SegmentView;

/// Characters in a row.
const ROW: usize = 64;
/// Rows that a group may take before its scale becomes coarser.
const ROWS: u64 = 40;
/// Bytes that a character stands for at least: 2 MiB fill a row.
const FINEST: u64 = 32 << 10;

const LEGEND: &str = "blocks: # in use  + partly in use  ~ waiting for events  . free\n\
                      pages:  | begins  - goes on\n";

pub(super) fn render(map: &Map) -> String {
    let mut out = format!("{}\n{}\n{LEGEND}", map.title, map.summary());
    for group in map.groups() {
        draw_group(&mut out, &group);
    }
    out
}

// Writing to a String cannot fail.
fn draw_group(out: &mut String, group: &Group<'_>) {
    let cell_bytes = group.cell_bytes(FINEST, ROWS * ROW as u64);
    let _ = writeln!(out, "\n{}; one character is {}", group.heading(), Bytes(cell_bytes));
    for segment in &group.segments {
        draw_segment(out, segment, cell_bytes);
    }
}

fn draw_segment(out: &mut String, segment: &SegmentView, cell_bytes: u64) {
    let _ = write!(out, "  {:#x} {}", segment.addr, Bytes(segment.bytes));
    if segment.expandable {
        let _ = write!(out, ", expandable, pages {}", page_sizes(segment));
    }
    out.push('\n');
    let blocks: Vec<char> = cells(segment, cell_bytes).into_iter().map(block_char).collect();
    let ruler = page_ruler(segment, cell_bytes);
    for (i, row) in blocks.chunks(ROW).enumerate() {
        let _ = writeln!(out, "    {}", row.iter().collect::<String>());
        if let Some(ruler) = &ruler {
            let row: String = ruler.chunks(ROW).nth(i).unwrap_or_default().iter().collect();
            let _ = writeln!(out, "    {row}");
        }
    }
}

const fn block_char(cell: Cell) -> char {
    match cell {
        Cell::Full => '#',
        Cell::Mixed => '+',
        Cell::Pending => '~',
        Cell::Free => '.',
    }
}

/// Marks where pages begin; nothing if they are too small to be told apart, or only one.
fn page_ruler(segment: &SegmentView, cell_bytes: u64) -> Option<Vec<char>> {
    let largest = segment.pages.iter().copied().max()?;
    if segment.pages.len() < 2 || largest < 2 * cell_bytes {
        return None;
    }
    let mut ruler = vec!['-'; segment.bytes.div_ceil(cell_bytes) as usize];
    let mut at = 0;
    for page in &segment.pages {
        if let Some(cell) = ruler.get_mut((at / cell_bytes) as usize) {
            *cell = '|';
        }
        at += page;
    }
    Some(ruler)
}

#[cfg(test)]
mod tests {
    use crate::draw::segments::tests::map;

    #[test]
    fn the_map_shows_segments_blocks_and_pages() {
        let text = map().to_text();
        let expected = "\
stream 0, large: 2 segments, 60.00 MiB, 23.00 MiB allocated, 8.00 MiB waiting for events, 29.00 MiB \
free (largest 20.00 MiB); one character is 32.00 KiB
  0x20000000 20.00 MiB
    ################################################################
    ################################................................
";
        assert!(text.contains(expected), "{text}");
        assert!(
            text.contains("  0x90000000 40.00 MiB, expandable, pages 2 × 20.00 MiB\n"),
            "{text}"
        );
        assert!(text.starts_with("t at operation 5\n5 segments, 84.00 MiB, "), "{text}");
        let rulers = text.lines().filter(|line| line.trim().starts_with("|---")).count();
        assert_eq!(rulers, 2, "{text}");
    }
}
