"""Runs that are killed, that share a folder, or that fill the disk: rows are never lost, mixed or wrong."""

import csv
import io
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from .program import Attack

SUITE = """question = "Is any row lost?"
base = "caching"
seeds = [1, 2]

[[group]]
workloads = ["museum-rmm-35", "museum-tt-metal-35516", "ramp", "checkerboard"]
strategies = ["caching", "direct", "bfc", "oomph"]
"""
THRESHOLDS = """question = "Is any row lost?"
kind = "threshold"
base = "caching"

[[group]]
workloads = ["museum-rmm-35", "museum-tt-metal-35516", "ramp"]
strategies = ["caching", "direct"]
repeat = 2
"""
# They contain times, or are made from files that do.
NOT_COMPARED = {"env.json", "timings.csv", "report.html", "summary.md", "techniques.md"}


def tree(folder):
    """The files of a run that do not depend on when it ran."""
    paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    names = {str(path.relative_to(folder)): path for path in paths if path.name not in NOT_COMPARED}
    return {name: path.read_bytes() for name, path in names.items() if not path.name.startswith(".") and "lock" not in path.name}


def difference(one, other):
    """The first difference of two trees, in words."""
    if one.keys() != other.keys():
        return f"files differ: {sorted(one.keys() ^ other.keys())[:5]}"
    names = [name for name in one if one[name] != other[name]]
    return f"contents differ: {names[:5]}" if names else None


