"""PyTorch's statistics, snapshots and recorder for programs under `oomph.use_allocator()`.

Under an allocator that is not its own, PyTorch's functions raise or return zeros. They all call a few
functions of `torch._C`, which `install()` replaces, so that `torch.cuda.memory_allocated()`,
`torch.cuda.memory._snapshot()`, `torch.accelerator.memory_stats()`, `oomph.record()` and what is built
on them work as always.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Sequence

# The order of `Watch::values` in the library.
_METRICS = (
    "allocated_bytes",
    "active_bytes",
    "requested_bytes",
    "reserved_bytes",
    "allocation",
    "active",
    "segment",
)
_COLUMNS = ("current", "peak", "allocated", "freed")
_NUMBERS = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")
_VALUES = len(_METRICS) * len(_COLUMNS) + len(_NUMBERS)
_POOLS = ("small_pool", "large_pool")
# What PyTorch's allocator counts and a strategy does not.
_NOT_COUNTED = ("inactive_split", "inactive_split_bytes")
_NOT_COUNTED_WHOLE = ("oversize_allocations", "oversize_segments")
_ROWS_NOT_COUNTED = ("Non-releasable", "Oversize")
_CONF_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_OBSERVER = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64
)


def memory_stats(device: Any = None) -> Dict[str, Any]:
    """The allocator's statistics, with the keys of `torch.cuda.memory_stats`.

    Under `use_allocator()` these are 0, because the strategies do not count them: everything of
    `small_pool` and `large_pool` (the strategies have no such pools), `inactive_split`,
    `inactive_split_bytes`, `oversize_allocations`, `oversize_segments` and `num_sync_all_streams`.
    `num_device_alloc` and `num_device_free` count driver calls that map and unmap memory, too.
    """
    found: Dict[str, Any] = _torch().cuda.memory_stats(device)
    return found


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """A table of the statistics, as `torch.cuda.memory_summary` makes it. Under `use_allocator()`, rows
    that the strategies do not count are left out."""
    text: str = _torch().cuda.memory_summary(device, abbreviated)
    return text


def reset_peak_memory_stats(device: Any = None) -> None:
    """Peaks are those since now, as after `torch.cuda.reset_peak_memory_stats`. The line at exit has the
    peak of the whole program."""
    _torch().cuda.reset_peak_memory_stats(device)


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Sums (`allocated`, `freed`, `num_ooms` and so on) are those since now."""
    _torch().cuda.reset_accumulated_memory_stats(device)


def _torch() -> Any:
    return importlib.import_module("torch")


def install(torch: Any, library: ctypes.CDLL) -> None:
    """Puts the library's figures in the place of PyTorch's."""
    Figures(torch, library).replace()


