"""use_allocator: its errors, and a program that allocates with it on the shadow GPU."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import shadow

from oomph.allocator import _serve_graphs, find_library, use_allocator
from oomph.binary import OomphError


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> str:
    return shadow.library(monkeypatch)


@pytest.mark.parametrize(
    "strategy, limit, expected",
    [
        ("cachign", None, "unknown strategy 'cachign'; did you mean 'caching'?"),
        (
            "caching:max_split_mb:4",
            None,
            "unknown setting 'max_split_mb'; did you mean 'max_split_size_mb'?",
        ),
        ("oomph", "much", "'much' is not an amount of memory"),
    ],
)
def test_wrong_arguments_are_named(library: str, strategy: str, limit: str, expected: str) -> None:
    before = dict(os.environ)
    with pytest.raises(ValueError) as caught:
        use_allocator(strategy, limit=limit)
    assert expected in str(caught.value)
    assert not str(caught.value).startswith("OOMPH_")
    assert dict(os.environ) == before


def test_missing_torch_is_an_import_error(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="the allocator of PyTorch, which cannot be imported"):
        use_allocator()


@pytest.mark.parametrize(
    "cuda, expected",
    [("11.7", "1.13.1 is too old: 2.0 is the first"), (None, "built without CUDA")],
)
def test_pytorch_whose_allocator_cannot_be_replaced(
    library: str, monkeypatch: pytest.MonkeyPatch, cuda: Any, expected: str
) -> None:
    old: Any = ModuleType("torch")
    old.__version__ = "1.13.1"
    old.version = SimpleNamespace(cuda=cuda)
    old.cuda = SimpleNamespace(memory=SimpleNamespace())
    old._C = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch", old)
    with pytest.raises(RuntimeError, match=expected):
        use_allocator()


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOMPH_LIBRARY", "/nowhere/liboomph.so")
    with pytest.raises(
        OomphError, match="OOMPH_LIBRARY=/nowhere/liboomph.so: there is no such file"
    ):
        use_allocator()


def test_file_that_is_not_the_library_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "liboomph.so"
    wrong.write_text("no library")
    monkeypatch.setenv("OOMPH_LIBRARY", str(wrong))
    with pytest.raises(RuntimeError, match="cannot be loaded"):
        use_allocator()


SERVED = """
import ctypes, os, torch, oomph
from oomph.allocator import find_library
oomph.use_allocator("caching", limit="1GiB")
print("backend", torch.cuda.get_allocator_backend())
kept = []
try:
    while True:
        kept.append(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError as error:
    print("blocks", len(kept), type(error).__name__)
    print("message", error)
library = ctypes.CDLL(find_library())
library.oomph_reserved.restype = ctypes.c_size_t
print("reserved", library.oomph_reserved(0) >> 20)
side = torch.cuda.Stream()
kept[0].record_stream(side)
kept.clear()
torch.cuda.empty_cache()
print("after empty_cache", library.oomph_reserved(0) >> 20)
try:
    oomph.use_allocator()
except RuntimeError as error:
    print("again:", error)
"""


def test_program_allocates_within_the_limit(library: str, tmp_path: Path) -> None:
    ran = shadow.rehearse(SERVED, tmp_path, "24GiB")
    assert "backend pluggable" in ran.stdout, ran.stdout
    assert "blocks 4 OutOfMemoryError" in ran.stdout
    assert "message CUDA out of memory. Tried to allocate 256 MiB. GPU 0 has a total capacity of 24.0 GiB" in ran.stdout
    assert "holds 1.00 GiB: 1.00 GiB in blocks" in ran.stdout and "It may hold 1.00 GiB." in ran.stdout
    assert "reserved 1024" in ran.stdout
    # The hook of empty_cache is set: without it the cache would stay.
    assert "after empty_cache 0" in ran.stdout
    assert "again: the allocator of PyTorch was replaced already" in ran.stdout
    assert "caching on device 0" in ran.stdout and "peak reserved 1.00 GiB" in ran.stdout


TOO_LATE = """
import torch, oomph
torch.zeros(1, device="cuda")
try:
    oomph.use_allocator()
except RuntimeError as error:
    print("refused:", error)
print("backend", torch.cuda.get_allocator_backend())
"""


def test_after_the_first_use_of_the_gpu_it_is_too_late(library: str, tmp_path: Path) -> None:
    ran = shadow.rehearse(TOO_LATE, tmp_path, "24GiB")
    assert "refused: too late: PyTorch has initialised CUDA" in ran.stdout, ran.stdout
    assert "backend native" in ran.stdout


GRAPHS = """
import ctypes, sys, torch, oomph
from oomph.allocator import find_library
oomph.use_allocator("STRATEGY", limit="4GiB")
library = ctypes.CDLL(find_library())
library.oomph_reserved.restype = ctypes.c_size_t
def reserved():
    return library.oomph_reserved(0) >> 20
def block(mebibytes):
    return torch.zeros(mebibytes << 20, dtype=torch.uint8, device="cuda")
def note(name, holds):
    print(name, "yes" if holds else f"NO: {reserved()} MiB reserved")

# By hand: memory that was freed in the capture belongs to the graph.
kept = block(10)
graph = torch.cuda.CUDAGraph()
side = torch.cuda.Stream()
with torch.cuda.graph(graph):
    freed = block(100)
    place = freed.data_ptr()
    # Another stream takes part: its use of a block must not be waited for here.
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        freed.add_(1)
    freed.record_stream(side)
    torch.cuda.current_stream().wait_stream(side)
    del freed
    result = block(50)
# Without the free memory of the default pool, which goes back.
torch.cuda.empty_cache()
captured = reserved()
note("captured", captured >= 160)
for _ in range(3):
    graph.replay()
torch.cuda.synchronize()
note("no memory for replays", reserved() == captured)
eager = block(100)
# A few MiB that the default pool has free may serve a part of it.
note("apart", abs(eager.data_ptr() - place) >= 100 << 20 and reserved() >= captured + 90)
del eager
torch.cuda.empty_cache()
note("stays", reserved() == captured)

# A second graph in the same pool takes what the first has freed.
second = torch.cuda.CUDAGraph()
with torch.cuda.graph(second, pool=graph.pool()):
    inside = block(100)
note("shared", inside.data_ptr() == place and reserved() == captured)
del graph, result
torch.cuda.empty_cache()
note("in use", reserved() >= 160)
del second
torch.cuda.empty_cache()
note("block of a released pool", reserved() >= 110)
inside.zero_()
del inside
torch.cuda.empty_cache()
note("all gone", reserved() == 10 or reserved() == 20)

# Memory runs out in a capture: an error, and the program goes on.
failing = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(failing):
        many = [block(1024) for _ in range(8)]
except RuntimeError as error:
    print("out of memory:", type(error).__name__)
del failing
block(1)
torch.cuda.synchronize()

model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)).cuda()
sample = torch.randn(64, 256, device="cuda", requires_grad=True)
graphed = torch.cuda.make_graphed_callables(model, (sample,))
for _ in range(3):
    graphed(sample).sum().backward()
