"""Stands in for PyTorch in tests: the parts that a rehearsal uses, over the real stand-in for the CUDA runtime."""

import ctypes
import sys
import types

__version__ = "2.11.0+cu130"
runtime = ctypes.CDLL("libcudart.so.13")
runtime.cudaMalloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
version = types.SimpleNamespace(cuda="13.0")


class OutOfMemoryError(RuntimeError):
    pass


class State:
    queued, initialized, observers, hooks = [], False, [], []
    blocks, entries, fraction = [], [], 1.0
    allocated = reserved = peak = ooms = 0


def _total():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    return total.value


def _init():
    if not State.initialized:
        State.initialized = True
        for call in State.queued:
            call()


def frames():
    frame = sys._getframe(2)
    return [{"filename": frame.f_code.co_filename, "line": frame.f_lineno, "name": frame.f_code.co_name}]


def empty(size):
    """Allocates a segment of its own for each block, as PyTorch does for large ones."""
    _init()
    size = -(-size // (2 << 20)) * (2 << 20)
    address = ctypes.c_void_p()
    refused = State.reserved + size > int(State.fraction * _total())
    if refused or runtime.cudaMalloc(ctypes.byref(address), size) != 0:
        State.ooms += 1
        for observer in State.observers:
            observer(0, size, State.allocated, 0)
        raise OutOfMemoryError("CUDA out of memory.")
    State.allocated += size
    State.reserved += size
    State.peak = max(State.peak, State.allocated)
    where = frames()
    time = len(State.entries)
    for action in ("segment_alloc", "alloc"):
        State.entries.append(
            {"action": action, "addr": address.value, "size": size, "stream": 0, "time_us": time, "frames": where}
        )
    State.blocks.append((address.value, size, where))


def _segment(address, size, where):
    block = {"address": address, "size": size, "requested_size": size, "state": "active_allocated", "frames": where}
    return {
        "device": 0, "address": address, "total_size": size, "allocated_size": size, "active_size": size,
        "requested_size": size, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
        "is_expandable": False, "frames": where, "blocks": [block],
    }  # fmt: skip


def _snapshot():
    segments = [_segment(*block) for block in State.blocks]
    return {"segments": segments, "device_traces": [State.entries], "allocator_settings": {}, "external_annotations": []}


def _stats(device=0):
    figures = {"peak": State.peak, "current": State.allocated}
    names = ("allocated_bytes", "reserved_bytes", "requested_bytes")
    return {**{name: {"all": figures} for name in names}, "num_alloc_retries": 0, "num_ooms": State.ooms}


class Optimizer:
    def step(self):
        for hook in State.hooks:
            hook(self, (), {})


def _module(name, **contents):
    module = types.ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module
    return module


def _set_fraction(fraction, device=0):
    State.fraction = fraction


memory = _module("torch.cuda.memory", _record_memory_history=lambda *_, **__: None, _snapshot=_snapshot)
cuda = _module(
    "torch.cuda",
    memory=memory,
    memory_stats_as_nested_dict=_stats,
    device_count=lambda: 1,
    get_device_properties=lambda device: types.SimpleNamespace(total_memory=_total()),
    set_per_process_memory_fraction=_set_fraction,
    _lazy_call=lambda call: call() if State.initialized else State.queued.append(call),
)
_C = types.SimpleNamespace(
    _cuda_attach_out_of_memory_observer=State.observers.append, _cuda_resetPeakMemoryStats=lambda *_: None
)
optim = _module("torch.optim", Optimizer=Optimizer)
_module("torch.optim.optimizer", register_optimizer_step_post_hook=State.hooks.append)
