"""Small valid inputs: the seeds of the fuzzers, and folders that the program itself writes."""

import gzip
import lzma
import shutil
import subprocess
from pathlib import Path

from .program import CORPUS

SUITE = """question = "Under attack?"
base = "caching"

[[group]]
workloads = ["museum-rmm-35", "museum-tt-metal-35516"]
strategies = ["caching", "direct", "bfc"]
seeds = [1, 2]

[[group]]
workloads = ["museum-rmm-35"]
strategies = ["caching"]
limits = ["4GiB"]
timed = true
"""
THRESHOLDS = """question = "Under attack?"
kind = "threshold"
base = "caching"

[[group]]
workloads = ["museum-rmm-35", "museum-tt-metal-35516"]
strategies = ["caching", "direct"]
repeat = 2
"""


def seeds(*names):
    """The seeds of these targets."""
    return [path.read_bytes() for name in names for path in sorted((CORPUS / name).iterdir())]


def compressed(data, ending):
    if ending == "gz":
        return gzip.compress(data, mtime=0)
    if ending == "xz":
        return lzma.compress(data)
    return subprocess.run(["zstd", "-q", "-c", "--check"], input=data, stdout=subprocess.PIPE, check=True).stdout


def endings():
    """The compressions that can be written here."""
    return ["gz", "xz"] + (["zst"] if shutil.which("zstd") else [])


class Samples:
    """Folders that the program wrote, made once."""

    def __init__(self, program, folder):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.suite = self.folder / "tiny.toml"
        self.suite.write_text(SUITE)
        self.thresholds = self.folder / "thresholds.toml"
        self.thresholds.write_text(THRESHOLDS)
        make = {
            "run": ["run", self.suite],
            "searched": ["run", self.thresholds],
            "shard-1": ["run", self.suite, "--partition", "slice:1/2"],
            "shard-2": ["run", self.suite, "--partition", "slice:2/2"],
            "claimed": ["claims", "set-to-none"],
            "techniques": ["techniques", "--model", "reference-gpt-163m", "--set", "layers=1", "--technique", "amp", "--no-cards"],
        }
        for name, args in make.items():
            ended = program.start([*args, "--output", name], self.folder)
            if ended.code != 0:
                raise SystemExit(f"oomph {args} ended with exit code {ended.code}: {ended.message}")
        state = ["stress", "soak", "--strategy", "bfc", "--stress-count", "20", "--state", "state.json"]
        if program.start(state, self.folder).code != 0:
            raise SystemExit("oomph stress soak failed")
