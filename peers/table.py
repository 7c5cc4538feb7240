#!/usr/bin/env python3
"""Reads lines of JSON that `peer` and `alloc-lab bench` printed and prints tables in Markdown: the
median of each measurement, and how many times better ours is.

usage: table.py FILE.jsonl..."""

import json
import statistics
import sys

# What is compared with the others.
REFERENCE = "ours"
# What whole replays are compared with: their time, and their memory.
TIME_REFERENCE = "torch"
MEMORY_REFERENCE = "torch expandable"


def subject(row):
    """Who was measured."""
    if row["alloc"] == "ours":
        words = [row["policy"], row["conf"], "" if row["api"] == "handle" else row["api"]]
        if row["policy"] != "ours":
            words[0] = "ours as " + row["policy"]
    else:
        words = [row["alloc"], row["conf"]]
    short = {"expandable_segments:True": "expandable"}
    return " ".join(short.get(word, word) for word in words if word)


def measurement(row):
    """What was measured: a key, and a name."""
    mode = row["mode"]
    if mode == "pingpong":
        size = row["bytes"]
        name = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size} B"
        return (0, mode, size), f"pingpong {name}, ns a pair"
    if mode == "churn":
        return (1, mode, row["slots"]), f"churn {row['slots']} slots, ns a step"
    if mode in ("threads", "shared"):
        threads = "1 thread" if row["threads"] == 1 else f"{row['threads']} threads"
        where = "a stream each" if mode == "threads" else "one stream"
        return (2, mode, row["threads"]), f"{threads}, {where}, M steps/s"
    if mode == "live":
        return (3, mode, row["blocks"]), f"{row['blocks']} live, ns a pair"
    trace = row["file"].split(".")[0]
    if mode == "replay":
        return (4, mode, row["file"]), f"{trace}, each timed, ms"
    return (5, mode, row["file"]), f"{trace}, whole, ms"


def value(row):
    """The main figure, and whether more is better."""
    for key, more in [("ns_per_pair", False), ("ns_per_step", False), ("mega_steps_per_s", True),
                      ("total_ms", False)]:
        if key in row:
            return row[key], more
    raise ValueError(f"no figure in {row}")


def median_rows(rows):
    """{(measurement, subject): (row with the medians of all figures, number of rows)}"""
    groups = {}
    for row in rows:
        groups.setdefault((measurement(row), subject(row)), []).append(row)
    medians = {}
    for key, group in groups.items():
        row = dict(group[0])
        for name, first in group[0].items():
            if isinstance(first, (int, float)):
                row[name] = statistics.median(r[name] for r in group)
        medians[key] = (row, len(group))
    return medians


def print_table(header, lines):
    print("| " + " | ".join(header) + " |")
    print("|---" + "|---:" * (len(header) - 1) + "|")
    for line in lines:
        print("| " + " | ".join(line) + " |")
    print()


def number(x):
    if x is None:
        return "–"
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def print_sums(medians, who):
    """Whole replays, summed over all traces, of those who ran all of them."""
    rows = {name: {} for name in who}
    for (_, name), (row, _) in medians.items():
        if row["mode"] == "whole":
            rows[name][row["file"]] = row
    traces = set().union(*rows.values())
    rows = {name: found for name, found in rows.items() if found.keys() == traces}
    if not traces:
        return

    def total(name):
        return sum(row["total_ms"] for row in rows[name].values()) if name in rows else None

    def most_memory(name):
        """The greatest ratio, over the traces, of reserved bytes."""
        base = rows.get(MEMORY_REFERENCE)
        if not base or any(row["reserved_peak"] < 0 for row in rows[name].values()):
            return None
        return max(row["reserved_peak"] / base[file]["reserved_peak"]
                   for file, row in rows[name].items())

    def ratio(name):
        return total(name) / total(TIME_REFERENCE) if total(TIME_REFERENCE) else None

    def shown(ratio):
        return "–" if ratio is None else f"{ratio:.3f}"

    print(f"Sums over {len(traces)} whole replays:\n")
    print_table(["allocator", "ms", f"÷ {TIME_REFERENCE}",
                 f"reserved ÷ {MEMORY_REFERENCE}, at most"],
                [[name, number(total(name)), shown(ratio(name)), shown(most_memory(name))]
                 for name in rows])


def in_order(found):
    """Without repetition, in order of appearance."""
    return list(dict.fromkeys(found))


def main(files):
    rows = []
    for file in files:
        with open(file, encoding="utf-8") as lines:
            rows += [json.loads(line) for line in lines if line.startswith("{")]
    medians = median_rows(rows)
    who = in_order(subject for _, subject in medians)
    what = sorted(in_order(measured for measured, _ in medians))
    counts = [count for _, count in medians.values()]
    print(f"Medians of {min(counts)} to {max(counts)} measurements, taken alternately.\n")

    def figure(measured, name):
        found = medians.get((measured, name))
        return value(found[0])[0] if found else None

    lines = [[m[1]] + [number(figure(m, name)) for name in who] for m in what]
    print_table([""] + who, lines)

    others = [name for name in who if name != REFERENCE]
    lines = []
    for measured in what:
        found = medians.get((measured, REFERENCE))
        if not found:
            continue
        own, more = value(found[0])
        line = [measured[1].rsplit(",", 1)[0]]
        for name in others:
            other = figure(measured, name)
            ratio = None if not other or not own else own / other if more else other / own
            line.append("–" if ratio is None else number(ratio) + " ×")
        lines.append(line)
    print(f"How many times better {REFERENCE} is:\n")
    print_table([""] + others, lines)

    print_sums(medians, who)
    lines = []
    for (measured, name), (row, _) in sorted(medians.items(), key=lambda item: item[0][0]):
        if row["mode"] == "replay":
            reserved = row["reserved_peak"]
            ratio = reserved / row["requested_peak"]
            lines.append([row["file"].split(".")[0], name, number(row["total_ms"]),
                          number(row["p50_ns"]), number(row["p99_ns"]), number(row["max_us"]),
                          # Only ours tells hits from misses.
                          number(row.get("hit_p50_ns")), number(row.get("hit_p99_ns")),
                          f"{int(reserved):,}" if reserved >= 0 else "–",
                          f"{ratio:.4f}" if reserved >= 0 else "–"])
    if lines:
        print("Replays, each operation timed:\n")
        print_table(["trace", "allocator", "sum, ms", "p50 ns", "p99 ns", "max µs",
                     "hit p50", "hit p99", "reserved, bytes", "÷ requested"], lines)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
