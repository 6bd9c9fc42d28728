"""Replaces PyTorch's allocator by one of oomph's strategies, which `liboomph.so` contains."""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, Dict, Optional, Union

from . import allocator_stats, refusals

LIBRARY_VARIABLE = "OOMPH_LIBRARY"
_NAME = "liboomph.so"
# Run in another process: the library reads the variables once, and keeps an error.
_CHECK = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).oomph_reserved(0)"


def use_allocator(
    strategy: str = "oomph",
    *,
    limit: Union[str, int, None] = None,
    cudagraph_trees: bool = True,
) -> None:
    """Makes PyTorch allocate GPU memory with a strategy of oomph, until the process ends.

    strategy: as for `oomph replay --strategy`, such as "oomph" or "caching:max_split_size_mb:64".
    limit: the most memory to hold on each GPU, such as "20GiB" or a number of bytes.
    cudagraph_trees: False lets torch.compile capture CUDA graphs one by one. Its trees of graphs need
    PyTorch's own allocator, and are an error otherwise.

    Call it before the program uses the GPU for the first time: PyTorch cannot change its allocator
    later. PyTorch's statistics, snapshots and recorder are replaced by those of `liboomph.so`
    (`oomph.memory_stats`), so programs that use them run unchanged, and `oomph.record()` works. CUDA
    graphs work under the strategies oomph and caching, whether captured by hand, by
    `make_graphed_callables` or by `torch.compile` without trees. Three things need PyTorch's own
    allocator and raise RuntimeError when they are used: trees of graphs, `torch.cuda.MemPool`, and
    CUDA tensors that are sent to other processes.

    ImportError: PyTorch cannot be imported. ValueError: the strategy or the limit is wrong.
    RuntimeError: it is too late, there is no GPU, or PyTorch is too old.
    """
    settings = {"OOMPH_STRATEGY": strategy}
    if limit is not None:
        settings["OOMPH_LIMIT"] = str(limit)
    # PyTorch does not check for a null pointer.
    settings["OOMPH_OUT_OF_MEMORY"] = "throw"
    library = find_library()
    _check_settings(library, settings)
    torch = _import_torch()
    _check_torch(torch)
    # Whose allocator the line at exit compares with.
    release = ".".join(str(torch.__version__).split(".")[:2])
    os.environ.update({**settings, "OOMPH_TORCH_RELEASE": release})
    functions = ctypes.CDLL(library)
    allocator = torch.cuda.memory.CUDAPluggableAllocator(library, "oomph_alloc", "oomph_free")
    hooks = allocator.allocator()
    hooks.set_record_stream_fn(_address(functions, "oomph_record_stream"))
    hooks.set_reset_fn(_address(functions, "oomph_reset"))
    hooks.set_memory_fraction_fn(_address(functions, "oomph_memory_fraction"))
    refusals.install(torch, library, _serve_graphs(torch, hooks, functions, strategy), cudagraph_trees)
    torch.cuda.memory.change_current_allocator(allocator)
    allocator_stats.install(torch, functions)


def _serve_graphs(torch: Any, hooks: Any, functions: ctypes.CDLL, strategy: str) -> Optional[str]:
    """Sets the hooks for the memory of CUDA graphs. Returns why graphs cannot be captured, if so."""
    setters = ("set_begin_allocate_to_pool", "set_end_allocate_to_pool_fn", "set_release_pool")
    if not all(hasattr(hooks, setter) for setter in setters):
        reason = (
            f"PyTorch {torch.__version__} cannot tell another allocator which memory belongs to a "
            "CUDA graph: under oomph.use_allocator() graphs need a later release"
        )
        warnings.warn(reason, RuntimeWarning, stacklevel=3)
        return reason
    if not functions.oomph_serves_graphs():
        name = strategy.split(":")[0]
        return (
            f"the strategy {name} cannot keep the memory of a CUDA graph in place: "
            'use oomph.use_allocator("oomph"), or "caching"'
        )
    for setter, name in zip(setters, ("oomph_begin_pool", "oomph_end_pool", "oomph_release_pool")):
        getattr(hooks, setter)(_address(functions, name))
    return None


def find_library() -> str:
    """The path of `liboomph.so`: `OOMPH_LIBRARY`, in this package, or beside the program."""
    from .binary import OomphError, find_binary

    override = os.environ.get(LIBRARY_VARIABLE)
    if override:
        if not os.path.isfile(override):
            raise OomphError(f"{LIBRARY_VARIABLE}={override}: there is no such file")
        return os.path.abspath(override)
    package = Path(__file__).resolve().parent
    places = [package]
    try:
        places.append(Path(find_binary()).resolve().parent)
    except OomphError:
        pass
    for place in places:
        if (place / _NAME).is_file():
            return str(place / _NAME)
    raise OomphError(
        f"{_NAME} is not in {package}; "
        f"reinstall oomph with pip, or set {LIBRARY_VARIABLE} to its path"
    )


def _check_settings(library: str, settings: Dict[str, str]) -> None:
    """The library itself judges the variables: it knows the strategies and their parameters."""
    environment = {**os.environ, **settings}
    # Otherwise the check would write this file when it ends.
    environment.pop("OOMPH_STATS", None)
    command = [sys.executable, "-I", "-S", "-c", _CHECK, library]
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    said = done.stderr.strip()
    if done.returncode != 0:
        lines = said.splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"{library} cannot be loaded: {lines[-1]}")
    if said:
        for prefix in ("oomph: ", *(f"{name}: " for name in settings)):
            said = said[len(prefix) :] if said.startswith(prefix) else said
        raise ValueError(said)


def _import_torch() -> Any:
    try:
        return importlib.import_module("torch")
    except Exception as error:
        # A PyTorch without its CUDA libraries raises OSError or ValueError.
        message = (
            f"use_allocator replaces the allocator of PyTorch, which cannot be imported: {error}"
        )
        raise ImportError(message) from error


def _check_torch(torch: Any) -> None:
    memory = torch.cuda.memory
    hooks = getattr(torch._C, "_CUDAPluggableAllocator", None)
    if not hasattr(memory, "change_current_allocator") or not hasattr(
        hooks, "set_memory_fraction_fn"
    ):
        if torch.version.cuda is None:
            raise RuntimeError(f"PyTorch {torch.__version__} is built without CUDA")
        raise RuntimeError(
            f"PyTorch {torch.__version__} is too old: 2.0 is the first whose allocator can be replaced"
        )
    if memory.get_allocator_backend() == "pluggable":
        raise RuntimeError(
            "the allocator of PyTorch was replaced already; this can be done once in a process"
        )
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "too late: PyTorch has initialised CUDA, and keeps the allocator that it has. "
            "Call use_allocator() before the program uses the GPU for the first time"
        )
    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch finds no GPU")


def _address(functions: ctypes.CDLL, name: str) -> Optional[int]:
    return ctypes.cast(getattr(functions, name), ctypes.c_void_p).value
