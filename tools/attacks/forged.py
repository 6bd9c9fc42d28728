"""Names with control, line-end and direction characters in every text of every file: none of them reaches a terminal, a pipe
or a page as it is."""

import csv
import gzip
import io
import json
import os
import pickle
import pty
import random
import select
import shutil
import struct
import tempfile
import time
import zlib
from pathlib import Path

from .program import CORPUS, Attack
from .samples import Samples, seeds

CHARACTERS = ["\x1b", "\n", "\r", "\x07", "\x08", "\x7f", "\x9b", "\u202e", "\u2066", "\u2028", "\u200f"]
# Text before and after a character, so that it is told from the same character that the program wrote itself.
BEFORE, AFTER = "FORGE", "OOMPHEVIL"
RAW = [(BEFORE + character + AFTER).encode() for character in CHARACTERS]
# In a page, markup is as dangerous.
RAW_IN_PAGES = [(BEFORE + text + AFTER).encode() for text in ["<b>", "</script>"]]


def forged(pick):
    return BEFORE + pick.choice(CHARACTERS) + AFTER


def forged_for_page(pick):
    return BEFORE + pick.choice(CHARACTERS + ["<b>", "</script>"]) + AFTER


def forge_texts(pick, value, share, make=forged):
    """Replaces or extends a share of all texts. Keys stay."""
    if isinstance(value, str):
        return value + make(pick) if pick.random() < share else value
    if isinstance(value, dict):
        return {key: forge_texts(pick, item, share, make) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(forge_texts(pick, item, share, make) for item in value)
    return value


def snapshot(pick):
    """A snapshot with forged frames, files, annotations, metadata and settings. Words of the format stay."""
    value = pickle.loads(pick.choice([data for data in seeds("snapshot") if len(data) < 60_000]))
    frame = {"name": forged_for_page(pick), "filename": forged_for_page(pick), "line": 7}
    for trace in value["device_traces"]:
        for entry in trace:
            entry["frames"] = [frame, {**frame, "name": forged(pick)}]
            for key in ("compile_context", "user_metadata"):
                if key in entry or pick.random() < 0.3:
                    entry[key] = forged(pick)
    for segment in value["segments"]:
        segment["frames"] = [frame]
        for block in segment["blocks"]:
            block["frames"] = [frame]
    if pick.random() < 0.3:
        value["allocator_settings"] = forge_texts(pick, value.get("allocator_settings", {}), 0.5)
    if pick.random() < 0.2:
        broken = pick.choice([entry for trace in value["device_traces"] for entry in trace])
        broken["action"] = forged(pick)
    if pick.random() < 0.5:
        name = forged(pick)
        value["external_annotations"] = [
            {"stage": stage, "name": name, "device": 0, "time_us": time_us} for stage, time_us in (("START", 1), ("END", 9 << 50))
        ]
    return "a.pickle", pickle.dumps(value, protocol=4)


def text_trace(pick):
    """A text format in which words, but not the structure, are forged: in JSON strings escaped, otherwise as they are."""
    kind = pick.choice(["native", "rmm", "stalloc", "umpire", "minimalloc"])
    data = pick.choice(seeds(kind)).decode()
    rows = data.splitlines(keepends=True)
    bad = forged(pick)
    quoted = json.dumps(bad)[1:-1] if kind in ("native", "umpire") else bad
    for _ in range(3):
        row = pick.randrange(len(rows))
        words = [word for word in rows[row].replace('"', " ").split() if word[0].isalpha()] or [rows[row].strip() or " "]
        word = pick.choice(words)
        rows[row] = rows[row].replace(word, word + quoted, 1)
    return {"rmm": "a.csv", "minimalloc": "a.csv"}.get(kind, "a.txt"), "".join(rows).encode()


def toml(pick, kind):
    data = pick.choice(seeds(kind)).decode()
    # TOML writes control characters as \uXXXX.
    bad = "".join(c if c.isalpha() else f"\\u{ord(c):04x}" for c in forged(pick))
    places = [index for index, c in enumerate(data) if c == '"']
    place = pick.choice(places)
    raw = pick.random() < 0.2
    return data[:place] + (forged(pick) if raw else bad) + data[place:]


def row_checksum(columns, cells):
    """The checksum of a row, as `src/report/checksum.rs` computes it: whoever forges a name can compute it, too."""
    texts = [text.encode() for text in [*columns, *cells]]
    return f"{zlib.crc32(b''.join(struct.pack('<Q', len(text)) + text for text in texts)):08x}"


def table(pick, data):
    rows = list(csv.reader(io.StringIO(data.decode())))
    row = pick.choice(rows)
    cell = pick.randrange(len(row))
    row[cell] += forged_for_page(pick)
    if rows[0][-1] == "row_crc32" and row is not rows[0]:
        row[-1] = row_checksum(rows[0][:-1], row[:-1])
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue().encode()


OF_SOURCES = [
    ["inspect", "{file}"], ["inspect", "{file}", "--summary"], ["inspect", "{file}", "--by", "site", "--at", "peak"],
    ["leaks", "{file}"], ["leaks", "{file}", "--format", "csv"], ["advise", "{file}"],
    ["advise", "{file}", "--format", "markdown"], ["verify", "{file}"], ["threshold", "{file}", "-s", "caching"],
    ["replay", "{file}", "-s", "caching", "--limit", "100MiB"], ["replay", "{file}", "--export-html", "page.html"],
    ["replay", "{file}", "--format", "markdown"], ["convert", "{file}", "out.oomph"],
]
OF_RUNS = [["report", "run", "--output", "page.html"], ["compare", "run", "{samples}/run"],
           ["run", "{samples}/tiny.toml", "--resume", "run"], ["run", "{samples}/tiny.toml", "--output", "n", "--baseline", "run"]]


class ForgeAttack(Attack):
    def __init__(self, program, failures, options, work):
        super().__init__(program, failures, options, work)
        self.samples = Samples(program, self.work / "samples")

    def run(self):
        count = self.options.rounds or 150
        for number in range(count):
            pick = random.Random(f"{self.options.seed}/{number}")
            with tempfile.TemporaryDirectory(dir=self.work) as folder:
                command = self.prepare(pick, Path(folder))
                args = [arg.replace("{samples}", str(self.samples.folder)) for arg in command]
                in_pipe = self.program.start(args, folder)
                self.judge("pipe", in_pipe, in_pipe.out + b"\n" + in_pipe.err, folder, "csv" in args)
                for kind, words in self.program.faults(in_pipe, "data" if "csv" in args else None):
                    self.failures.add("forged", kind, words, in_pipe, [folder])
                self.judge("terminal", in_pipe, self.in_terminal(args, folder), folder, "csv" in args)
                for page in Path(folder).glob("*.html"):
                    if any(raw in page.read_bytes() for raw in RAW_IN_PAGES):
                        self.failures.add("forged", "page", "markup of a file is in the page", in_pipe, [folder])
        print(f"{count} files with forged names, each in a pipe and in a terminal")

    def prepare(self, pick, folder):
        """Writes a forged file and returns the command that reads it."""
        kind = pick.choice(["snapshot"] * 3 + ["trace", "recipe", "suite", "profile", "env.json", "runs.csv", "case", "companion"])
        if kind in ("snapshot", "trace"):
            name, data = snapshot(pick) if kind == "snapshot" else text_trace(pick)
            (folder / name).write_bytes(data)
            return [arg.replace("{file}", name) for arg in pick.choice(OF_SOURCES)]
        if kind in ("recipe", "suite", "profile"):
            (folder / "a.toml").write_bytes(toml(pick, kind).encode())
            return pick.choice({
                "recipe": [["inspect", "a.toml"], ["replay", "a.toml", "-s", "null"]],
                "suite": [["run", "./a.toml", "--list"]],
                "profile": [["inspect", "museum-rmm-35", "--summary", "--card", "a.toml"], ["replay", "ramp", "--card", "a.toml"]],
            }[kind])
        if kind == "companion":
            shutil.copy(CORPUS / "snapshot" / "museum.pickle", folder / "run.pickle")
            (folder / "snapshots.csv").write_bytes(table(pick, seeds("companion")[0]))
            return ["verify", "run.pickle"]
        shutil.copytree(self.samples.folder / "run", folder / "run")
        if kind == "env.json":
            path = folder / "run" / "env.json"
            value = json.loads(path.read_text())
            # Older releases wrote no checksum.
            value.pop("crc32", None)
            path.write_text(json.dumps(forge_texts(pick, value, 0.4, forged_for_page)))
        elif kind == "runs.csv":
            path = folder / "run" / pick.choice(["runs.csv", "timings.csv"])
            path.write_bytes(table(pick, path.read_bytes()))
        else:
            path = pick.choice(sorted((folder / "run" / "cases").iterdir()))
            value = json.loads(gzip.decompress(path.read_bytes()))
            value.pop("crc32", None)
            value = forge_texts(pick, value, 0.3, forged_for_page)
            path.write_bytes(gzip.compress(json.dumps(value).encode()))
        return pick.choice(OF_RUNS)

    def judge(self, where, ended, text, folder, is_data):
        found = [raw for raw in RAW if raw in text.replace(b"\r\n", b"\n")]
        if found and not is_data:
            self.failures.add("forged", where, f"{found[0]!r} is shown as it is", ended, [folder])

    def in_terminal(self, args, folder):
        """Everything that the program writes to a terminal of 100 columns."""
        child, terminal = pty.fork()
        if child == 0:
            os.chdir(folder)
            environment = {**self.program.environment(folder), "TERM": "xterm-256color", "COLUMNS": "100", "LANG": "C.UTF-8"}
            os.execve(self.program.binary, [self.program.binary, *args], environment)
        text, ends = b"", time.monotonic() + 30
        while time.monotonic() < ends:
            if select.select([terminal], [], [], 1)[0]:
                try:
                    text += os.read(terminal, 1 << 16)
                except OSError:  # The other side is closed.
                    break
        os.close(terminal)
        os.waitpid(child, 0)
        return text


