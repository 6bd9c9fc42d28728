#!/usr/bin/env python3
"""Runs the programs of tests/integration/models_truth/truth.csv again and compares their peaks.

usage: truth.py [--oomph PROGRAM] [--write] [PART_OF_A_NAME ...]

Without --oomph the programs run on this machine's GPU; with it they are rehearsed on an H200 that computes nothing.
--write stores the peaks in the table. Needs PyTorch, transformers, and peft for LoRA.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / "tests/integration/models_truth"
PEAKS = ("peak_allocated", "peak_reserved")


def command(row: dict[str, str]) -> list[str]:
    """The program of a row."""
    words = [sys.executable, str(HERE / "train.py"), str(FOLDER / "configs" / f"{row['config']}.json")]
    words += ["--batch", row["batch"], "--optimizer", row["optimizer"]]
    if row["context"]:
        words += ["--context", row["context"]]
    techniques = [word for word in row["techniques"].split("+") if word]
    if "amp" not in techniques:
        words += ["--dtype", row["dtype"]]
    for word in techniques:
        kind = next((kind for kind in ("qlora", "lora") if word.startswith(kind)), None)
        words += [f"--{kind}", word.removeprefix(kind)] if kind else [f"--{word}"]
    return words


def run(row: dict[str, str], oomph: str | None) -> dict[str, int]:
    """Runs a program; what it printed last."""
    with tempfile.TemporaryDirectory() as folder:
        words = command(row)
        if oomph:
            words = [oomph, "rehearse", "--card", "h200", "--output", f"{folder}/recording", "--", *words]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"parameters"')]
    if not lines:
        raise SystemExit(f"{row['name']}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oomph", metavar="PROGRAM")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    with open(FOLDER / "truth.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if args.names and not any(part in row["name"] for part in args.names):
            continue
        found = run(row, args.oomph)
        differences = [f"{100 * (found[peak] / int(row[peak]) - 1):+.4f} %" for peak in PEAKS]
        print(f"{row['name']:42} {found['peak_allocated']:>14,} {found['peak_reserved']:>14,}  {'  '.join(differences)}", flush=True)
        row.update({column: str(found[column]) for column in ("parameters", *PEAKS)})
    if args.write:
        with open(FOLDER / "truth.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
