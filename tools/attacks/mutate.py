"""Changed files for every reader, under every command that reads them."""

import concurrent.futures
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from . import mutations
from .mutations import OF_BYTES, OF_TEXT, cut, extend, of_json, of_pickle
from .program import CORPUS, Attack
from .samples import Samples, compressed, endings, seeds

# Replaced by the path of the changed file.
FILE = "{file}"

OF_TRACES = [
    ["inspect", FILE],
    ["inspect", FILE, "--summary"],
    ["inspect", FILE, "--by", "site", "--at", "peak"],
    ["inspect", FILE, "--by", "tag", "--format", "json"],
    ["inspect", FILE, "--pack"],
    ["replay", FILE],
    ["replay", FILE, "-s", "caching", "-s", "oomph", "-s", "planned", "--waterfall", "--pack"],
    ["replay", FILE, "-s", "bfc", "--export-html", "page.html", "--format", "markdown"],
    ["replay", FILE, "-s", "caching", "--repeat", "3", "--skip-oom", "--paced", "--limit", "1GiB"],
    ["replay", FILE, "-s", "caching", "--export-snapshot", "again.pickle"],
    ["threshold", FILE, "-s", "caching", "-s", "async"],
    ["advise", FILE],
    ["advise", FILE, "--card", "24GiB", "--format", "markdown"],
    ["advise", FILE, "--format", "json"],
    ["advise", FILE, "--export-html", "page.html"],
    ["inspect", FILE, "--export-html", "page.html"],
    ["leaks", FILE, "--export-html", "page.html"],
    ["leaks", FILE],
    ["leaks", FILE, "--format", "json"],
    ["convert", FILE, "out.oomph.gz"],
    ["convert", FILE, "out.pickle"],
    ["convert", FILE, "out.csv", "--to", "rmm"],
    ["convert", FILE, "out.csv", "--to", "minimalloc"],
    ["convert", FILE, "-"],
    ["verify", "--on", "sim", FILE, "-s", "caching"],
]
OF_SNAPSHOTS = OF_TRACES + [["verify", FILE]] * 4 + [
    ["verify", FILE, "--format", "json"],
    ["verify", FILE, "--release", "2.13"],
    ["verify", FILE, "--settings", "max_split_size_mb:64"],
    ["inspect", FILE, "--release", "2.1", "--settings", "expandable_segments:True"],
    ["leaks", FILE, FILE],
]
OF_RUNS = [
    ["report", "run", "--output", "page.html"],
    ["compare", "{samples}/run", "run"],
    ["compare", "run", "run", "--format", "json"],
    ["run", "{samples}/tiny.toml", "--resume", "run", "--jobs", "2"],
    ["run", "{samples}/tiny.toml", "--output", "new", "--baseline", "run"],
]


class Reader:
    """A kind of file: its seeds, how they are changed, where the changed file lies, and the commands that read it."""

    def __init__(self, name, inputs, changes, file, commands, copies=(), may_be_long=False, ends=False, checked=False):
        self.name = name
        self.inputs = inputs
        self.changes = changes
        self.file = file
        self.commands = commands
        # Folders and files of the samples that lie beside the changed file.
        self.copies = copies
        # What the file describes may take any time; then an interruption must end the command.
        self.may_be_long = may_be_long
        # The format has an end: a file that is cut is refused.
        self.ends = ends
        # The file has checksums: `report` of a changed one fails, says so, or gives the same page.
        self.checked = checked


