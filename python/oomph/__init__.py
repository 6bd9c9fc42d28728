"""oomph: when a PyTorch program runs out of GPU memory, why, and what to change.

    import oomph

    with oomph.record("mem/") as recorder:
        train()
    print(recorder.advise())

Importing this package imports neither PyTorch nor anything large: names are loaded when they are
used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .allocator import use_allocator
    from .allocator_stats import memory_stats, memory_summary
    from .allocator_stats import reset_accumulated_memory_stats, reset_peak_memory_stats
    from .answers import Advice, Inspection, Leaks, Rehearsal, Replay
    from .answers import advise, inspect, leaks, rehearse, replay
    from .binary import OomphError
    from .recording import Recorder, record

    __version__: str

__all__ = [
    "Advice",
    "Inspection",
    "Leaks",
    "OomphError",
    "Recorder",
    "Rehearsal",
    "Replay",
    "advise",
    "inspect",
    "leaks",
    "memory_stats",
    "memory_summary",
    "record",
    "rehearse",
    "replay",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "use_allocator",
]

_MODULES = {
    "Advice": "answers",
    "Inspection": "answers",
    "Leaks": "answers",
    "OomphError": "binary",
    "Recorder": "recording",
    "Rehearsal": "answers",
    "Replay": "answers",
    "advise": "answers",
    "inspect": "answers",
    "leaks": "answers",
    "memory_stats": "allocator_stats",
    "memory_summary": "allocator_stats",
    "record": "recording",
    "rehearse": "answers",
    "replay": "answers",
    "reset_accumulated_memory_stats": "allocator_stats",
    "reset_peak_memory_stats": "allocator_stats",
    "use_allocator": "allocator",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = import_module(".binary", __name__).version()
    elif name in _MODULES:
        value = getattr(import_module("." + _MODULES[name], __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