class FolderAttack(Attack):
    def __init__(self, program, failures, options, work):
        super().__init__(program, failures, options, work)
        (self.work / "s.toml").write_text(SUITE)
        (self.work / "t.toml").write_text(THRESHOLDS)
        self.kinds = {
            "run": ["run", "../s.toml", "--jobs", "2"],
            "threshold": ["run", "../t.toml", "--jobs", "2"],
            "techniques": ["techniques", "--model", "reference-gpt-163m", "--set", "layers=1", "--no-cards", "--jobs", "2"],
        }

    def rounds(self, default):
        return self.options.rounds or default

    def room(self):
        return tempfile.TemporaryDirectory(dir=self.work)

    def reference(self, args):
        """An uninterrupted run: its files and how long it took."""
        with self.room() as room:
            began = time.monotonic()
            ended = self.program.start([*args, "--output", "d"], room, seconds=120)
            if ended.code != 0:
                raise SystemExit(f"oomph {' '.join(args)} failed: {ended.message}")
            return tree(Path(room) / "d"), time.monotonic() - began

    def check(self, name, ended, room):
        for kind, words in self.program.faults(ended):
            self.failures.add(name, kind, words, ended, [Path(room) / "d"])

    def kills(self):
        wholes = {kind: self.reference(args) for kind, args in self.kinds.items()}
        began = {"before the folder": 0, "resumed": 0}
        for number in range(self.rounds(10)):
            pick = random.Random(f"{self.options.seed}/{number}")
            kind = pick.choice(["run", "run", "threshold", "techniques"])
            whole, seconds = wholes[kind]
            with self.room() as room:
                folder = Path(room) / "d"
                args = [*self.kinds[kind], "--output", "d"]
                for _ in range(pick.choice([1, 1, 2, 4])):
                    number_of_signal = pick.choice([signal.SIGKILL, signal.SIGTERM])
                    ended = self.program.start(
                        args, room, seconds=120, kill_after=pick.uniform(0, seconds), kill_with=number_of_signal
                    )
                    if ended.code != -number_of_signal:
                        self.check("kill", ended, room)
                    if (folder / "env.json").exists():
                        args = [*self.kinds[kind], "--resume", "d"]
                is_resumed = args[-2] == "--resume"
                began["resumed" if is_resumed else "before the folder"] += 1
                if not is_resumed:
                    # Nothing was begun, so nothing can be lost.
                    shutil.rmtree(folder, ignore_errors=True)
                ended = self.program.start(args, room, seconds=120)
                wrong = difference(tree(folder), whole) if ended.code == 0 else f"resume ended with exit code {ended.code}"
                if wrong:
                    self.failures.add("kill", kind, wrong, ended, [folder])
        print(f"{self.rounds(10)} kills: {began}")

    def concurrent(self):
        wholes = {seed: self.reference([*self.kinds["run"], "--seed", seed])[0] for seed in ("5", "6")}
        codes = {}
        for number in range(self.rounds(5)):
            pick = random.Random(f"{self.options.seed}/{number}")
            with self.room() as room:
                folder = Path(room) / "d"
                plans = [["--output", "d", "--seed", pick.choice(["5", "6"])] for _ in range(2)]
                plans.append([pick.choice(["--resume", "--output"]), "d", "--seed", pick.choice(["5", "6"])])
                children = []
                for plan in pick.sample(plans, len(plans)):
                    error = tempfile.TemporaryFile()
                    args = [*self.kinds["run"], *plan]
                    children.append((args, self.program.popen(args, room, subprocess.DEVNULL, error), error))
                    time.sleep(pick.choice([0, 0, 0.01, 0.1]))
                for args, child, error in children:
                    code = child.wait(timeout=120)
                    codes[code] = codes.get(code, 0) + 1
                    error.seek(0)
                    text = error.read()
                    if code not in self.program.codes or b"panicked" in text:
                        self.failures.add("concurrent", "exit", f"{args}: exit code {code}: {text[-300:]!r}", None, [folder])
                self.judge_shared(folder, room, wholes)
        print(f"{self.rounds(5)} rounds of three runs into one folder; exit codes: {codes}")

    def judge_shared(self, folder, room, wholes):
        try:
            seed = str(json.loads((folder / "env.json").read_text())["settings"]["seed"])
            text = (folder / "runs.csv").read_text()
        except (OSError, ValueError, KeyError) as error:
            return self.failures.add("concurrent", "folder", f"no complete folder: {error}", None, [folder])
        rows = list(csv.DictReader(io.StringIO(text)))
        strange = [row["case_id"] for row in rows if row["seed"] != seed]
        if strange:
            return self.failures.add("concurrent", "mixed", f"env.json has seed {seed}, but {strange[:3]}", None, [folder])
        ended = self.program.start([*self.kinds["run"], "--resume", "d", "--seed", seed], room, seconds=120)
        wrong = difference(tree(folder), wholes[seed]) if ended.code == 0 else f"resume: exit code {ended.code}"
        if wrong:
            self.failures.add("concurrent", "lost", wrong, ended, [folder])

    def full_disk(self):
        whole, _ = self.reference(self.kinds["run"])
        converted = self.work / "whole.oomph"
        self.program.start(["convert", "checkerboard", converted], self.work)
        disks = [self.limited_file_size]
        if os.getuid() == 0 and shutil.which("mount"):
            disks.append(self.small_disk)
        else:
            print("no small disk: mounting one needs root; only the size of files is limited")
        for number in range(self.rounds(10)):
            pick = random.Random(f"{self.options.seed}/{number}")
            pick.choice(disks)(pick, whole, converted.read_bytes())
        print(f"{self.rounds(10)} full disks")

    def limited_file_size(self, pick, whole, converted):
        """A limit on the size of files (EFBIG), as a quota does."""
        kib = pick.choice([0, 1, 2, 4, 16, 64, 256])
        script = f'ulimit -f {kib}; trap "" XFSZ; exec "$@"'
        with self.room() as room:
            def limited(*args):
                child = subprocess.run(
                    ["bash", "-c", script, "bash", self.program.binary, *args], cwd=room, capture_output=True,
                    env=self.program.environment(room), timeout=120, stdin=subprocess.DEVNULL,
                )
                return child.returncode, child.stderr
            self.judge_full(room, Path(room), limited, lambda: None, whole, converted)

    def small_disk(self, pick, whole, converted):
        """A disk with little free space (ENOSPC)."""
        with self.room() as room:
            disk = Path(room) / "disk"
            disk.mkdir()
            mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], capture_output=True)
            if mounted.returncode != 0:
                print(f"no small disk: {mounted.stderr.decode(errors='replace').strip()}")
                return
            try:
                for name in ("s.toml", "t.toml"):
                    shutil.copy(self.work / name, disk)
                (disk / "in").mkdir()
                ballast = disk / "ballast"
                free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
                ballast.write_bytes(bytes(free - pick.choice([0, 4096, 16384, 65536, 300_000])))

                def full(*args):
                    ended = self.program.start(args, disk / "in", seconds=120)
                    return ended.code, ended.err
                self.judge_full(disk / "in", disk / "in", full, ballast.unlink, whole, converted)
            finally:
                subprocess.run(["umount", disk], check=False)

    def judge_full(self, room, place, start, make_room, whole, converted):
        code, error = start(*self.kinds["run"], "--output", "d")
        out = place / "out.oomph"
        codes = [(code, error), start("convert", "checkerboard", "out.oomph")]
        for code, error in codes:
            if code not in self.program.codes or b"panicked" in error:
                self.failures.add("full-disk", "exit", f"exit code {code}: {error[-300:]!r}", None, [place / "d"])
            if code == 0 and not (place / "d" / "env.json").exists() and not out.exists():
                self.failures.add("full-disk", "silent", "exit code 0, but nothing was written", None)
        if out.exists() and out.read_bytes() != converted:
            self.failures.add("full-disk", "cut", "convert left a file that is not complete", None, [out])
        make_room()
        if (place / "d" / "env.json").exists():
            args = [*self.kinds["run"], "--resume", "d"]
        else:
            shutil.rmtree(place / "d", ignore_errors=True)
            args = [*self.kinds["run"], "--output", "d"]
        ended = self.program.start(args, room, seconds=120)
        wrong = difference(tree(place / "d"), whole) if ended.code == 0 else f"resume: exit code {ended.code}"
        if wrong:
            self.failures.add("full-disk", "lost", wrong, ended, [place / "d"])
