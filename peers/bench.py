#!/usr/bin/env python3
"""Measures our allocator and its peers alternately, on one GPU, and prints tables.

Needs alloc-lab. For the peers also nvcc and PyTorch with its headers; without them only ours is
measured. RMM takes part if RMM_ROOT names a folder with its unpacked wheels (see build.sh), or if the
folder `rmm` beside this one holds the wheels.

Every measurement has a process of its own. Ours makes more steps than the peers, which are slower by an
order of magnitude; what is compared are times per step."""

import argparse
import datetime
import gzip
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile

import table

HERE = pathlib.Path(__file__).resolve().parent
NO_GPU = 77

# Alternatives of our own: arguments of alloc-lab bench. The first is the one that is compared.
OURS = [[], ["--api", "raw"]]
OURS_AS_PYTORCH = [["--policy", "pytorch"],
                   ["--policy", "pytorch", "--conf", "expandable_segments:True"]]
OURS_IN_REPLAYS = OURS + [["--conf", "ours_goal:speed"]] + OURS_AS_PYTORCH

PEERS = ["torch", "torch expandable", "async", "cub", "rmm_pool", "rmm_arena"]

# Mode and arguments, and how often: for the peers, for ours.
SMALL = [
    ("pingpong 1024 {}", 200_000, 2_000_000),
    ("pingpong 67108864 {}", 200_000, 2_000_000),
    ("churn 64 {} 22 7", 100_000, 1_000_000),
    ("churn 1024 {} 22 7", 100_000, 1_000_000),
    ("churn 8192 {} 22 7", 100_000, 1_000_000),
    ("threads 1 1024 {} 22", 100_000, 1_000_000),
    ("threads 16 1024 {} 22", 10_000, 1_000_000),
    ("shared 16 1024 {} 22", 10_000, 200_000),
]
# The same for PyTorch and ours alone, with more steps, again and again.
DUEL = [
    ("pingpong 1024 {}", 500_000, 2_000_000),
    ("pingpong 67108864 {}", 500_000, 2_000_000),
    ("churn 64 {} 22 7", 500_000, 1_000_000),
    ("churn 1024 {} 22 7", 500_000, 1_000_000),
    ("churn 8192 {} 22 7", 500_000, 1_000_000),
    ("shared 16 1024 {} 22", 50_000, 1_000_000),
]
DUEL_OF_OURS = ["threads 1 1024 1000000 22", "threads 16 1024 1000000 22"]
# Only ours; the peers' driver has no such mode.
LIVE = ["live 1000 1000000", "live 1000000 1000000"]
TRACES = ["gpt_varlen", "resnet", "moe", "unet_res", "rlhf"]

# Longer than anything takes, in seconds.
LIMIT_S = 90


def log(text):
    print(text, file=sys.stderr, flush=True)


