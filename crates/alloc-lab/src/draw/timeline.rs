//! Requested and reserved memory over a run, as SVG.
//!
//! A run of half a million operations has more moments than a screen has pixels, so a [`Sampler`]
//! keeps, for each column of the drawing, the first, lowest, highest and last value: no peak is
//! lost, whatever the length of the run.

use std::fmt::Write;

use alloc_core::Bytes;

use super::svg::{GRID, MUTED, Svg, Ticks};

/// Columns of a drawing: one for each pixel of the plotting area.
const COLUMNS: usize = 860;

const WIDTH: u32 = 960;
const LEFT: f64 = 72.0;
const PLOT_HEIGHT: f64 = 300.0;
const TITLE_HEIGHT: f64 = 34.0;
const LEGEND_ROW: f64 = 18.0;
const AXIS_HEIGHT: f64 = 52.0;

/// Colours of the lines: blue, orange, green, purple, red; dark enough for white paper and
/// distinguishable to the colour-blind.
const LINES: [&str; 5] = ["#0b62a4", "#d9730d", "#1a8754", "#7b4bb3", "#c0392b"];
/// Fill of the requested memory: up to its lowest value in a column, and from there to the highest.
const FILL: [&str; 2] = ["#c3ccd5", "#dfe5ea"];

/// What was seen in one column.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Column {
    first: u64,
    low: u64,
    high: u64,
    last: u64,
}

/// Reduces a run to the columns of a drawing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sampler {
    x_max: u64,
    columns: Vec<Option<Column>>,
    peak: u64,
}

impl Sampler {
    /// A run over 0..=`x_max`, in whatever unit.
    pub fn new(x_max: u64) -> Self {
        Sampler { x_max: x_max.max(1), columns: vec![None; COLUMNS], peak: 0 }
    }

    /// `value` holds from `x` on. An `x` smaller than an earlier one counts there.
    pub fn push(&mut self, x: u64, value: u64) {
        let at = u128::from(x.min(self.x_max)) * (COLUMNS as u128 - 1) / u128::from(self.x_max);
        let column = self.columns[at as usize].get_or_insert(Column {
            first: value,
            low: value,
            high: value,
            last: value,
        });
        column.low = column.low.min(value);
        column.high = column.high.max(value);
        column.last = value;
        self.peak = self.peak.max(value);
    }

    /// Largest value.
    pub fn peak(&self) -> u64 {
        self.peak
    }

    /// The columns, those without a moment filled with the value that held.
    fn filled(&self) -> impl Iterator<Item = Column> + '_ {
        let mut held = 0;
        self.columns.iter().map(move |column| {
            let flat = Column { first: held, low: held, high: held, last: held };
            let mut column = column.unwrap_or(flat);
            // What held before holds in the beginning of the column too.
            column.low = column.low.min(held);
            column.high = column.high.max(held);
            held = column.last;
            column
        })
    }
}

/// Unit of the horizontal axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimeAxis {
    /// Microseconds, up to this many.
    Time(u64),
    /// Operations, up to this many.
    Operations(u64),
}

impl TimeAxis {
    /// Largest value.
    pub const fn max(self) -> u64 {
        match self {
            TimeAxis::Time(max) | TimeAxis::Operations(max) => max,
        }
    }

    /// Caption, and how many of [`max`](TimeAxis::max)'s units make one of the caption's.
    fn unit(self) -> (&'static str, f64) {
        match self {
            TimeAxis::Time(us) if us >= 2_000_000 => ("time, s", 1e6),
            TimeAxis::Time(us) if us >= 2_000 => ("time, ms", 1e3),
            TimeAxis::Time(_) => ("time, µs", 1.0),
            TimeAxis::Operations(_) => ("operations", 1.0),
        }
    }
}

/// One line of a panel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Series {
    /// Text in the legend.
    pub label: String,
    /// Its values in bytes.
    pub samples: Sampler,
}

/// One chart: the memory that a workload asks for, and what one or more allocators reserve for it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Panel {
    /// Heading.
    pub title: String,
    /// Horizontal axis.
    pub axis: TimeAxis,
    /// Bytes asked for.
    pub requested: Sampler,
    /// Bytes reserved, one line for each configuration.
    pub reserved: Vec<Series>,
}

impl Panel {
    fn peak(&self) -> u64 {
        let lines = self.reserved.iter().map(|series| series.samples.peak());
        lines.chain([self.requested.peak()]).max().unwrap_or(0)
    }

