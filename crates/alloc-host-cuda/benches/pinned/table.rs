//! Lines of JSON, as the benches of this crate and of its peers print them, as one table.

use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;

/// What a measurement may be of: its key, how a table says it, and how ours compares.
const UNITS: [(&str, &str, Compare); 4] = [
    ("ns_per_pair", "ns a pair", Compare::Share),
    ("mega_steps_per_s", "M steps/s", Compare::Times { less_is_better: false }),
    ("ms", "ms", Compare::Times { less_is_better: true }),
    ("gb_per_s", "GB/s", Compare::Share),
];

#[derive(Clone, Copy)]
enum Compare {
    /// Ours as a share of the peer's.
    Share,
    /// How many times better ours is.
    Times { less_is_better: bool },
}

/// The values of one measurement.
struct Row {
    name: String,
    unit: (&'static str, Compare),
    /// By policy; in the order of rounds.
    values: BTreeMap<String, Vec<f64>>,
}

/// A table of policy `ours` beside whoever else measured the same, every value and the ratio of the
/// medians. Lines that are no measurement are passed over.
pub(crate) fn table(lines: &str) -> String {
    let mut text = String::from("| | ours | peer | ratio |\n|---|---:|---:|---:|\n");
    for row in rows(lines) {
        let ours = row.values.get("ours");
        let peer = row.values.iter().find(|(policy, _)| *policy != "ours");
        let ratio = match (ours, peer) {
            (Some(ours), Some((_, peer))) => ratio(row.unit.1, median(ours), median(peer)),
            _ => "–".to_owned(),
        };
        let who = peer.map_or(String::new(), |(policy, _)| format!(" ({policy})"));
        let (ours, peer) = (list(ours), list(peer.map(|(_, values)| values)));
        // Writing to a string does not fail.
        let _ = writeln!(text, "| {}, {} | {ours} | {peer}{who} | {ratio} |", row.name, row.unit.0);
    }
    text
}

/// The measurements, in the order in which they first come.
fn rows(lines: &str) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for line in lines.lines() {
        let Ok(line) = serde_json::from_str::<Value>(line) else { continue };
        let (Some(name), Some(policy)) = (line["name"].as_str(), line["policy"].as_str()) else {
            continue;
        };
        let measured = |(key, unit, compare)| {
            let values = numbers(&line[key]);
            (!values.is_empty()).then_some(((unit, compare), values))
        };
        let Some((unit, values)) = UNITS.into_iter().find_map(measured) else { continue };
        let at = rows.iter().position(|row| row.name == name).unwrap_or_else(|| {
            rows.push(Row { name: name.to_owned(), unit, values: BTreeMap::new() });
            rows.len() - 1
        });
        rows[at].values.entry(policy.trim().to_owned()).or_default().extend(values);
    }
    rows
}

fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(values) => values.iter().filter_map(Value::as_f64).collect(),
        value => value.as_f64().into_iter().collect(),
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() % 2 {
        0 => f64::midpoint(sorted[middle - 1], sorted[middle]),
        _ => sorted[middle],
    }
}

fn list(values: Option<&Vec<f64>>) -> String {
    let Some(values) = values else { return "–".to_owned() };
    let digits = |value: &f64| match *value {
        value if value >= 1000.0 => format!("{value:.0}"),
        value => format!("{value:.1}"),
    };
    values.iter().map(digits).collect::<Vec<_>>().join(" / ")
}

fn ratio(compare: Compare, ours: f64, peer: f64) -> String {
    match compare {
        Compare::Share => format!("{:.2}", ours / peer),
        Compare::Times { less_is_better: true } => format!("{:.1} ×", peer / ours),
        Compare::Times { less_is_better: false } => format!("{:.1} ×", ours / peer),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn rounds_come_together_and_medians_are_compared() {
        let lines = r#"
            {"policy":"ours","name":"hit_4096","ns_per_pair":31.00}
            {"policy":"torch 2.11.0","conf":"","name":"hit_4096","ns_per_pair":160.00}
            not a line of JSON
            {"policy":"ours","name":"threads_16","mega_steps_per_s":90}
            {"policy":"torch 2.11.0","name":"threads_16","mega_steps_per_s":2.5}
            {"policy":"torch 2.11.0","name":"cuda_host_alloc_1_gib","ms":359}
            {"policy":"ours","name":"hit_4096","ns_per_pair":33.00}
            {"policy":"ours","name":"fresh_pin_4_gib","ms":[150.0,200.0,170.0],"worst_ms":200.0}
            {"policy":"driver","name":"fresh_pin_4_gib","ms":[1700.0,1500.4,1600.0]}
            {"name":"fresh_pin_4_gib","times_faster":9.4}
        "#;
        let expected = "\
| | ours | peer | ratio |
|---|---:|---:|---:|
| hit_4096, ns a pair | 31.0 / 33.0 | 160.0 (torch 2.11.0) | 0.20 |
| threads_16, M steps/s | 90.0 | 2.5 (torch 2.11.0) | 36.0 × |
| cuda_host_alloc_1_gib, ms | – | 359.0 (torch 2.11.0) | – |
| fresh_pin_4_gib, ms | 150.0 / 200.0 / 170.0 | 1700 / 1500 / 1600 (driver) | 9.4 × |
";
        assert_eq!(super::table(lines), expected);
    }
}
