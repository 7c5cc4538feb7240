//! The map as SVG: each group at its own scale, segments side by side as they fit, wrapped where
//! they don't, with the pages as a strip below the blocks.

use alloc_core::Bytes;

use super::{Cell, Group, Map, cells, page_sizes};
use crate::draw::svg::{MUTED, Svg, escape};
use crate::engine::SegmentView;

const WIDTH: u32 = 960;
const LEFT: f64 = 20.0;
/// Cells of one pixel in a row.
const ROW: u64 = 920;
const ROWS: u64 = 40;
/// Bytes that a pixel stands for at least: 2 MiB take 256 pixels.
const FINEST: u64 = 8 << 10;
const GAP: u64 = 4;
const BLOCKS_HEIGHT: f64 = 13.0;
const PAGES_HEIGHT: f64 = 4.0;
const ROW_HEIGHT: f64 = 22.0;
const HEADER: f64 = 74.0;
const GROUP_HEADER: f64 = 30.0;
/// Blocks and pages of so many pixels and more are set apart by a line.
const SEPARATED: u64 = 3;

/// Colours of blocks, with their meaning.
const LEGEND: [(&str, &str); 5] = [
    ("#0b62a4", "in use"),
    ("#7fb0d8", "partly in use"),
    ("#e0a33a", "waiting for events"),
    ("#dfe5ea", "free"),
    (PAGES, "pages"),
];
const PAGES: &str = "#8a949e";