    fn height(&self) -> f64 {
        let legend = LEGEND_ROW * (1 + self.reserved.len()) as f64;
        TITLE_HEIGHT + legend + PLOT_HEIGHT + AXIS_HEIGHT
    }
}

/// Draws `panels` below each other.
pub fn render(panels: &[Panel]) -> String {
    let height: f64 = panels.iter().map(Panel::height).sum();
    let mut svg = Svg::new(WIDTH, height.ceil() as u32);
    let mut top = 0.0;
    for panel in panels {
        draw_panel(&mut svg, panel, top);
        top += panel.height();
    }
    svg.finish()
}

fn draw_panel(svg: &mut Svg, panel: &Panel, top: f64) {
    svg.text(LEFT, top + 22.0, "start", r#"font-size="15" font-weight="600""#, &panel.title);
    draw_legend(svg, panel, top + TITLE_HEIGHT);
    let plot = Plot {
        top: top + panel.height() - PLOT_HEIGHT - AXIS_HEIGHT,
        // A little air above the highest line.
        y_max: panel.peak().max(1) as f64 * 1.04,
    };
    plot.vertical_axis(svg, panel.peak());
    plot.horizontal_axis(svg, panel.axis);
    for (colour, level) in [(FILL[1], (|c| c.high) as fn(Column) -> u64), (FILL[0], |c| c.low)] {
        let path = plot.area(&panel.requested, level);
        svg.push(format_args!(r#"<path d="{path}" fill="{colour}"/>"#));
    }
    for (i, series) in panel.reserved.iter().enumerate() {
        let (path, colour) = (plot.line(&series.samples), LINES[i % LINES.len()]);
        // Later lines are thinner, so that one that lies on another does not hide it.
        let width = 1.5 + (panel.reserved.len() - 1 - i) as f64;
        svg.push(format_args!(
            r#"<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>"#
        ));
    }
    let (bottom, right) = (plot.top + PLOT_HEIGHT, LEFT + COLUMNS as f64);
    svg.push(format_args!(r#"<path d="M{LEFT:.1} {bottom:.1}H{right:.1}" stroke="{MUTED}"/>"#));
}

fn draw_legend(svg: &mut Svg, panel: &Panel, top: f64) {
    let requested = panel.requested.peak();
    let mut y = top;
    let fill = FILL[0];
    svg.push(format_args!(
        r#"<rect x="{LEFT:.1}" y="{:.1}" width="22" height="10" fill="{fill}"/>"#,
        y + 2.0
    ));
    let text = format!("requested, peak {}", Bytes(requested));
    svg.text(LEFT + 30.0, y + 11.0, "start", "", &text);
    for (i, series) in panel.reserved.iter().enumerate() {
        y += LEGEND_ROW;
        let colour = LINES[i % LINES.len()];
        svg.push(format_args!(
            r#"<path d="M{LEFT:.1} {:.1}h22" stroke="{colour}" stroke-width="2.5"/>"#,
            y + 7.0
        ));
        let peak = series.samples.peak();
        let mut text = format!("reserved by {}, peak {}", series.label, Bytes(peak));
        if requested > 0 {
            let ratio = peak as f64 / requested as f64;
            let _ = write!(text, " ({ratio:.3} × requested)");
        }
        svg.text(LEFT + 30.0, y + 11.0, "start", "", &text);
    }
}

/// The plotting area of a panel.
struct Plot {
    top: f64,
    y_max: f64,
}

impl Plot {
    fn y(&self, bytes: u64) -> f64 {
        self.top + PLOT_HEIGHT * (1.0 - bytes as f64 / self.y_max)
    }

    fn vertical_axis(&self, svg: &mut Svg, peak: u64) {
        let (unit, shift) = match peak {
            p if p >= 2 << 30 => ("GiB", 30),
            p if p >= 2 << 20 => ("MiB", 20),
            p if p >= 2 << 10 => ("KiB", 10),
            _ => ("bytes", 0),
        };
        let scale = (1u64 << shift) as f64;
        for (value, text) in Ticks::new(self.y_max / scale, 5).marks {
            let y = self.top + PLOT_HEIGHT * (1.0 - value * scale / self.y_max);
            let right = LEFT + COLUMNS as f64;
            svg.push(format_args!(r#"<path d="M{LEFT:.1} {y:.1}H{right:.1}" stroke="{GRID}"/>"#));
            let style = format!(r#"fill="{MUTED}""#);
            svg.text(LEFT - 8.0, y + 4.0, "end", &style, &text);
        }
        let (x, y) = (20.0, self.top + PLOT_HEIGHT / 2.0);
        let style = format!(r#"fill="{MUTED}" transform="rotate(-90 {x:.1} {y:.1})""#);
        svg.text(x, y, "middle", &style, &format!("memory, {unit}"));
    }

    fn horizontal_axis(&self, svg: &mut Svg, axis: TimeAxis) {
        let (caption, unit) = axis.unit();
        let max = axis.max().max(1) as f64 / unit;
        let (bottom, style) = (self.top + PLOT_HEIGHT, format!(r#"fill="{MUTED}""#));
        for (value, text) in Ticks::new(max, 10).marks {
            let x = LEFT + value / max * (COLUMNS - 1) as f64;
            svg.push(format_args!(r#"<path d="M{x:.1} {bottom:.1}v5" stroke="{MUTED}"/>"#));
            svg.text(x, bottom + 18.0, "middle", &style, &text);
        }
        svg.text(LEFT + COLUMNS as f64 / 2.0, bottom + 36.0, "middle", &style, caption);
    }

    /// The area under `level` of every column.
    fn area(&self, samples: &Sampler, level: fn(Column) -> u64) -> String {
        let mut path = format!("M{LEFT:.0} {:.1}", self.y(0));
        let mut drawn = String::new();
        for (i, column) in samples.filled().enumerate() {
            let y = format!("{:.1}", self.y(level(column)));
            if y != drawn {
                let _ = write!(path, "H{:.0}V{y}", LEFT + i as f64);
                drawn = y;
            }
        }
        let _ = write!(path, "H{:.0}V{:.1}Z", LEFT + COLUMNS as f64, self.y(0));
        path
    }

    /// A line through every column that also touches its lowest and highest value.
    fn line(&self, samples: &Sampler) -> String {
        let mut path = String::new();
        let mut drawn = String::new();
        for (i, column) in samples.filled().enumerate() {
            let levels =
                [column.low, column.high, column.last].map(|v| format!("{:.1}", self.y(v)));
            if path.is_empty() {
                let _ = write!(path, "M{LEFT:.0} {:.1}", self.y(column.first));
            }
            if levels.iter().all(|level| *level == drawn) {
                continue;
            }
            let _ = write!(path, "H{:.0}", LEFT + i as f64);
            for level in levels {
                if level != drawn {
                    let _ = write!(path, "V{level}");
                    drawn = level;
                }
            }
        }
        let _ = write!(path, "H{:.0}", LEFT + COLUMNS as f64);
        path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noisy(operations: u64) -> Sampler {
        let mut samples = Sampler::new(operations);
        for i in 0..=operations {
            samples.push(i, (i * 2_654_435_761) % (24 << 30));
        }
        samples
    }

    fn panel(operations: u64) -> Panel {
        Panel {
            title: "a < b".to_owned(),
            axis: TimeAxis::Time(operations),
            requested: noisy(operations),
            reserved: (0..3)
                .map(|i| Series { label: format!("policy {i}"), samples: noisy(operations) })
                .collect(),
        }
    }

    #[test]
    fn no_peak_is_lost_and_values_hold() {
        let mut samples = Sampler::new(1_000_000);
        samples.push(10, 5);
        samples.push(500_000, 70);
        samples.push(500_001, 900);
        samples.push(500_002, 3);
        let columns: Vec<Column> = samples.filled().collect();
        assert_eq!(samples.peak(), 900);
        assert_eq!(columns[COLUMNS / 4].last, 5);
        let peak = columns.iter().find(|column| column.high == 900).unwrap();
        assert_eq!((peak.first, peak.low, peak.last), (70, 3, 3));
        assert_eq!(columns[COLUMNS - 1].high, 3);
    }

    #[test]
    fn the_worst_case_stays_small() {
        let svg = render(&[panel(500_000)]);
        assert!(svg.len() < 300_000, "{} bytes", svg.len());
    }

    #[test]
    fn axes_have_units_and_lines_have_names() {
        let svg = render(&[panel(5_000_000), panel(9_000)]);
        for text in [
            "a &lt; b",
            "memory, GiB",
            "time, s",
            "time, ms",
            "requested, peak 2",
            "policy 2, peak 2",
            "(1.000 × requested)",
        ] {
            assert!(svg.contains(text), "{text}");
        }
        assert_eq!(svg.matches("<svg").count(), 1);
    }

    #[test]
    fn empty_runs_can_be_drawn() {
        let panel = Panel {
            title: String::new(),
            axis: TimeAxis::Operations(0),
            requested: Sampler::new(0),
            reserved: Vec::new(),
        };
        assert!(render(&[panel]).contains("memory, bytes"));
    }
}