class Peers:
    """The driver of the peers, one process for each of PyTorch's settings."""

    def __init__(self, program, libraries):
        self.program = program
        self.environment = dict(os.environ, LD_LIBRARY_PATH=libraries)
        self.environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)
        self.running = {}
        self.broken = set()

    def measure(self, name, words):
        """One line of JSON, or None."""
        if name in self.broken:
            return None
        allocator, _, expandable = name.partition(" ")
        environment = dict(self.environment)
        if expandable:
            environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        if expandable not in self.running:
            self.running[expandable] = subprocess.Popen(
                [self.program, "batch"], env=environment, text=True, bufsize=1,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        server = self.running[expandable]
        try:
            server.stdin.write(f"{allocator} {words}\n")
            line = server.stdout.readline()
        except OSError as error:
            line = str(error)
        if not line.startswith("{"):
            log(f"{name} {words}: {line.strip()}; once more, alone")
            line = run([self.program, allocator, *words.split()], environment)
        if line is None:
            log(f"{name} is left out from now on")
            self.broken.add(name)
        return line


def run(command, environment=None):
    """What a program printed, or None if it failed."""
    try:
        done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE,
                              timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        log(f"{' '.join(map(str, command))} took more than {LIMIT_S} s")
        return None
    if done.returncode != 0:
        log(f"{' '.join(map(str, command))} ended with {done.returncode}")
        return None
    return done.stdout


def rmm_root(scratch):
    """Where RMM is unpacked, or None."""
    if os.environ.get("RMM_ROOT"):
        return os.environ["RMM_ROOT"]
    wheels = list((HERE.parent / "rmm").glob("*.whl"))
    for wheel in wheels:
        zipfile.ZipFile(wheel).extractall(scratch / "rmm")
    return str(scratch / "rmm") if wheels else None


def build_peers(scratch):
    """The driver of the peers, or None if this machine cannot build it."""
    if not shutil.which("nvcc"):
        log("no nvcc here: only ours is measured")
        return None
    program = scratch / "peer"
    for root in dict.fromkeys([rmm_root(scratch), None]):
        environment = dict(os.environ)
        environment.pop("RMM_ROOT", None)
        if root:
            environment["RMM_ROOT"] = root
        done = subprocess.run(["bash", HERE / "build.sh", program], env=environment, text=True,
                              stdout=subprocess.PIPE, check=False)
        if done.returncode == 0:
            libraries = done.stdout.strip().splitlines()[-1].partition("LD_LIBRARY_PATH=")[2]
            inherited = os.environ.get("LD_LIBRARY_PATH")
            return Peers(program, f"{libraries}:{inherited}" if inherited else libraries)
        log("the peers do not build" + (" with RMM; without it:" if root else ""))
    return None


class Session:
    """A run: what is measured, until when, and where the results go."""

    def __init__(self, options, scratch):
        self.lab = options.lab
        self.backend = options.backend
        self.out = options.out
        self.end = time.monotonic() + options.seconds
        self.results = open(self.out / "bench.jsonl", "w", encoding="utf-8")
        self.traces = scratch
        self.peers = build_peers(scratch) if options.backend == "cuda" else None
        for name in TRACES:
            with gzip.open(options.traces / f"{name}.csv.gz") as packed:
                (scratch / f"{name}.csv").write_bytes(packed.read())

    def is_over(self):
        return time.monotonic() > self.end

    def keep(self, line):
        if line:
            self.results.write(line.strip() + "\n")
            self.results.flush()

    def ours(self, words, alternative):
        command = [self.lab, "bench", *words.split(), "--backend", self.backend, "--json"]
        self.keep(run(command + alternative))

    def compare(self, template, peer_count, own_count, alternatives):
        """One measurement of everybody."""
        for alternative in alternatives:
            self.ours(template.format(own_count), alternative)
        if self.peers:
            for name in PEERS:
                self.keep(self.peers.measure(name, template.format(peer_count)))

    def predictions(self):
        """Replays on the device beside the simulator's prediction."""
        files = [self.traces / f"{name}.csv" for name in TRACES]
        lines = run([self.lab, "replay", *files, "--backend", self.backend, "--json"])
        (self.out / "predictions.jsonl").write_text(lines or "")
        for row in map(json.loads, (lines or "").splitlines()):
            alike = row["predicted_peak"] == row["reserved_peak"]
            at = row["predicted_at_addresses"]
            alike_at = "" if at is None else f", at the same addresses {at:,}"
            log(f"{pathlib.Path(row['file']).stem}, {row['policy']} {row['conf']}: reserved "
                f"{row['reserved_peak']:,}, predicted "
                f"{'the same' if alike else format(row['predicted_peak'], ',')}{alike_at}")

    def small(self):
        for template, peer_count, own_count in SMALL:
            if self.is_over():
                return
            self.compare(template, peer_count, own_count, OURS + OURS_AS_PYTORCH[:1])
        for words in LIVE:
            for alternative in OURS:
                self.ours(words, alternative)

    def duel(self):
        """Ours and PyTorch, for as long as there is time."""
        while not self.is_over():
            for template, peer_count, own_count in DUEL:
                self.ours(template.format(own_count), [])
                if self.peers:
                    self.keep(self.peers.measure("torch", template.format(peer_count)))
            for words in DUEL_OF_OURS:
                self.ours(words, [])

    def replays(self):
        for name in TRACES:
            if self.is_over():
                return
            for mode in ["replay", "whole"]:
                self.compare(f"{mode} {self.traces / name}.csv", 1, 1, OURS_IN_REPLAYS)


def describe(out):
    """Notes what this was measured on."""
    text = [f"date: {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC"]
    for label, command in [
        ("GPU, driver", ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]),
        ("PyTorch, CUDA", [sys.executable, "-c",
                           "import torch; print(torch.__version__, torch.version.cuda)"]),
        ("CPU", ["sh", "-c", "lscpu | sed -n 's/^Model name: *//p'; nproc"]),
    ]:
        try:
            done = subprocess.run(command, text=True, capture_output=True, check=False)
        except OSError:
            continue
        if done.returncode == 0:
            text.append(f"{label}: {', '.join(done.stdout.split(chr(10))).strip(', ')}")
    text.append("command: " + " ".join(sys.argv))
    (out / "machine.txt").write_text("\n".join(text) + "\n")
    log("\n".join(text))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench-results"),
                        help="folder for the results")
    parser.add_argument("--seconds", type=float, default=330,
                        help="no measurement begins later than this after the start")
    parser.add_argument("--rounds", type=int, default=3,
                        help="of the small measurements; replays have one less")
    parser.add_argument("--only", choices=["predictions", "small", "replays", "duel"],
                        help="leave out the rest; duel: the small ones again and again, with more "
                        "steps, of ours and PyTorch alone")
    parser.add_argument("--lab", type=pathlib.Path, default=HERE.parent / "alloc-lab",
                        help="the program alloc-lab")
    parser.add_argument("--traces", type=pathlib.Path, default=HERE.parent / "traces",
                        help="folder of the traces")
    parser.add_argument("--backend", choices=["cuda", "mock"], default="cuda",
                        help="mock: try the script on a machine without a GPU")
    return parser.parse_args()


def main():
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    probe = [options.lab, "bench", "pingpong", "512", "1", "--backend", options.backend, "--json"]
    if subprocess.run(probe, stdout=subprocess.DEVNULL, check=False).returncode == NO_GPU:
        sys.exit(NO_GPU)
    describe(options.out)
    with tempfile.TemporaryDirectory() as scratch:
        session = Session(options, pathlib.Path(scratch))
        def wanted(part):
            return options.only in (None, part)

        if wanted("predictions") and options.backend == "cuda":
            session.predictions()
        if options.only == "duel":
            session.duel()
        for i in range(0 if options.only == "duel" else options.rounds):
            if wanted("small"):
                session.small()
            if wanted("replays") and (i + 1 < options.rounds or i == 0):
                session.replays()
            log(f"round {i + 1} done" if not session.is_over() else "time is over")
        session.results.close()
    results = options.out / "bench.jsonl"
    with open(options.out / "table.md", "w", encoding="utf-8") as file:
        stdout, sys.stdout = sys.stdout, file
        table.main([results])
        sys.stdout = stdout
    print((options.out / "table.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
