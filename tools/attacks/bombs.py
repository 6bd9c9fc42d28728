"""Small files that describe much: shared lists, long repetitions, deep nesting, large dictionaries. All of them have less than
1 MiB and may take at most 1 GiB of memory and 20 s."""

import concurrent.futures
import gzip
import lzma
import os
import pickle
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from .program import CORPUS, SMALL_FILE, Attack

COMMANDS = [
    ["inspect", "{file}"],
    ["verify", "{file}"],
    ["inspect", "{file}", "--by", "site"],
    ["inspect", "{file}", "--pack"],
    ["advise", "{file}"],
    ["leaks", "{file}"],
    ["replay", "{file}", "-s", "caching"],
    ["threshold", "{file}", "-s", "direct"],
    ["convert", "{file}", "out.pickle"],
    ["convert", "{file}", "/dev/null", "--to", "oomph"],
]

OF_LISTS = [["run", "{file}", "--list"], ["verify", "--on", "sim", "--suite", "{file}"]]
OF_ENDLESS = [["run", "{file}"], ["inspect", "{file}"], ["inspect", "ramp", "--summary", "--card", "{file}"]]


def sample():
    return pickle.loads((CORPUS / "snapshot" / "museum.pickle").read_bytes())


def shared_blocks():
    """One list of blocks in many segments."""
    value = sample()
    block = {"address": 1 << 40, "size": 512, "requested_size": 512, "state": "active_allocated", "frames": []}
    segment = {**value["segments"][0], "blocks": [block] * 20_000, "frames": []}
    value["segments"] = [segment] * 20_000
    return pickle.dumps(value, 4)


def shared_traces():
    value = sample()
    value["device_traces"] = [value["device_traces"][0] * 300] * 20_000
    return pickle.dumps(value, 4)


def shared_frames():
    value = sample()
    frames = [{"name": f"f{number}", "filename": "a.py", "line": number} for number in range(4_000)]
    for entry in value["device_traces"][0]:
        entry["frames"] = frames * 10
    value["device_traces"][0] *= 500
    return pickle.dumps(value, 4)


def own_frames():
    """Every entry has a long stack of its own, made of shared frames."""
    value = sample()
    frame = {"name": "f" * 100, "filename": "a.py", "line": 1}
    entry = value["device_traces"][0][1]
    value["device_traces"][0] = [{**entry, "frames": [frame] * 50} for _ in range(5_000)]
    return pickle.dumps(value, 4)


def long_names():
    """Every entry has another stack of frames that share long names."""
    value = sample()
    name = "a" * 900_000
    entry = value["device_traces"][0][1]
    value["device_traces"][0] = [
        {**entry, "frames": [{"name": name, "filename": "a.py", "line": line}]} for line in range(2_000)
    ]
    return pickle.dumps(value, 4)


def long_name_in_stacks():
    value = sample()
    entry, long = value["device_traces"][0][1], {"name": "a" * 900_000, "filename": "a.py", "line": 1}
    value["device_traces"][0] = [
        {**entry, "frames": [long, {"name": "f", "filename": "b.py", "line": line}]} for line in range(1_500)
    ]
    return pickle.dumps(value, 4)


def deep_pickle():
    return b"\x80\x04" + b"]" * 500_000 + b"a" * 499_999 + b"."


def many_marks():
    return b"\x80\x04" + b"(" * 900_000 + b"."


def long_text():
    return b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b"a" * 1000


SNAPSHOTS = [
    shared_blocks, shared_traces, shared_frames, own_frames, long_names, long_name_in_stacks, deep_pickle, many_marks, long_text,
]