def readers(samples):
    """Every reader. A new one is a line here."""
    snapshots = [data for data in seeds("snapshot", "verify") if len(data) < 30_000]
    packed = seeds("compressed")
    case = next((samples.folder / "run" / "cases").iterdir())
    here = samples.folder
    run = ["run"]

    def text(path):
        return [(here / path).read_bytes()]

    rows_are_checked = b"row_crc32" in text("run/runs.csv")[0].splitlines()[0]
    environment_is_checked = b'"crc32"' in text("run/env.json")[0]

    found = [
        Reader("snapshot-bytes", snapshots, OF_BYTES, "a.pickle", OF_SNAPSHOTS, ends=True),
        Reader("snapshot-values", snapshots, [of_pickle], "a.pickle", OF_SNAPSHOTS),
        Reader("native", seeds("native"), OF_TEXT, "a.oomph", OF_TRACES, ends=True),
        Reader("stress-trace", seeds("native"), OF_TEXT, "a.oomph", [["stress", "properties", "-s", "bfc", "--trace", FILE]]),
        Reader("rmm", seeds("rmm"), OF_TEXT, "a.csv", OF_TRACES),
        Reader("minimalloc", seeds("minimalloc"), OF_TEXT, "a.csv", OF_TRACES),
        Reader("stalloc", seeds("stalloc"), OF_TEXT, "a.txt", OF_TRACES),
        Reader("umpire", seeds("umpire"), OF_TEXT, "a.replay", OF_TRACES),
        Reader("compressed", packed, OF_BYTES, "a.gz", OF_SNAPSHOTS, ends=True),
        Reader("inside-compressed", snapshots + seeds("native"), [compress_changed], "a.xz", OF_SNAPSHOTS),
        Reader("companion", seeds("companion"), OF_TEXT, "snapshots.csv", [["verify", "run.pickle"]], ["run.pickle"]),
        Reader("rank", snapshots, OF_BYTES + [of_pickle], "ranks/run-1.pickle",
               [["advise", "ranks"], ["leaks", "ranks"], ["threshold", "ranks", "-s", "caching"], ["inspect", "ranks"]],
               ["ranks"]),
        Reader("recipe", seeds("recipe"), OF_TEXT, "workloads/a.toml",
               [["inspect", FILE], ["inspect", "a"], ["replay", FILE, "-s", "caching"], ["advise", FILE], ["leaks", FILE],
                ["convert", FILE, "/dev/null", "--to", "oomph"], ["threshold", FILE, "-s", "caching", "--repeat", "1"],
                ["threshold", FILE, "-s", "caching", "--largest", "batch", "--card", "8GiB"],
                ["techniques", "--model", FILE, "--technique", "amp", "--no-cards"], ["list"], ["list", "--json"], ["doctor"]],
               may_be_long=True),
        Reader("config", seeds("config"), OF_TEXT + [of_json] * 10, "config.json",
               [["fits", FILE, "--card", "24GiB"], ["fits", FILE, "--card", "24GiB,80GiB", "--format", "json"],
                ["fits", FILE, "--card", "rtx4090", "--techniques", "bf16_model,lora:16", "--batch", "2"],
                ["inspect", FILE, "--set", "context=128"], ["replay", FILE, "-s", "caching", "--set", "context=128"]],
               may_be_long=True, ends=True),
        Reader("suite", seeds("suite") + text("tiny.toml") + text("thresholds.toml"), OF_TEXT, "suites/a.toml",
               [["run", FILE, "--list"], ["run", FILE, "--filter", "museum", "--output", "new"], ["list", "suites"],
                ["run", "a", "--filter", "museum", "--partition", "hash:1/3", "--output", "new"],
                ["verify", "--on", "sim", "--suite", FILE, "-s", "caching", "--filter", "museum"]], may_be_long=True),
        Reader("profile", seeds("profile"), OF_TEXT, "card.toml",
               [["inspect", "museum-rmm-35", "--summary", "--card", FILE], ["replay", "museum-rmm-35", "--card", FILE],
                ["threshold", "museum-rmm-35", "-s", "caching", "--card", FILE], ["advise", "museum-rmm-35", "--card", FILE],
                ["run", "{samples}/tiny.toml", "--card", FILE, "--output", "new"]]),
        Reader("env.json", text("run/env.json"), OF_TEXT + [of_json] * 10, "run/env.json", OF_RUNS, run, ends=True,
               checked=environment_is_checked),
        Reader("runs.csv", text("run/runs.csv"), OF_TEXT, "run/runs.csv", OF_RUNS, run, checked=rows_are_checked),
        Reader("timings.csv", text("run/timings.csv"), OF_TEXT, "run/timings.csv", OF_RUNS, run),
        Reader("case file", [case.read_bytes()], OF_BYTES + [gzip_changed_json] * 8, f"run/cases/{case.name}", OF_RUNS, run),
        Reader("shard", text("shard-1/runs.csv"), OF_TEXT, "shard-1/runs.csv",
               [["report", "shard-1", "shard-2", "--output", "whole"]], ["shard-1", "shard-2"]),
        Reader("shard env.json", text("shard-1/env.json"), OF_TEXT + [of_json] * 10, "shard-1/env.json",
               [["report", "shard-1", "shard-2", "--output", "whole"]], ["shard-1", "shard-2"], ends=True),
        Reader("thresholds.csv", text("searched/thresholds.csv"), OF_TEXT, "searched/thresholds.csv",
               [["report", "searched", "--output", "page.html"], ["run", "{samples}/thresholds.toml", "--resume", "searched"]],
               ["searched"]),
        Reader("claims.csv", text("claimed/claims.csv"), OF_TEXT, "claimed/claims.csv",
               [["claims", "set-to-none", "--resume", "claimed"], ["report", "claimed", "--output", "page.html"]], ["claimed"]),
        Reader("techniques.csv", text("techniques/techniques.csv"), OF_TEXT, "techniques/techniques.csv",
               [["techniques", "--model", "reference-gpt-163m", "--set", "layers=1", "--technique", "amp", "--no-cards", "--resume",
                 "techniques"], ["report", "techniques", "--output", "page.html"]], ["techniques"]),
        Reader("stress state", text("state.json"), OF_TEXT + [of_json] * 10, "state.json",
               [["stress", "soak", "--strategy", "bfc", "--stress-count", "1", "--state", FILE]], ends=True),
    ]
    for plan in ("run", "searched"):
        if (here / plan / "plan.csv").exists():
            commands = OF_RUNS if plan == "run" else [["report", plan, "--output", "page.html"]]
            found.append(Reader(f"{plan}/plan.csv", text(f"{plan}/plan.csv"), OF_TEXT, f"{plan}/plan.csv", commands, [plan]))
    return found


