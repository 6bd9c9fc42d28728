#!/usr/bin/env python3
"""Attacks a binary of oomph with changed files, bit flips, kills, simultaneous runs, full disks and forged names.

    tools/attack.py all --binary target/release/oomph                     a quick round of everything, about two minutes
    tools/attack.py mutate --inputs 20000 --seed 7                        one kind, for longer
    tools/attack.py flips --flips 2000; tools/attack.py kills --rounds 200; tools/attack.py concurrent --rounds 200

What fails is kept in attack-failures/, with the command line that repeats it. Exit code 1: something failed.
Needs Python 3.9 and nothing else. SECURITY.md says what is promised."""

import argparse
import importlib
import sys
import tempfile
import time

from attacks.program import Failures, Program


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attack", choices=["all", *ATTACKS])
    parser.add_argument("--binary", default="target/release/oomph")
    parser.add_argument("--seed", default="1", help="another seed makes other inputs")
    parser.add_argument("--inputs", type=int, default=300, help="changed inputs (mutate)")
    parser.add_argument("--flips", type=int, default=50, help="bit flips per file (flips)")
    parser.add_argument("--rounds", type=int, default=0, help="rounds (kills: 10, concurrent: 5, full-disk: 10)")
    parser.add_argument("--jobs", type=int, default=2, help="starts at the same time")
    parser.add_argument("--only", default="", help="only readers whose name contains this (mutate)")
    parser.add_argument("--keep", default="attack-failures", help="folder for what fails")
    options = parser.parse_args()
    program = Program(options.binary)
    failures = Failures(options.keep)
    for name in ATTACKS if options.attack == "all" else [options.attack]:
        print(f"== {name}, seed {options.seed}", flush=True)
        before, began = failures.total, time.monotonic()
        with tempfile.TemporaryDirectory(prefix="oomph-attack-") as work:
            attack(name, program, failures, options, work)
        print(f"{name}: {failures.total - before} failures, {time.monotonic() - began:.0f} s", flush=True)
    for kind, count in sorted(failures.counts.items()):
        print(f"  {count:6}  {kind}")
    return 1 if failures.total else 0


# Each attack: its module, class and method.
ATTACKS = {
    "mutate": ("mutate", "MutationAttack", "run"),
    "flips": ("flips", "FlipAttack", "run"),
    "kills": ("folders", "FolderAttack", "kills"),
    "concurrent": ("folders", "FolderAttack", "concurrent"),
    "full-disk": ("folders", "FolderAttack", "full_disk"),
    "forged": ("forged", "ForgeAttack", "run"),
    "bombs": ("bombs", "BombAttack", "run"),
}


def attack(name, program, failures, options, work):
    module, kind, method = ATTACKS[name]
    made = getattr(importlib.import_module(f"attacks.{module}"), kind)(program, failures, options, work)
    getattr(made, method)()


if __name__ == "__main__":
    sys.exit(main())
