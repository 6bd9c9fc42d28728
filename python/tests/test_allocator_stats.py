"""What is seen of a program under use_allocator, on the shadow GPU: statistics, snapshots, recordings,
and the comparison with PyTorch's own allocator."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Dict

import pytest
import shadow

from oomph.allocator_stats import without_rows


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> str:
    return shadow.library(monkeypatch)


# The allocator is the value of PLUGGED; without it, PyTorch's own. Sizes vary, so that PyTorch's own
# allocator reserves more.
TRAINING = """
import json, os, torch

plugged = os.environ.get("PLUGGED")
if plugged:
    import oomph
    oomph.use_allocator(plugged)

class Doubled(torch.autograd.Function):
    # Its backward is Python code in a thread of autograd.
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2

model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())

def train(sizes):
    for size in sizes:
        x = torch.randn(size, 512, device="cuda")
        Doubled.apply(model(x)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

train([900, 4000, 1700, 6100, 2500, 7300])
torch.cuda.empty_cache()
train([8000, 300, 5200, 9100, 4100, 6600])
"""

FIGURES = (
    TRAINING
    + """
stats = torch.cuda.memory_stats()
print("STATS", json.dumps({name: value for name, value in stats.items() if "pool" not in name}))
"""
)


def figures(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch, plugged: str) -> Any:
    """The statistics that the program prints, and those that the library writes at exit."""
    folder.mkdir()
    monkeypatch.setenv("PLUGGED", plugged)
    monkeypatch.setenv("OOMPH_STATS", str(folder / "statistics.json"))
    ran = shadow.rehearse(program, folder, "24GiB", shadow.torch_site())
    assert ran.returncode == 0, ran.stdout
    stats = re.search(r"^STATS (.*)$", ran.stdout, re.MULTILINE)
    assert stats is not None, ran.stdout
    written = folder / "statistics.json"
    return json.loads(stats[1]), json.loads(written.read_text()) if written.exists() else None


def test_figures_and_comparison_equal_those_of_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, _ = figures(FIGURES, tmp_path / "native", monkeypatch, "")
    # PyTorch's allocator as a strategy: what is counted must be what PyTorch counts.
    caching, _ = figures(FIGURES, tmp_path / "caching", monkeypatch, "caching")
    unknown = ("inactive_split", "num_sync_all_streams", "oversize", "max_split_size")
    counted = [name for name in native if not name.startswith(unknown)]
    assert len(counted) >= 32
    assert {name: caching[name] for name in counted} == {name: native[name] for name in counted}

    ours, written = figures(FIGURES, tmp_path / "ours", monkeypatch, "oomph")
    gpu = written["devices"][0]
    assert ours["reserved_bytes.all.peak"] == gpu["stats"]["peak"]["reserved"]
    assert ours["allocated_bytes.all.peak"] == gpu["stats"]["peak"]["allocated"]
    assert ours["reserved_bytes.all.peak"] < native["reserved_bytes.all.peak"]
    # What PyTorch's allocator would have reserved is what it did reserve, to the byte.
    served = gpu["native"]["served"]
    assert served["peak_reserved"] == native["reserved_bytes.all.peak"]
    assert served["depends_on_time"] is False


TRAINER = (
    TRAINING
    + """
import ctypes
from oomph.allocator import find_library
library = ctypes.CDLL(find_library())
library.oomph_reserved.restype = ctypes.c_size_t

reserved = library.oomph_reserved(0)
cuda, memory, accelerator = torch.cuda, torch.cuda.memory, torch.accelerator
assert cuda.memory_reserved() == memory.memory_reserved() == reserved
assert accelerator.memory_reserved() == reserved
assert cuda.max_memory_reserved() == reserved, "nothing was released since the peak"
allocated = cuda.memory_allocated()
assert 0 < allocated < cuda.max_memory_allocated() <= reserved
assert oomph.memory_stats()["allocated_bytes.all.current"] == allocated
assert memory.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"] == allocated
assert accelerator.memory_stats()["allocated_bytes.all.current"] == allocated
assert cuda.memory_stats()["allocated_bytes.large_pool.current"] == 0, "not known"

print(oomph.memory_summary())
assert cuda.memory_summary() == memory.memory_summary(0, abbreviated=True) == oomph.memory_summary()

oomph.reset_peak_memory_stats()
assert cuda.max_memory_allocated() == allocated
big = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
del big
assert cuda.max_memory_allocated() == allocated + (64 << 20)
cuda.reset_peak_memory_stats(); cuda.reset_accumulated_memory_stats(); cuda.reset_max_memory_allocated()
accelerator.reset_peak_memory_stats(); accelerator.reset_accumulated_memory_stats()
oomph.reset_accumulated_memory_stats()
assert cuda.max_memory_allocated() == allocated
assert cuda.memory_stats()["allocation.all.allocated"] == 0
assert cuda.mem_get_info()[0] > 0

for function in [cuda.memory_stats, cuda.reset_peak_memory_stats, cuda.memory_summary, accelerator.memory_stats]:
    for device in [7, -3]:
        try:
            function(device)
        except RuntimeError as error:
            assert f"no device {device}: " in str(error), error
        else:
            raise AssertionError((function, device))

cuda.set_per_process_memory_fraction(0.75)
assert cuda.get_per_process_memory_fraction() == 0.75
accelerator.empty_cache()
assert library.oomph_reserved(0) < reserved

assert sum(one["total_size"] for one in cuda.memory_snapshot()) == cuda.memory_reserved()
memory._dump_snapshot("snapshot.pickle")
snapshot = memory._snapshot()
blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
live = [block for block in blocks if block["state"] == "active_allocated"]
assert sum(block["size"] for block in live) == allocated
named = [frame["name"] for block in live for frame in block["frames"]]
assert "_init_group" in named, "states of the optimizer"
entries = snapshot["device_traces"][0]
assert any(frame["name"] == "backward" for entry in entries for frame in entry["frames"])
print("ALLOCATED", allocated, "EVENTS", len(entries))
from torch.cuda import _memory_viz
assert _memory_viz.trace_plot(snapshot) and _memory_viz.segsum(snapshot)
"""
)


def test_trainer_finds_the_functions_of_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLUGGED", "oomph")
    ran = shadow.rehearse(TRAINER, tmp_path, "24GiB")
    assert ran.returncode == 0, ran.stdout
    assert "oomph's CUDA memory summary" in ran.stdout
    assert "from large pool" not in ran.stdout and "Non-releasable" not in ran.stdout
    assert "is not known: the program set a memory fraction" in ran.stdout
    found = re.search(r"ALLOCATED (\d+) EVENTS (\d+)", ran.stdout)
    assert found is not None
    allocated, events = int(found[1]), int(found[2])
    file = str(tmp_path / "snapshot.pickle")

    def ask(command: str, *options: str) -> str:
        done = shadow.run([shadow.binary(), command, file, *options], tmp_path)
        assert done.returncode == 0, done.stdout
        return done.stdout

    inspected: Dict[str, Any] = json.loads(ask("inspect", "--format", "json"))
    about = inspected["rows"][0]["recording"]
    assert about["other_allocator"] == "oomph:oomph"
    allocated_blocks = next(one for one in about["blocks"] if one["kind"] == "allocated")
    assert allocated_blocks["bytes"] == allocated
    assert sum(about["entries"].values()) == events
    assert "oomph:oomph, not PyTorch's" in ask("inspect")
    verified = ask("verify")
    assert verified.startswith("CONSISTENT") and f"{events} entries agree" in verified, verified
    assert "recorded under oomph:oomph" in verified, verified
    assert "steady" in ask("leaks")
    advised = ask("advise", "--card", "24GiB")
    assert "recorded under oomph:oomph" in advised, advised


THREADS = (
    TRAINING
    + """
import threading
failed = []
def work(number):
    try:
        kept = []
        for step in range(200):
            kept.append(torch.empty(1 + (step * 7919 + number) % 300_000, device="cuda"))
            if len(kept) > 10:
                kept.pop(step % 10)
            if step % 50 == 0:
                torch.cuda.memory_allocated(); torch.cuda.memory._snapshot()
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for thread in threads: thread.start()
train([500, 1500, 800])
for thread in threads: thread.join()
assert not failed, failed
entries = torch.cuda.memory._snapshot()["device_traces"][0]
served = [entry for entry in entries if entry["action"] == "alloc"]
by_thread = [entry for entry in served if any(frame["name"] == "work" for frame in entry["frames"])]
assert len(by_thread) == 800, len(by_thread)
torch.cuda.memory._record_memory_history(max_entries=50, clear_history=True)
"""
)


def test_threads_allocate_while_stacks_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLUGGED", "oomph")
    ran = shadow.rehearse(THREADS, tmp_path, "24GiB")
    assert ran.returncode == 0, ran.stdout
    line = re.search(
        r"oomph: device 0: peak reserved (.+?); PyTorch's own allocator would have reserved (.+?) for",
        ran.stdout,
    )
    assert line is not None, ran.stdout


RECORDED = (
    shadow.RECORDER_IS_OFF
    + """
import oomph
oomph.use_allocator("oomph", limit="1GiB")
recorder = oomph.record("mem")
kept = []
try:
    for _ in range(9):
        kept.append(torch.empty(200 << 20, dtype=torch.uint8, device="cuda"))
except RuntimeError:
    print("ran out", recorder.ran_out, len(kept))
"""
)


def test_recorder_writes_when_memory_runs_out(tmp_path: Path) -> None:
    ran = shadow.rehearse(RECORDED, tmp_path, "24GiB")
    assert "ran out True 5" in ran.stdout, ran.stdout
    assert "events) when memory ran out" in ran.stdout
    sidecar = json.loads((tmp_path / "mem" / "rank0.json").read_text())
    assert sidecar["reason"] == "oom" and sidecar["backend"] == "pluggable"
    assert sidecar["out_of_memory"]["requested_bytes"] == 200 << 20
    done = shadow.run([shadow.binary(), "inspect", "mem/rank0.pickle"], tmp_path)
    assert done.returncode == 0 and "1 oom" in done.stdout, done.stdout


def test_rows_that_are_not_counted_are_left_out() -> None:
    table = "|====|\n|----|\n| Allocations | 1 |\n|----|\n| Non-releasable allocs | 0 |\n|====|\n"
    assert without_rows(table) == "|====|\n|----|\n| Allocations | 1 |\n|====|\n"
