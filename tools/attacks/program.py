"""Starts the program and judges how it ends: exit code, signals, panics, time, memory, control characters."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CORPUS = REPOSITORY / "fuzz" / "corpus"
# Of processor time: the machine may be busy.
MOST_SECONDS = 20
# A start that waits for something is ended.
MOST_WAITING = 120
MOST_BYTES = 1 << 30
SMALL_FILE = 1 << 20
# Files of one kind of failure that are kept.
MOST_KEPT = 10

# Everything that moves a cursor, ends a line or changes the direction of text, but newline and tab.
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)


class Ended:
    """How a start ended."""

    def __init__(self, args, code, out, err, seconds, cpu_seconds, peak_bytes, overdue):
        self.args = args
        self.code = code
        self.out = out
        self.err = err
        self.seconds = seconds
        self.cpu_seconds = cpu_seconds
        self.peak_bytes = peak_bytes
        self.overdue = overdue

    @property
    def message(self):
        return self.err.decode("utf-8", "replace").strip()


class Program:
    """The binary under attack."""

    def __init__(self, binary):
        self.binary = str(Path(binary).resolve())
        help_text = subprocess.run([self.binary, "--help"], capture_output=True, text=True, check=True).stdout
        self.commands = {line.split()[0] for line in help_text.splitlines() if re.match(r"  [a-z]+  ", line)}
        table = help_text.split("Exit codes:")[1]
        self.codes = {int(code) for code in re.findall(r"(?m)^ +(\d+)  ", table)}
        if not self.commands or not {0, 1, 2} <= self.codes:
            raise SystemExit(f"{binary} --help does not list its commands and exit codes")

    def environment(self, folder, extra=None):
        return {"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(folder), **(extra or {})}

    def popen(self, args, folder, out, err, extra=None):
        return subprocess.Popen(
            [self.binary, *map(str, args)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=self.environment(folder, extra),
            start_new_session=True,
        )

    def start(self, args, folder, extra=None, seconds=MOST_WAITING, kill_after=None, kill_with=signal.SIGKILL):
        """Runs to the end. With `kill_after`, the signal is sent after that many seconds."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            began = time.monotonic()
            child = self.popen(args, folder, out, err, extra)
            overdue = threading.Event()

            def end(number, is_late):
                if is_late:
                    overdue.set()
                try:
                    os.killpg(child.pid, number)
                except ProcessLookupError:
                    pass

            timers = [threading.Timer(seconds, end, (signal.SIGKILL, True))]
            if kill_after is not None:
                timers.append(threading.Timer(kill_after, end, (kill_with, False)))
            for timer in timers:
                timer.start()
            _, status, usage = os.wait4(child.pid, 0)
            for timer in timers:
                timer.cancel()
            child.returncode = os.waitstatus_to_exitcode(status)
            elapsed = time.monotonic() - began
            out.seek(0)
            err.seek(0)
            return Ended(
                [str(arg) for arg in args],
                child.returncode,
                out.read(64 << 20),
                err.read(1 << 20),
                elapsed,
                usage.ru_utime + usage.ru_stime,
                usage.ru_maxrss << 10,
                overdue.is_set(),
            )

    def faults(self, ended, data_out=None, input_bytes=0):
        """What is wrong with how a start ended, as pairs of a kind and words. `data_out`: stdout is `json` or `data` and may
        contain names as they are in the file."""
        found = []
        if ended.overdue:
            found.append(("slow", f"not ended after {ended.seconds:.0f} s"))
        elif ended.cpu_seconds > MOST_SECONDS:
            found.append(("slow", f"took {ended.cpu_seconds:.0f} s of processor time"))
        if ended.code < 0 and not ended.overdue:
            found.append(("signal", f"ended by signal {-ended.code}"))
        elif ended.code not in self.codes:
            found.append(("exit", f"exit code {ended.code} is not documented"))
        if ended.code == 101 or b"panicked at" in ended.err:
            found.append(("panic", ended.message[-300:]))
        if ended.peak_bytes > MOST_BYTES and input_bytes < SMALL_FILE:
            found.append(("memory", f"{ended.peak_bytes >> 20} MiB for a file of {input_bytes} bytes"))
        for name, text in (("stdout", ended.out), ("stderr", ended.err)):
            if name == "stdout" and data_out == "data":
                continue
            if name == "stdout" and data_out == "json":
                if ended.code == 0 and not is_json(text):
                    found.append(("json", "stdout is not JSON"))
                continue
            match = CONTROL.search(text.decode("utf-8", "surrogateescape"))
            if match:
                near = match.string[max(match.start() - 40, 0) : match.end() + 40]
                found.append(("control", f"{name}: {near!r}"))
        return found


def is_json(text):
    try:
        json.loads(text)
        return True
    except ValueError:
        return False


class Failures:
    """Keeps what failed, by kind, with the command line that repeats it."""

    def __init__(self, keep):
        self.keep = Path(keep)
        self.counts = {}
        self.lock = threading.Lock()

    def add(self, attack, kind, words, ended=None, paths=()):
        with self.lock:
            key = f"{attack}-{kind}"
            number = self.counts[key] = self.counts.get(key, 0) + 1
            if number > MOST_KEPT:
                return
            place = self.keep / f"{key}-{number}"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            lines = [words]
            if ended:
                lines += ["oomph " + " ".join(map(repr, ended.args)), f"exit code {ended.code}", ended.message[-2000:]]
            for path in map(Path, paths):
                if path.is_dir():
                    shutil.copytree(path, place / path.name, symlinks=True)
                elif path.is_file():
                    shutil.copy(path, place)
            (place / "how.txt").write_text("\n".join(lines) + "\n", errors="replace")
            print(f"{place}: {words[:200]}", flush=True)

    @property
    def total(self):
        return sum(self.counts.values())


class Attack:
    """What every attack has: the program, where failures go, the options, and a folder to work in."""

    def __init__(self, program, failures, options, work):
        self.program = program
        self.failures = failures
        self.options = options
        self.work = Path(work)
