"""use_allocator: its errors, and a program that allocates with it on the shadow GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import shadow

from oomph.allocator import find_library, use_allocator
from oomph.binary import OomphError


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OOMPH_BINARY", shadow.binary())
    try:
        return find_library()
    except OomphError as error:
        pytest.skip(str(error))


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
except RuntimeError as error:
    print("blocks", len(kept), type(error).__name__)
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
    assert "blocks 4 RuntimeError" in ran.stdout
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
