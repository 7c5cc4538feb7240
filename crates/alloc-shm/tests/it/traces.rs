//! What a process has of an object, as the kernel tells it in `/proc`.

/// Descriptors of process `pid` (`"self"` for this one) that stand for what `is_it` recognises by
/// the text of its link.
pub(crate) fn descriptors(pid: &str, is_it: impl Fn(&str) -> bool) -> usize {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("the process runs");
    let links = entries.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
    links.filter(|link| is_it(&link.to_string_lossy())).count()
}

/// Mappings of process `pid` whose line in its `maps` contains `text`.
pub(crate) fn mappings(pid: &str, text: &str) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("the process runs");
    maps.lines().filter(|line| line.contains(text)).count()
}

/// Descriptors and mappings of this process that contain `text`: a path, or a memfd's label.
#[allow(dead_code, reason = "the integration tests count for other processes only")]
pub(crate) fn own(text: &str) -> (usize, usize) {
    (descriptors("self", |link| link.contains(text)), mappings("self", text))
}
