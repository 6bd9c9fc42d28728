"""As much of PyTorch as the recorder calls, with a GPU of 1000 bytes. Loads in a millisecond.

FAKE_TORCH=2.0 has the recorder of that release, FAKE_TORCH=2.1 its observers; FAKE_TORCH=cpu is
built without CUDA, FAKE_TORCH=broken lacks a library.
"""

import contextlib
import os
import types

_KIND = os.environ.get("FAKE_TORCH", "2.11.0")
if _KIND == "broken":
    raise OSError("libcudart.so.13: cannot open shared object file")
__version__ = {"2.0": "2.0.1+cu117", "2.1": "2.1.2+cu121"}.get(_KIND, "2.11.0")
version = types.SimpleNamespace(cuda=None if _KIND == "cpu" else "13.0", hip=None)

TOTAL = 1000
calls = []
_state = types.SimpleNamespace(
    initialized=False,
    queue=[],
    observers=[],
    recording=None,
    trace=[],
    used=0,
    count=0,
    ooms=0,
    device=0,
)


class OutOfMemoryError(RuntimeError):
    pass


def empty(size):
    """A tensor of so many bytes. It is never freed."""
    cuda.init()
    if _state.used + size > TOTAL:
        _state.ooms += 1
        _note("oom", size)
        for observer in _state.observers:
            # Observers are told the size of a segment, and not the request.
            observer(0, -(-size // 64) * 64, TOTAL, TOTAL - _state.used)
        raise OutOfMemoryError("CUDA out of memory")
    _state.used += size
    _state.count += 1
    _note("alloc", size)


def _note(action, size):
    if _state.recording is not None:
        entry = {"action": action, "size": size}
        if action == "oom":
            entry["device_free"] = TOTAL - _state.used
        _state.trace.append(entry)
        del _state.trace[: -_state.recording]


def _begin_history(entries):
    calls.append("start")
    _state.trace.clear()
    _state.recording = entries


def _end_history():
    calls.append("stop")
    _state.recording = None


def _record_2_1(
    enabled="all",
    context="all",
    stacks="all",
    max_entries=1 << 40,
    device=None,
    clear_history=False,
):
    calls.append((context, stacks, max_entries, clear_history))
    _begin_history(max_entries) if enabled else _end_history()


def _record_2_0(enabled, record_context, cpp, trace_alloc_max_entries, trace_alloc_record_context):
    """Only the device that is selected."""
    calls.append(
        (_state.device, record_context, trace_alloc_max_entries, trace_alloc_record_context)
    )
    if _state.device == 0:
        _begin_history(trace_alloc_max_entries) if enabled else _end_history()


def _attach(observer):
    if _KIND == "2.1":
        # Where there are several devices, all but the first get an empty function.
        def observer(*facts):
            raise RuntimeError("bad_function_call")

    if _KIND != "2.0" or _state.device == 0:
        _state.observers.append(observer)


class _Memory(types.ModuleType):
    # A rehearsal replaces this function by one of another signature.
    _record_memory_history = staticmethod((lambda *_: None) if _KIND == "2.0" else _record_2_1)

    @staticmethod
    def _snapshot():
        if "FAKE_TORCH_SIGNAL" in os.environ:
            os.kill(os.getpid(), int(os.environ.pop("FAKE_TORCH_SIGNAL")))
        return {"segments": [], "device_traces": [list(_state.trace)]}


class _Cuda(types.ModuleType):
    memory = _Memory("torch.cuda.memory")

    def init(self):
        if not _state.initialized:
            calls.append("init")
            for call in _state.queue:
                call()
            _state.initialized = True

    def is_initialized(self):
        return _state.initialized

    def _lazy_call(self, call):
        call() if _state.initialized else _state.queue.append(call)

    def device_count(self):
        return 2

    @contextlib.contextmanager
    def device(self, device):
        _state.device, before = device, _state.device
        yield
        _state.device = before

    def memory_stats(self, device):
        return {
            "allocation.all.allocated": _state.count,
            "num_ooms": _state.ooms,
            "allocated_bytes.all.current": _state.used,
            "reserved_bytes.all.current": _state.used,
            "allocated_bytes.all.peak": _state.used,
            "reserved_bytes.all.peak": _state.used,
        }

    def get_device_properties(self, device):
        return types.SimpleNamespace(name="fake GPU", total_memory=TOTAL)

    def mem_get_info(self, device):
        return TOTAL - _state.used, TOTAL

    def get_allocator_backend(self):
        return "native"


cuda = _Cuda("torch.cuda")
_C = types.SimpleNamespace(
    # To ask the second device would be to make a context there.
    _cuda_hasPrimaryContext=lambda device: _state.initialized and device == 0,
    _cuda_attach_out_of_memory_observer=_attach,
    _cuda_setMemoryFraction=lambda fraction, device: None,
)
if _KIND == "2.0":
    _C._cuda_recordMemoryHistory = _record_2_0
else:
    _C._cuda_isHistoryEnabled = lambda: _state.recording is not None