torch.cuda.synchronize()
print("callables yes")
"""


@pytest.mark.parametrize("strategy", ["oomph", "caching"])
def test_graphs_are_captured_and_replayed(library: str, tmp_path: Path, strategy: str) -> None:
    # The shadow GPU refuses what CUDA refuses in a capture. caching calls cuMemAlloc in it.
    ran = shadow.rehearse(GRAPHS.replace("STRATEGY", strategy), tmp_path, "24GiB")
    for name in (
        "captured",
        "no memory for replays",
        "apart",
        "stays",
        "shared",
        "in use",
        "block of a released pool",
        "all gone",
        "callables",
    ):
        assert f"{name} yes" in ran.stdout, ran.stdout
    assert "out of memory: OutOfMemoryError" in ran.stdout, ran.stdout
    assert "oomph: pool" not in ran.stdout, ran.stdout


REFUSED = """
import os, torch, oomph
oomph.use_allocator("bfc")
def attempt(name, action):
    try:
        action()
    except RuntimeError as error:
        print(name, "refused:", error)
x = torch.zeros(4, device="cuda")
def capture():
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x + 1
attempt("graph", capture)
attempt("pool", torch.cuda.MemPool)
attempt("sharing", lambda: torch.multiprocessing.reductions.reduce_tensor(x))
import torch._inductor.cudagraph_trees as trees
attempt("trees", lambda: trees.cudagraphify_impl(None, [], ()))
"""


def test_what_pytorch_cannot_do_is_refused_with_a_remedy(library: str, tmp_path: Path) -> None:
    ran = shadow.rehearse(REFUSED, tmp_path, "24GiB")
    assert "graph refused: the strategy bfc cannot keep" in ran.stdout, ran.stdout
    assert 'use oomph.use_allocator("oomph"), or "caching"' in ran.stdout
    assert "pool refused: torch.cuda.MemPool needs PyTorch's own allocator" in ran.stdout, ran.stdout
    assert f'CUDAPluggableAllocator({find_library()!r}, "oomph_alloc", "oomph_free")' in ran.stdout
    assert "sharing refused: CUDA tensors cannot be sent to other processes" in ran.stdout
    assert "trees refused: torch.compile keeps CUDA graphs in trees" in ran.stdout
    assert "oomph.use_allocator(cudagraph_trees=False)" in ran.stdout


COMPILED = """
import torch, oomph
oomph.use_allocator(cudagraph_trees=False)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).cuda()
compiled = torch.compile(model, mode="reduce-overhead")
captures = []
begin = torch.cuda.CUDAGraph.capture_begin
def noted(self, *arguments, **options):
    captures.append(1)
    return begin(self, *arguments, **options)