# Texts of the command line, with the text that is changed.
OF_ARGUMENTS = [
    (["replay", "museum-rmm-35", "-s", FILE], seeds("strategy")),
    (["threshold", "museum-rmm-35", "-s", FILE], seeds("strategy")),
    (["advise", "museum-rmm-35", "--current", FILE], seeds("settings")),
    (["replay", "museum-rmm-35", "--set", FILE], [b"blocks=5", b"steps=[1,2]", b'script="alloc a 2MiB"']),
    (["replay", "museum-rmm-35", "--limit", FILE], [b"24GiB", b"0.5", b"50%"]),
    (["replay", "museum-rmm-35", "--device", FILE], [b"sim", b"cuda:0", b"auto"]),
    (["run", "--list", "--filter", FILE], [b"training/*", b"*caching*"]),
    (["run", "--list", "--partition", FILE], [b"slice:2/4", b"hash:1/3", b"slurm"]),
    (["fits", "reference-gpt-163m", "--card", FILE], [b"24GiB", b"rtx4090,a100-40g"]),
    (["fits", "reference-gpt-163m", "--card", "24GiB", "--techniques", FILE], [b"bf16_model,ckpt,accum4", b"lora:8"]),
    (["inspect", "museum-rmm-35", "--by", "tag", "--at", FILE], [b"peak", b"step:1", b"phase:a:2", b"event:9"]),
    (["stress", "properties", "-s", "bfc", "--cases", "1", "--fail", FILE], [b"cuMemFree:2", b"cuMemAlloc:1:oom"]),
    (["rehearse", "--card", FILE, "--", "true"], [b"24GiB", b"rtx4090", b"1GiB,h100"]),
    (["rehearse", "--largest", FILE, "--", "true", "{batch}"], [b"batch=1..4"]),
    (["rehearse", "--prepare", FILE], [b"torch"]),
    (["record", "--name", FILE], [b"run", b"my run"]),
    (["record", "--torch", FILE], [b"2.11", b"2.0"]),
    (["claims", "--list", FILE], [b"set-to-none"]),
    (["techniques", "--technique", FILE, "--model", "reference-gpt-163m", "--set", "layers=1", "--no-cards"], [b"amp", b"ckpt"]),
    (["list", FILE], [b"strategies", b"suites"]),
    (["man", FILE], [b"advise", b"stress"]),
    (["completions", FILE], [b"bash", b"zsh"]),
    (["doctor", "--device", FILE], [b"cuda", b"sim"]),
    (["convert", FILE, "/dev/null", "--to", "oomph"], [b"ramp", b"training"]),
    (["verify", FILE], [b"a.pickle"]),
    (["verify", "--release", FILE, "a.pickle"], [b"2.13", b"2.4.1+cu121"]),
    (["compare", FILE, FILE], [b"main"]),
    (["report", FILE], [b"run"]),
    (["leaks", FILE], [b"leak-cache"]),
]


