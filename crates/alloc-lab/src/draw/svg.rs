//! What both drawings share: the frame of an SVG file, text, and round numbers for axes.

use std::fmt::Write;

/// Colour of axes and less important text.
pub(crate) const MUTED: &str = "#5b6570";

/// Colour of grid lines.
pub(crate) const GRID: &str = "#e3e7eb";

/// An SVG document under construction.
pub(crate) struct Svg {
    width: u32,
    height: u32,
    body: String,
}

impl Svg {
    /// An empty white page.
    pub(crate) fn new(width: u32, height: u32) -> Self {
        Svg { width, height, body: String::new() }
    }

    /// Adds an element as it stands.
    pub(crate) fn push(&mut self, element: std::fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = self.body.write_fmt(element);
        self.body.push('\n');
    }

    /// Adds text whose anchor (`start`, `middle` or `end`) is at `x`, on the base line `y`.
    pub(crate) fn text(&mut self, x: f64, y: f64, anchor: &str, style: &str, text: &str) {
        let text = escape(text);
        self.push(format_args!(
            r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" {style}>{text}</text>"#
        ));
    }

    /// The finished file.
    pub(crate) fn finish(self) -> String {
        let Svg { width, height, body } = self;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" font-family=\"system-ui, 'Segoe UI', 'DejaVu Sans', \
             sans-serif\" font-size=\"12\" fill=\"#1d2329\">\n\
             <rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n{body}</svg>\n"
        )
    }
}

/// Text that is safe between tags and in attributes.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// An axis from 0 to `max`: the marks to draw, and the numbers to write at them.
pub(crate) struct Ticks {
    /// Where, in the unit of the axis, and what to write.
    pub(crate) marks: Vec<(f64, String)>,
}

impl Ticks {
    /// About `wanted` marks at round numbers (1, 2 or 5 times a power of ten), from 0 up to the
    /// last one that is not above `max`.
    pub(crate) fn new(max: f64, wanted: u32) -> Self {
        if max <= 0.0 || max.is_nan() {
            return Ticks { marks: vec![(0.0, "0".to_owned())] };
        }
        let rough = max / f64::from(wanted);
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0]
            .into_iter()
            .map(|factor| factor * power)
            .find(|&step| step >= rough * 0.999)
            .unwrap_or(10.0 * power);
        let decimals = if step < 1.0 { (-step.log10()).ceil().max(0.0) as usize } else { 0 };
        let marks = (0..=(max / step * 1.0001).floor() as u32)
            .map(|i| (f64::from(i) * step, format!("{:.decimals$}", f64::from(i) * step)))
            .collect();
        Ticks { marks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_round_and_within() {
        let written = |max, wanted| {
            let ticks = Ticks::new(max, wanted);
            ticks.marks.into_iter().map(|mark| mark.1).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(written(21.9, 5), "0 5 10 15 20");
        assert_eq!(written(10.0, 5), "0 2 4 6 8 10");
        assert_eq!(written(0.9, 5), "0.0 0.2 0.4 0.6 0.8");
        assert_eq!(written(0.0, 5), "0");
        assert_eq!(written(8965.0, 8), "0 2000 4000 6000 8000");
    }

    #[test]
    fn text_is_escaped() {
        assert_eq!(escape("a<b>&\"c\"\n"), "a&lt;b&gt;&amp;&quot;c&quot; ");
    }
}