torch.cuda.CUDAGraph.capture_begin = noted
sample = torch.randn(64, 64, device="cuda")
with torch.no_grad():
    for _ in range(3):
        compiled(sample)
torch.cuda.synchronize()
print("captures", len(captures))
"""


def test_compiled_graphs_work_without_trees(library: str, tmp_path: Path) -> None:
    site = Path(shadow.torch_site())
    if not (site / "triton").is_dir():
        pytest.skip(f"there is no triton in {site}: torch.compile needs it")
    ran = shadow.rehearse(COMPILED, tmp_path, "24GiB")
    assert "captures 1" in ran.stdout, ran.stdout


def test_graphs_are_refused_where_pytorch_has_no_hooks_for_them(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = SimpleNamespace()
    torch = SimpleNamespace(__version__="2.1.0")
    with pytest.warns(RuntimeWarning, match="PyTorch 2.1.0 cannot tell another allocator"):
        reason = _serve_graphs(torch, hooks, ctypes.CDLL(library), "oomph")
    assert reason is not None and "graphs need a later release" in reason


TWO_GPUS = """
import ctypes, oomph, torch
oomph.use_allocator()
sizes = [(30, 0), (30, 1), (100, 0)]
tensors = [torch.empty(size << 20, dtype=torch.uint8, device=device) for size, device in sizes]
driver = ctypes.CDLL("libcuda.so.1")
def access(tensor, device):
    flags, location = ctypes.c_ulonglong(), (ctypes.c_int * 2)(1, device)
    address = ctypes.c_ulonglong(tensor.data_ptr())
    assert driver.cuMemGetAccess(ctypes.byref(flags), location, address) == 0
    return flags.value
print("access", [access(tensor, device) for tensor in tensors for device in (0, 1)])
tensors[1].copy_(tensors[0])
"""


def test_gpus_of_a_process_reach_the_memory_of_each_other(library: str, tmp_path: Path) -> None:
    """3 is reading and writing. The first tensor is older than the use of the second GPU."""
    (tmp_path / "program.py").write_text(TWO_GPUS)
    command = [shadow.binary(), "rehearse", "--card", "4GiB", "--gpus", "2", "--output", "rehearsal"]
    command += ["--", sys.executable, "program.py"]
    ran = shadow.run(command, tmp_path, shadow.environment(shadow.torch_site()))
    assert ran.returncode == 0 and "access [3, 3, 3, 3, 3, 3]" in ran.stdout, ran.stdout


def test_programs_end_and_share_the_gpu_as_they_should(library: str, tmp_path: Path) -> None:
    shadow.skip_before((2, 6), "torch.OutOfMemoryError from another allocator")
    script = Path(__file__).parents[2] / "tools/torch-plugin/behaviour.py"
    command = [shadow.binary(), "rehearse", "--output", "rehearsal", "--", sys.executable, str(script)]
    command += ["--library", library, "--package", str(Path(__file__).parents[1])]
    ran = shadow.run(command, tmp_path, shadow.environment(shadow.torch_site()), timeout=600)
    assert "14 checks, 0 failed" in ran.stdout, ran.stdout


FORKED = """
import os, torch, oomph
oomph.use_allocator(limit="4GiB")
kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
torch.cuda.set_per_process_memory_fraction(0.1)
try:
    torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print("message", error)
child = os.fork()
if child == 0:
    # As a worker of a data loader that ends: exit handlers run.
    raise SystemExit(0)
print("child ended with", os.waitpid(child, 0)[1])
"""


def test_fraction_is_kept_and_forked_processes_are_silent(library: str, tmp_path: Path) -> None:
    ran = shadow.rehearse(FORKED, tmp_path, "24GiB")
    assert "message CUDA out of memory. Tried to allocate 2.00 GiB" in ran.stdout, ran.stdout
    assert "It may hold 2.4" in ran.stdout, ran.stdout
    free = re.search(r"of which ([0-9.]+) GiB is free", ran.stdout)
    assert free is not None and 22 < float(free[1]) < 23, "memory of the GPU beyond the fraction"
    assert re.search(r"^runs out +at .*\.py:7 <module>", ran.stdout, re.M), ran.stdout
    assert "child ended with 0" in ran.stdout, ran.stdout
    assert ran.stdout.count("oomph: oomph on device 0") == 1, ran.stdout