def compress_changed(pick, data, others):
    change = pick.choice(OF_BYTES if data.startswith(b"\x80") else OF_TEXT)
    return compressed(change(pick, data, others), pick.choice(endings()))


def gzip_changed_json(pick, data, _others):
    import gzip
    import json
    changed = mutations.of_object(pick, json.loads(gzip.decompress(data)))
    return gzip.compress(json.dumps(changed).encode("utf-8", "surrogatepass"), mtime=0)


def check_coverage(program, all_readers):
    attacked = {command[0] for reader in all_readers for command in reader.commands}
    attacked |= {command[0] for command, _ in OF_ARGUMENTS}
    missing = program.commands - attacked
    if missing:
        raise SystemExit(f"commands that no attack uses: {sorted(missing)}; add them to tools/attacks/mutate.py")
    targets = {path.name for path in CORPUS.iterdir()}
    print(f"{len(all_readers)} readers, {len(OF_ARGUMENTS)} arguments, {len(attacked)} commands, {len(targets)} sets of seeds")


class MutationAttack(Attack):
    def __init__(self, program, failures, options, work):
        super().__init__(program, failures, options, work)
        self.samples = Samples(program, self.work / "samples")
        (self.samples.folder / "ranks").mkdir()
        for name in ("run.pickle", "ranks/run-0.pickle", "ranks/run-1.pickle"):
            shutil.copy(CORPUS / "snapshot" / "museum.pickle", self.samples.folder / name)
        self.readers = readers(self.samples)
        self.pages = {reader.copies[0]: self.page(reader.copies[0]) for reader in self.readers if reader.checked}
        check_coverage(program, self.readers)
        self.ends = {}
        self.slowest = (0, "")
        self.largest = (0, "")

    def page(self, folder):
        """The page of an undamaged folder, and what `report` says on stderr."""
        with tempfile.TemporaryDirectory(dir=self.work) as room:
            shutil.copytree(self.samples.folder / folder, Path(room) / folder)
            ended = self.program.start(["report", folder, "--output", "page.html"], room)
            return (Path(room) / "page.html").read_bytes(), ended.err

    def run(self):
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(self.options.jobs) as pool:
            for done, _ in enumerate(pool.map(self.attack, range(self.options.inputs)), 1):
                if done % 500 == 0:
                    seconds = time.monotonic() - began
                    print(f"{done} inputs, {seconds:.0f} s, {self.failures.total} failures", file=sys.stderr)
        print(f"{self.options.inputs} inputs; ends: {dict(sorted(self.ends.items()))}")
        print(f"slowest: {self.slowest[0]:.1f} s, {self.slowest[1]}; largest: {self.largest[0] >> 20} MiB, {self.largest[1]}")

    def attack(self, number):
        pick = random.Random(f"{self.options.seed}/{number}")
        only = [reader for reader in self.readers if not self.options.only or self.options.only in reader.name]
        # One input in ten is a text of the command line.
        if not self.options.only and pick.random() < 0.1:
            return self.argument(pick)
        return self.file(pick, only[number % len(only)])

    def argument(self, pick):
        command, inputs = pick.choice(OF_ARGUMENTS)
        change = pick.choice(OF_TEXT)
        text = change(pick, pick.choice(inputs), inputs).replace(b"\0", b"")[:20_000].decode("utf-8", "surrogateescape")
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            ended = self.start([text if arg == FILE else arg for arg in command], folder, may_be_long=True)
            # The user typed these texts: they are not checked for control characters.
            self.judge("arguments", ended, [], 0, data_out="data", quiet=("control",))

    def file(self, pick, reader):
        data = pick.choice(reader.inputs)
        change = pick.choice(reader.changes)
        changed = change(pick, data, reader.inputs)
        for _ in range(pick.choice([0, 0, 0, 1, 3])):
            if change not in (cut, extend, of_pickle, of_json, compress_changed, gzip_changed_json) and changed:
                change = pick.choice(OF_BYTES)
                changed = change(pick, changed, reader.inputs)
        command = pick.choice(reader.commands)
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            for copy in reader.copies:
                source = self.samples.folder / copy
                (shutil.copytree if source.is_dir() else shutil.copy)(source, Path(folder) / copy)
            path = Path(folder) / reader.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(changed)
            names = {FILE: reader.file, "{samples}": str(self.samples.folder)}
            args = [arg.replace("{samples}", names["{samples}"]).replace(FILE, reader.file) for arg in command]
            ended = self.start(args, folder, reader.may_be_long)
            is_data = args[0] == "convert" and args[-1] == "-"
            data_out = "data" if is_data else "json" if "json" in args or "--json" in args else None
            self.judge(reader.name, ended, [path, *(Path(folder) / copy for copy in reader.copies)], len(changed), data_out)
            if reader.checked and args[0] == "report" and ended.code == 0:
                page, said = self.pages[reader.copies[0]]
                if ended.err == said and (Path(folder) / "page.html").read_bytes() != page:
                    self.failures.add(reader.name.replace("/", "-"), "silent", "damage is shown as a result", ended, [path])
            reads = not (args[0] in ("run", "stress", "claims", "techniques") and "--resume" in args) and args[0] != "list"
            if reader.ends and change is cut and changed.rstrip() != data.rstrip() and reads and ended.code == 0:
                words = f"a file cut at {len(changed)} of {len(data)} bytes is accepted"
                self.failures.add(reader.name.replace(" ", "-"), "accepted", words, ended, [path])

    def start(self, args, folder, may_be_long):
        if may_be_long:
            return self.program.start(args, folder, kill_after=5, kill_with=signal.SIGTERM)
        return self.program.start(args, folder)

    def judge(self, name, ended, paths, input_bytes, data_out, quiet=()):
        command = f"{name}: {' '.join(ended.args)[:100]}"
        self.ends[ended.code] = self.ends.get(ended.code, 0) + 1
        self.slowest = max(self.slowest, (ended.cpu_seconds, command))
        self.largest = max(self.largest, (ended.peak_bytes, command))
        for kind, words in self.program.faults(ended, data_out, input_bytes):
            if kind not in quiet:
                self.failures.add(name.replace("/", "-").replace(" ", "-"), kind, words, ended, paths)
