#!/usr/bin/env python3
"""Compares the results of two builds of oomph: suites on the simulated device, and recordings.

    tools/compare_builds.py --base COMMIT [--with BINARY] [--recordings FOLDER ...] [--quick]

Builds COMMIT in target/compare/COMMIT, runs it and BINARY (default: target/release/oomph) on the same work, and compares:
  CSV    runs.csv, comparison.csv, thresholds.csv, techniques.csv of the suites quick, strategies, leaks, oom-thresholds
         and techniques, row by row
  JSON   `advise`, `leaks` and `verify` of every recording, value by value

Every difference is assigned to one class and counted:
  text      a sentence differs (reason, message, title ...); numbers inside are not compared
  unknown   a cell was 0 and is now empty
  middle    a row of an `address:` strategy on a recording that starts in the middle of a program
  number    everything else: an error, exit code 1
The output of COMMIT is kept in target/compare and reused.
"""
import argparse
import collections
import concurrent.futures
import csv
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUITES = ["quick", "strategies", "leaks", "oom-thresholds", "techniques"]
COMMANDS = ["advise", "leaks", "verify"]
FILES = ["runs.csv", "comparison.csv", "thresholds.csv", "techniques.csv"]
TEXT_COLUMNS = {"reason", "title", "best_use", "published_memory", "published_performance"}
# A JSON string with a space is text; names, ids and enum values have none. Strings under these keys
# are values that may contain spaces, and are compared exactly.
EXACT_KEYS = {"settings", "strategy", "case_id", "workload", "line", "export", "frames", "site", "name"}


def build(commit):
    place = ROOT / "target" / "compare" / commit
    binary = place / "target" / "release" / "oomph"
    if not binary.exists():
        if not place.exists():
            subprocess.run(["git", "worktree", "add", "--detach", str(place), commit], cwd=ROOT, check=True)
        subprocess.run(["cargo", "build", "--release", "--bin", "oomph"], cwd=place, check=True)
    return binary


def clean_environment():
    names = [name for name in os.environ if name.startswith(("PYTORCH_", "OOMPH_", "SLURM_"))]
    return {name: value for name, value in os.environ.items() if name not in names} | {"NO_COLOR": "1"}


def run_suites(binary, out, suites):
    for suite in suites:
        folder = out / suite
        if folder.exists() and any((folder / name).exists() for name in FILES):
            continue
        print(f"  {suite}", flush=True)
        command = [str(binary), "run", suite, "--output", str(folder)]
        result = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
        if not any((folder / name).exists() for name in FILES):
            sys.exit(f"{' '.join(command)} wrote nothing:\n{result.stderr[-2000:]}")


def run_recordings(binary, out, recordings):
    out.mkdir(parents=True, exist_ok=True)

    def run(path, command):
        target = out / f"{path.parent.name}--{path.name}.{command}.json"
        if not target.exists():
            arguments = [str(binary), command, str(path), "--format", "json"]
            result = subprocess.run(arguments, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
            target.write_text(json.dumps({"code": result.returncode, "out": result.stdout}))

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda work: run(*work), [(path, command) for path in recordings for command in COMMANDS]))


class Differences:
    def __init__(self):
        self.counts = collections.Counter()
        self.examples = collections.defaultdict(list)
        self.compared = 0

    def add(self, kind, place, before, after):
        self.counts[kind] += 1
        if len(self.examples[kind]) < 25:
            self.examples[kind].append(f"{place}: {str(before)[:110]!r} -> {str(after)[:110]!r}")


def compare_csv(before, after, name, differences):
    def read(path):
        with open(path, newline="") as file:
            return list(csv.DictReader(file))

    old, new = read(before), read(after)
    if len(old) != len(new):
        differences.add("number", name, f"{len(old)} rows", f"{len(new)} rows")
    for index, (a, b) in enumerate(zip(old, new)):
        where = f"{name}:{a.get('case_id') or index}"
        for column in a.keys() | b.keys():
            differences.compared += 1
            x, y = a.get(column), b.get(column)
            if x == y:
                continue
            if column in TEXT_COLUMNS:
                differences.add("text", f"{where} {column}", x, y)
            elif x in ("0", "0.0") and y == "":
                differences.add("unknown", f"{where} {column}", x, y)
            elif a.get("strategy", "").startswith("address:"):
                differences.add("middle", f"{where} {column}", x, y)
            else:
                differences.add("number", f"{where} {column}", x, y)


def compare_json(a, b, where, differences, key=""):
    if isinstance(a, dict) and isinstance(b, dict):
        for name in a.keys() | b.keys():
            compare_json(a.get(name), b.get(name), f"{where}.{name}", differences, name)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (x, y) in enumerate(zip(a, b)):
            compare_json(x, y, f"{where}[{index}]", differences, key)
    else:
        differences.compared += 1
        if a == b:
            return
        if isinstance(a, str) and isinstance(b, str) and " " in a and key not in EXACT_KEYS:
            differences.add("text", where, a, b)
        elif a in (0, 0.0) and b is None:
            differences.add("unknown", where, a, b)
        else:
            differences.add("number", where, a, b)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--base", required=True, help="commit to compare with")
    arguments.add_argument("--base-binary", help="a build of that commit, if there is one already")
    arguments.add_argument("--with", dest="binary", default=str(ROOT / "target/release/oomph"))
    arguments.add_argument("--recordings", action="append", default=[], help="further folders with recordings")
    arguments.add_argument("--suites", default=",".join(SUITES))
    arguments.add_argument("--limit", type=int, default=0, help="only the first N recordings")
    options = arguments.parse_args()
    place = ROOT / "target" / "compare"
    base = pathlib.Path(options.base_binary) if options.base_binary else build(options.base)
    folders = [ROOT / "workloads/recorded", ROOT / "tools/recording", *map(pathlib.Path, options.recordings)]
    recordings = [path for folder in folders for path in sorted(folder.glob("*.pickle*"))]
    recordings = recordings[: options.limit] if options.limit else recordings
    suites = [suite for suite in options.suites.split(",") if suite]
    new = place / "new"
    subprocess.run(["rm", "-rf", str(new)], check=True)
    for name, binary, out in [("base", base, place / f"out-{options.base}"), ("new", pathlib.Path(options.binary), new)]:
        print(f"{name}: {binary}", flush=True)
        run_suites(binary, out, suites)
        run_recordings(binary, out / "recordings", recordings)
    differences = Differences()
    old = place / f"out-{options.base}"
    for suite in suites:
        for name in FILES:
            if (old / suite / name).exists() or (new / suite / name).exists():
                compare_csv(old / suite / name, new / suite / name, f"{suite}/{name}", differences)
    for path in recordings:
        for command in COMMANDS:
            name = f"{path.parent.name}--{path.name}.{command}.json"
            a, b = (json.loads((folder / "recordings" / name).read_text()) for folder in (old, new))
            if a["code"] != b["code"]:
                differences.add("number", f"{name} exit code", a["code"], b["code"])
            try:
                compare_json(json.loads(a["out"]), json.loads(b["out"]), name, differences)
            except json.JSONDecodeError:
                if a["out"] != b["out"]:
                    differences.add("number", f"{name} output", a["out"][:80], b["out"][:80])
    print(f"\n{differences.compared:,} values compared")
    for kind in ["text", "unknown", "middle", "number"]:
        print(f"{kind:8} {differences.counts[kind]:>7}")
        for example in differences.examples[kind]:
            print(f"    {example}")
    sys.exit(1 if differences.counts["number"] else 0)


if __name__ == "__main__":
    main()