def repeated(head, lines, mib, tail=b""):
    """A text of `mib` MiB that repeats some lines."""
    yield head
    piece = lines * ((1 << 20) // len(lines))
    for _ in range(mib):
        yield piece
    yield tail


NATIVE = b'oomph-trace 1 "bomb"\n'
RMM = b"Thread,Time,Action,Pointer,Size,Stream\n"
UMPIRE = b'{"kind":"replay","timestamp":1,"event":"allocate","payload":{"allocator_ref":"0xa","size":64},"result":{"memory_ptr":"0x%x"}}\n'
# A little more than the content that a small compressed file may have.
MIB = 100
TEXTS = {
    "comes_and_goes": lambda: repeated(NATIVE, b"alloc 1 512\nfree 1\n", MIB),
    "live_blocks": lambda: repeated(NATIVE, b"".join(b"alloc %d 512\n" % number for number in range(10_000)), MIB),
    "labels": lambda: repeated(NATIVE, b'label 1 "' + b"a" * 5000 + b'"\n', MIB),
    "long_line": lambda: repeated(b'oomph-trace 1 "', b"a", MIB),
    "zeros": lambda: repeated(NATIVE, b"\0", MIB),
    "empty_lines": lambda: repeated(NATIVE, b"\n", MIB),
    "marks": lambda: repeated(NATIVE + b'label 1 "a"\n', b"mark step 0 label=1\n", MIB),
    "rmm": lambda: repeated(RMM, b"".join(b"0,00:00:00:000000,allocate,0x%x,512,0x0\n" % number for number in range(9_999)), MIB),
    "rmm_long_field": lambda: repeated(RMM + b"0,", b"a", MIB),
    "stalloc": lambda: repeated(b"", b"1 0x100 512 0\n", MIB),
    "stalloc_marks": lambda: repeated(b"1 0x100 512 0\n", b"micro-batch : F\n", MIB),
    "minimalloc": lambda: repeated(b"id,lower,upper,size\n", b"1,0,9,512\n", MIB),
    "umpire": lambda: repeated(b"", UMPIRE % 256, MIB),
}


def packed(pieces, ending, path):
    """Compresses pieces into a file."""
    if ending == "zst":
        with open(path, "wb") as out:
            child = subprocess.Popen(["zstd", "-q", "-3", "-c"], stdin=subprocess.PIPE, stdout=out)
            for piece in pieces:
                child.stdin.write(piece)
            child.stdin.close()
            child.wait()
    elif ending == "gz":
        with gzip.open(path, "wb", compresslevel=1) as out:
            for piece in pieces:
                out.write(piece)
    else:
        with lzma.open(path, "wb", filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 128 << 20}]) as out:
            for piece in pieces:
                out.write(piece)


def toml_of_lists():
    seeds = ",".join(map(str, range(3000)))
    strategies = ",".join(f'"caching:max_split_size_mb:{number}"' for number in range(21, 400))
    return (
        f'question = "?"\nseeds = [{seeds}]\n[[group]]\nworkloads = ["museum-rmm-35"]\nstrategies = [{strategies}]\n'
        f'limits = [{",".join(chr(34) + str(number) + "MiB" + chr(34) for number in range(1000, 4000))}]\n'
    ).encode()


class BombAttack(Attack):
    def run(self):
        # In another process: the memory of this one would count as the program's.
        maker = os.fork()
        if maker == 0:
            self.make()
            os._exit(0)
        if os.waitpid(maker, 0)[1] != 0:
            raise SystemExit("the files could not be made")
        starts = []
        for path in sorted(self.work.iterdir()):
            # A quick round of all attacks starts only the first two.
            of_traces = COMMANDS[:2] if self.options.attack == "all" else COMMANDS
            commands = {"lists": OF_LISTS, "endless": OF_ENDLESS}.get(path.stem, of_traces)
            starts += [(path, command) for command in commands]
        with concurrent.futures.ThreadPoolExecutor(self.options.jobs) as pool:
            largest, slowest = (max(ended) for ended in zip(*pool.map(self.start, starts)))
        print(f"{len(starts)} starts; the largest: {largest[0] >> 20} MiB, {largest[1]}")
        print(f"the slowest: {slowest[0]:.1f} s, {slowest[1]}")

    def make(self):
        # Compressed, so that all of them have less than 1 MiB.
        for make in SNAPSHOTS:
            (self.work / f"{make.__name__}.pickle.gz").write_bytes(gzip.compress(make()))
        for name, pieces in TEXTS.items():
            for ending in ("zst", "xz", "gz") if name in ("long_line", "stalloc") else ("zst",):
                if ending != "zst" or shutil.which("zstd"):
                    packed(pieces(), ending, self.work / f"{name}.{ending}")
        (self.work / "lists.toml").write_bytes(toml_of_lists())
        (self.work / "endless.toml").symlink_to("/dev/zero")

    def start(self, start):
        path, command = start
        args = [arg.replace("{file}", str(path)) for arg in command]
        size = path.stat().st_size
        with tempfile.TemporaryDirectory() as folder:
            # A text may be a valid trace that takes long. Then a signal must end the command.
            ended = self.program.start(args, folder, kill_after=10, kill_with=signal.SIGTERM)
        if ended.code == -signal.SIGTERM and path.stem in TEXTS:
            ended.code = 130
        for kind, words in self.program.faults(ended, input_bytes=size):
            kept = [path] if path.is_file() and size < SMALL_FILE else []
            self.failures.add(f"bomb-{path.stem}", kind, f"{' '.join(command)}: {words}", ended, kept)
        what = f"{path.name} ({size} bytes), {' '.join(command)}: exit code {ended.code}"
        return (ended.peak_bytes, what), (ended.cpu_seconds, what)