pub(super) fn render(map: &Map) -> String {
    let groups: Vec<(Group<'_>, Layout)> = map
        .groups()
        .into_iter()
        .map(|group| {
            let layout = Layout::new(&group);
            (group, layout)
        })
        .collect();
    let height: f64 = groups.iter().map(|(_, layout)| layout.height()).sum();
    let mut svg = Svg::new(WIDTH, (HEADER + height + 16.0).ceil() as u32);
    draw_header(&mut svg, map);
    let mut top = HEADER;
    for (group, layout) in &groups {
        draw_group(&mut svg, group, layout, top);
        top += layout.height();
    }
    svg.finish()
}

/// Where the segments of a group lie: cells from the beginning of the first row.
struct Layout {
    cell_bytes: u64,
    starts: Vec<u64>,
    rows: u64,
}

impl Layout {
    fn new(group: &Group<'_>) -> Self {
        let cell_bytes = group.cell_bytes(FINEST, ROWS * ROW);
        let mut at = 0;
        let mut starts = Vec::with_capacity(group.segments.len());
        for segment in &group.segments {
            let length = segment.bytes.div_ceil(cell_bytes);
            let column = at % ROW;
            if column > 0 && column + length > ROW {
                at += ROW - column;
            }
            starts.push(at);
            at += length + GAP;
        }
        Layout { cell_bytes, starts, rows: (at - GAP).div_ceil(ROW) }
    }

    fn height(&self) -> f64 {
        GROUP_HEADER + self.rows as f64 * ROW_HEIGHT
    }
}

fn draw_header(svg: &mut Svg, map: &Map) {
    svg.text(LEFT, 26.0, "start", r#"font-size="15" font-weight="600""#, &map.title);
    let style = format!(r#"fill="{MUTED}""#);
    svg.text(LEFT, 44.0, "start", &style, &map.summary());
    let mut x = LEFT;
    for (colour, meaning) in LEGEND {
        svg.push(format_args!(
            r#"<rect x="{x:.0}" y="54" width="12" height="10" fill="{colour}"/>"#
        ));
        svg.text(x + 17.0, 63.0, "start", &style, meaning);
        x += 40.0 + 7.0 * meaning.len() as f64;
    }
}

fn draw_group(svg: &mut Svg, group: &Group<'_>, layout: &Layout, top: f64) {
    let scale = Bytes(layout.cell_bytes);
    let heading = format!("{}; one pixel is {scale}", group.heading());
    svg.text(LEFT, top + 20.0, "start", r#"font-weight="600""#, &heading);
    for (segment, &start) in group.segments.iter().zip(&layout.starts) {
        let pen = Pen { top: top + GROUP_HEADER, start, cell_bytes: layout.cell_bytes };
        let title = escape(&describe(segment));
        svg.push(format_args!("<g><title>{title}</title>"));
        pen.draw(svg, segment);
        svg.push(format_args!("</g>"));
    }
}

fn describe(segment: &SegmentView) -> String {
    let (addr, bytes) = (segment.addr, Bytes(segment.bytes));
    let mut text = format!("{addr:#x}, {bytes}, {} blocks", segment.blocks.len());
    if segment.expandable {
        text += &format!(", pages {}", page_sizes(segment));
    }
    text
}

/// Draws one segment that begins `start` cells after the beginning of the row at `top`.
struct Pen {
    top: f64,
    start: u64,
    cell_bytes: u64,
}

impl Pen {
    fn draw(&self, svg: &mut Svg, segment: &SegmentView) {
        let cells = cells(segment, self.cell_bytes);
        let mut begin = 0;
        for run in cells.chunk_by(|a, b| a == b) {
            let colour = LEGEND[match run[0] {
                Cell::Full => 0,
                Cell::Mixed => 1,
                Cell::Pending => 2,
                Cell::Free => 3,
            }];
            self.bar(svg, begin, run.len() as u64, 0.0, BLOCKS_HEIGHT, colour.0);
            begin += run.len() as u64;
        }
        self.bar(svg, 0, begin, BLOCKS_HEIGHT + 1.0, PAGES_HEIGHT, PAGES);
        let blocks = segment.blocks.iter().map(|block| block.bytes);
        let mut separators = self.separators(blocks, 0.0, BLOCKS_HEIGHT);
        separators +=
            &self.separators(segment.pages.iter().copied(), BLOCKS_HEIGHT + 1.0, PAGES_HEIGHT);
        if !separators.is_empty() {
            svg.push(format_args!(r##"<path d="{separators}" stroke="#fff" stroke-width=".6"/>"##));
        }
    }

    /// Row and column of a cell of the segment.
    fn place(&self, cell: u64) -> (u64, u64) {
        ((self.start + cell) / ROW, (self.start + cell) % ROW)
    }

    /// A bar over `length` cells from `begin` on, wrapped at the ends of rows.
    fn bar(&self, svg: &mut Svg, begin: u64, length: u64, down: f64, height: f64, colour: &str) {
        let end = begin + length;
        let mut at = begin;
        while at < end {
            let (row, column) = self.place(at);
            let width = (ROW - column).min(end - at);
            let (x, y) = (LEFT + column as f64, self.top + row as f64 * ROW_HEIGHT + down);
            svg.push(format_args!(
                r#"<rect x="{x:.0}" y="{y:.1}" width="{width}" height="{height}" fill="{colour}"/>"#
            ));
            at += width;
        }
    }

    /// Lines between neighbours that are wide enough, as path data.
    fn separators(&self, sizes: impl Iterator<Item = u64>, down: f64, height: f64) -> String {
        let mut path = String::new();
        let (mut at, mut before) = (0, 0);
        for size in sizes {
            if before.min(size) >= SEPARATED * self.cell_bytes {
                let (row, column) = self.place(at / self.cell_bytes);
                let (x, y) = (LEFT + column as f64, self.top + row as f64 * ROW_HEIGHT + down);
                path += &format!("M{x:.0} {y:.1}v{height}");
            }
            at += size;
            before = size;
        }
        path
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::segments::tests::map;

    #[test]
    fn every_segment_is_drawn_inside_the_page() {
        let svg = map().to_svg();
        assert_eq!(svg.matches("<g>").count(), 5);
        assert!(
            svg.contains("<title>0x90000000, 40.00 MiB, 3 blocks, pages 2 × 20.00 MiB</title>")
        );
        assert!(svg.contains("t at operation 5"));
        let number = |text: &str, name: &str| -> f64 {
            let from = text.split(&format!(" {name}=\"")).nth(1).unwrap();
            from.split('"').next().unwrap().parse().unwrap()
        };
        let height = number(&svg, "height");
        for rect in svg.lines().filter(|line| line.starts_with("<rect x")) {
            assert!(number(rect, "x") + number(rect, "width") <= f64::from(WIDTH), "{rect}");
            assert!(number(rect, "y") + number(rect, "height") <= height, "{rect}");
        }
    }

    #[test]
    fn segments_do_not_share_cells() {
        let map = map();
        for group in map.groups() {
            let layout = Layout::new(&group);
            let mut free_from = 0;
            for (segment, &start) in group.segments.iter().zip(&layout.starts) {
                assert!(start >= free_from);
                free_from = start + segment.bytes.div_ceil(layout.cell_bytes);
            }
            assert!(free_from <= layout.rows * ROW);
        }
    }
}