class Figures:
    """What the library knows, in the forms of `torch._C`."""

    def __init__(self, torch: Any, library: ctypes.CDLL) -> None:
        self.torch = torch
        self.library = library
        library.oomph_statistics.argtypes = [
            ctypes.c_int,
            ctypes.POINTER(ctypes.c_uint64),
            ctypes.c_size_t,
        ]
        library.oomph_record.argtypes = [
            ctypes.c_int,
            ctypes.c_bool,
            ctypes.c_size_t,
            ctypes.c_bool,
        ]
        library.oomph_snapshot.argtypes = [ctypes.c_bool]
        library.oomph_snapshot.restype = ctypes.c_void_p
        library.oomph_text_free.argtypes = [ctypes.c_void_p]
        self.is_recording = False
        self.skipped: Sequence[str] = ()
        self.annotations: List[Dict[str, Any]] = []
        self.marks_steps = False
        self.fractions: Dict[int, float] = {}
        self.observers: List[Callable[[int, int, int, int], Any]] = []
        # Kept: the library calls it until the process ends.
        self.observer = _OBSERVER(self.ran_out)

    def replace(self) -> None:
        """Functions that a release does not have are left out."""
        torch = self.torch
        replacements: Dict[str, Callable[..., Any]] = {
            "_cuda_memoryStats": self.stats,
            "_cuda_resetPeakMemoryStats": self.reset_peaks,
            "_cuda_resetAccumulatedMemoryStats": self.reset_totals,
            "_cuda_memorySnapshot": self.snapshot,
            "_cuda_record_memory_history": self.record,
            "_cuda_record_memory_history_legacy": self.record_legacy,
            "_cuda_recordMemoryHistory": self.record_legacy,
            "_cuda_isHistoryEnabled": lambda: self.is_recording,
            "_cuda_attach_out_of_memory_observer": self.attach_observer,
            "_cuda_getMemoryFraction": lambda device: self.fractions.get(self.known_device(device), 1.0),
            # These do not raise: they ask PyTorch's own allocator, which holds nothing.
            "_accelerator_isAllocatorInitialized": torch.cuda.is_initialized,
            "_accelerator_getDeviceStats": self.stats,
            "_accelerator_resetPeakStats": self.reset_peaks,
            "_accelerator_resetAccumulatedStats": self.reset_totals,
            "_accelerator_emptyCache": torch.cuda.empty_cache,
        }
        for name, function in replacements.items():
            if hasattr(torch._C, name):
                setattr(torch._C, name, function)
        set_fraction = torch._C._cuda_setMemoryFraction

        def remember(fraction: float, device: int) -> Any:
            number = self.known_device(device)
            done = set_fraction(fraction, number)
            self.fractions[number] = float(fraction)
            return done

        torch._C._cuda_setMemoryFraction = remember
        summary = torch.cuda.memory.memory_summary

        def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
            # Without the rows of the two pools: the strategies have none.
            return without_rows(summary(device, True))

        memory_summary.__doc__ = summary.__doc__
        torch.cuda.memory.memory_summary = torch.cuda.memory_summary = memory_summary

    def known_device(self, device: int) -> int:
        number, count = int(device), int(self.torch.cuda.device_count())
        if not 0 <= number < count:
            raise RuntimeError(f"there is no device {number}: torch.cuda.device_count() is {count}")
        return number

    # ---- statistics

    def stats(self, device: int) -> Dict[str, Any]:
        values = (ctypes.c_uint64 * _VALUES)()
        self.library.oomph_statistics(self.known_device(device), values, _VALUES)
        width = len(_COLUMNS)
        nothing = dict.fromkeys(_COLUMNS, 0)
        stats: Dict[str, Any] = {}
        for place, metric in enumerate(_METRICS):
            known = dict(zip(_COLUMNS, values[width * place : width * (place + 1)]))
            stats[metric] = {"all": known, **{pool: dict(nothing) for pool in _POOLS}}
        for metric in _NOT_COUNTED:
            stats[metric] = {pool: dict(nothing) for pool in ("all", *_POOLS)}
        for metric in _NOT_COUNTED_WHOLE:
            stats[metric] = dict(nothing)
        stats.update(zip(_NUMBERS, values[width * len(_METRICS) :]))
        stats["num_sync_all_streams"] = 0
        stats["max_split_size"] = -1
        return stats

    def reset_peaks(self, device: int) -> None:
        self.library.oomph_reset_peaks(self.known_device(device))

    def reset_totals(self, device: int) -> None:
        self.library.oomph_reset_totals(self.known_device(device))

    # ---- history

    def record(
        self,
        enabled: Optional[str],
        context: Optional[str] = "all",
        stacks: str = "all",
        max_entries: int = sys.maxsize,
        clear_history: bool = False,
        compile_context: bool = False,
        global_record_annotations: bool = False,
        skip_actions: Sequence[str] = (),
    ) -> None:
        """As PyTorch's. Stacks are those of Python, and of requests only."""
        if enabled not in (None, "state", "all"):
            raise RuntimeError(f"expected state to be 'state', 'all', or None: {enabled!r}")
        kind = {None: 0, "state": 1, "all": 2}[enabled]
        if kind and clear_history:
            self.annotations.clear()
        self.library.oomph_record(kind, context is not None, int(max_entries), clear_history)
        self.is_recording = kind > 0
        self.skipped = tuple(skip_actions)
        if kind == 2 and not self.marks_steps:
            self.marks_steps = True
            self.mark_steps()

    def record_legacy(
        self, enabled: bool, record_context: bool = True, max_entries: int = 1, *_: Any
    ) -> None:
        self.record("all" if enabled else None, "all" if record_context else None, "all", max_entries)

    def mark_steps(self) -> None:
        """PyTorch's recorder is told of optimizer steps by its profiler; this one by a hook."""
        optimizers = importlib.import_module("torch.optim.optimizer")
        hooks = [
            ("START", getattr(optimizers, "register_optimizer_step_pre_hook", None)),
            ("END", getattr(optimizers, "register_optimizer_step_post_hook", None)),
        ]
        for stage, register in hooks:
            if register is not None:
                register(self.marker(stage))

    def marker(self, stage: str) -> Callable[..., None]:
        def mark(optimizer: Any, *_: Any) -> None:
            if self.is_recording:
                self.annotations.append(
                    {
                        "stage": stage,
                        "name": f"Optimizer.step#{type(optimizer).__name__}.step",
                        "device": int(self.torch.cuda.current_device()),
                        "time_us": time.time_ns() // 1000,
                    }
                )

        # torch.compile must not trace this function.
        mark._torchdynamo_disable = True  # type: ignore[attr-defined]
        return mark

    def attach_observer(self, observer: Callable[[int, int, int, int], Any]) -> None:
        self.observers.append(observer)
        if len(self.observers) == 1:
            self.library.oomph_on_out_of_memory(self.observer)

    def ran_out(self, device: int, requested: int, total: int, free: int) -> None:
        for observer in list(self.observers):
            observer(device, requested, total, free)

    # ---- snapshots

    def snapshot(self, pool: Any = None) -> Dict[str, Any]:
        """pool: a pool's two numbers and whether the history is wanted; (0, 0) is every pool."""
        with_events = pool is None or len(pool) < 3 or bool(pool[2])
        answer = self.library.oomph_snapshot(with_events)
        if not answer:
            raise RuntimeError("oomph could not make a snapshot: it printed why")
        try:
            known = json.loads(ctypes.string_at(answer))
        finally:
            self.library.oomph_text_free(answer)
        frames = [
            {"name": name, "filename": filename, "line": line}
            for filename, line, name in known["frames"]
        ]
        stacks = [[frames[frame] for frame in stack] for stack in known["stacks"]] or [[]]
        traces: List[List[Dict[str, Any]]] = [
            [] for _ in range(int(self.torch.cuda.device_count()))
        ]
        segments: List[Dict[str, Any]] = []
        for one in known["devices"]:
            segments += (segment_of(one["device"], segment, stacks) for segment in one["segments"])
            traces[one["device"]] += (
                entry_of(entry, stacks) for entry in one["entries"] if entry[0] not in self.skipped
            )
        if pool is not None and tuple(pool[:2]) != (0, 0):
            segments = [one for one in segments if one["segment_pool_id"] == tuple(pool[:2])]
        return {
            "segments": segments,
            "device_traces": traces,
            "allocator_settings": settings(known),
            "external_annotations": list(self.annotations),
        }


def segment_of(device: int, segment: Dict[str, Any], stacks: List[Any]) -> Dict[str, Any]:
    blocks = [
        {
            "address": address,
            "size": size,
            "requested_size": requested,
            "state": state,
            "frames": stacks[stack],
        }
        for address, size, requested, state, stack in segment["blocks"]
    ]
    active = [one for one in blocks if one["state"] != "inactive"]
    allocated = [one for one in active if one["state"] == "active_allocated"]
    return {
        "device": device,
        "address": segment["address"],
        "total_size": segment["total_size"],
        "allocated_size": sum(one["size"] for one in allocated),
        "active_size": sum(one["size"] for one in active),
        "requested_size": sum(one["requested_size"] for one in active),
        "stream": segment["stream"],
        "segment_type": "small" if segment["is_small"] else "large",
        "segment_pool_id": tuple(segment["pool_id"]),
        "is_expandable": segment["is_expandable"],
        "frames": [],
        "blocks": blocks,
    }


def entry_of(entry: List[Any], stacks: List[Any]) -> Dict[str, Any]:
    action, address, size, stream, time_us, stack = entry
    return {
        "action": action,
        "device_free" if action == "oom" else "addr": address,
        "size": size,
        "stream": stream,
        "time_us": time_us,
        "compile_context": "N/A",
        "user_metadata": "",
        "frames": stacks[stack],
    }


def settings(known: Dict[str, Any]) -> Dict[str, Any]:
    """The settings of PyTorch's allocator, which is not used, with those of the one that is."""
    conf = next((os.environ[name] for name in _CONF_VARIABLES if name in os.environ), "")
    return {
        "PYTORCH_CUDA_ALLOC_CONF": conf,
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": False,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": {str(1 << power): 0 for power in range(16)},
        "allocator": f"oomph:{known['strategy']}",
        "events_dropped": sum(one["dropped"] for one in known["devices"]),
        "requests_without_stack": known["without_stack"],
    }


def without_rows(summary: str) -> str:
    """PyTorch's table without the rows of what is not counted, each with the line above it."""
    kept: List[str] = []
    for line in summary.splitlines():
        if line.startswith(tuple(f"| {row}" for row in _ROWS_NOT_COUNTED)):
            kept.pop()
        else:
            kept.append(line)
    # Both words have seven letters.
    return "\n".join(kept).replace("PyTorch CUDA memory", "oomph's CUDA memory") + "\n"
