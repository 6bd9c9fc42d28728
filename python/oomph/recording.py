"""Records the GPU memory of a PyTorch program, and writes the recording when the program ends or
runs out of memory.

PyTorch's own recorder does the work: there is no Python code per allocation. CUDA is initialised by
the program, never by this module, so PyTorch's recorder is started when the program initialises
CUDA. A process that was forked from one that records writes nothing: every handler compares process
numbers.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Tuple, Type, Union

if TYPE_CHECKING:
    from .answers import Advice

RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
WORLD_VARIABLES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
OCCASIONS = ("oom", "exit", "sigterm")
# PyTorch 2.0 keeps one event unless it is told otherwise.
ALL_ENTRIES = 100_000_000
# cuDNN tries algorithms and ignores that memory runs out. So an OOM after the first is written only
# if this many times the duration of the last writing has passed.
PAUSE_AFTER_WRITING = 10.0

State = Tuple[int, int]


def record(
    folder: Union[str, "os.PathLike[str]"] = "mem",
    *,
    last: Optional[int] = None,
    stacks: bool = True,
    when: Sequence[str] = OCCASIONS,
) -> "Recorder":
    """Records all allocations and frees on the GPU, from now on.

    As a context manager it records the block, and writes the file when the block ends. As a plain
    call it records until the program ends, or until `stop()`. In both cases the file is also
    written when memory runs out (the exception goes on) and on SIGTERM (which then has its usual
    effect).

    folder: where `rank0.pickle` and `rank0.json` are written. Every process writes its own files.
    last: keep only this many events. Otherwise all are kept, up to a kilobyte of host memory for
    each.
    stacks: record the Python stack of each request. Without stacks, call sites are unknown.
    when: the occasions on which the file is written. "exit" is also the end of the block.

    It may be called before or after `import torch`, and does not initialise CUDA. PyTorch has one
    recorder per process: a second call while the first records shares it, so its file begins where
    the first one began.
    """
    if isinstance(when, str):
        when = (when,)
    unknown = [occasion for occasion in when if occasion not in OCCASIONS]
    if unknown:
        raise ValueError(f"when={unknown[0]!r}: the occasions are {', '.join(OCCASIONS)}")
    if last is not None and last < 1:
        raise ValueError(f"last={last} would record nothing")
    path = Path(folder).absolute()
    path.mkdir(parents=True, exist_ok=True)
    return start(Recorder(path, shown=Path(folder), last=last, stacks=stacks, when=tuple(when)))


def start(recorder: "Recorder") -> "Recorder":
    """Begins to record: at once, or when the program imports PyTorch and initialises CUDA."""
    _process.add(recorder)
    return recorder


class Recorder:
    """One recording. Made by `record()`."""

    def __init__(
        self,
        folder: Path,
        *,
        shown: Path,
        last: Optional[int] = None,
        stacks: bool = True,
        when: Tuple[str, ...] = OCCASIONS,
        is_child: bool = False,
    ) -> None:
        self.folder = folder
        self.last = last
        self.stacks = stacks
        self.when = when
        # As the user wrote the folder, for messages.
        self._shown = shown
        self._name: Optional[str] = None
        self._written: Optional[State] = None
        self._write_began = 0.0
        self._write_ended = 0.0
        self._oom: Optional[Dict[str, Any]] = None
        self._failures_before = 0
        self._made = time.time()
        self._made_in = os.getpid()
        self._lock = threading.RLock()
        self._saving = False
        self._is_child = is_child

    # ---- for users

    @property
    def path(self) -> Optional[Path]:
        """The last file that was written."""
        return None if self._name is None else self.folder / f"{self._name}.pickle"

    @property
    def ran_out(self) -> bool:
        """Whether a request failed for want of memory since it records."""
        return self._oom is not None or self._ran_out_unseen

    @property
    def active(self) -> bool:
        """Whether it records, or will do so when the program initialises CUDA."""
        return self in _process.recorders

    def save(self, reason: str = "request") -> Path:
        """Writes what was recorded until now, and returns the file. It replaces an earlier file of
        this recorder."""
        why = _process.why_nothing()
        if why is not None:
            from .binary import OomphError

            raise OomphError(f"there is nothing to write: {why}")
        self._save(reason)
        path = self.path
        assert path is not None
        return path

    def stop(self) -> None:
        """Ends the recording. What was not saved is lost."""
        _process.remove(self)

    def advise(self, **options: Any) -> "Advice":
        """What `oomph advise` says about the recording. Saves it first if it was not saved."""
        from .answers import advise

        return advise(self.path or self.save(), **options)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        if not self.active:
            return
        try:
            self._end("block")
        finally:
            self.stop()

    # ---- occasions

    @property
    def _ran_out_unseen(self) -> bool:
        """Whether a request failed of which PyTorch did not tell."""
        return _process.is_blind and _process.failures() > self._failures_before

    def _ran_out(self, device: int, requested: int, limit: int, free: int) -> None:
        """A request failed. PyTorch calls this before it raises the exception."""
        self._oom = _process.out_of_memory(device, requested, limit, free)
        if "oom" not in self.when:
            return
        took = self._write_ended - self._write_began
        if self._name is None or time.monotonic() - self._write_ended >= PAUSE_AFTER_WRITING * took:
            self._try_to_save("oom")

    def _end(self, reason: str) -> None:
        """The end, if that is an occasion. It is the one for an OOM that was not seen."""
        if "exit" in self.when:
            self._finish(reason)
        elif "oom" in self.when and self._ran_out_unseen:
            self._finish("oom")

    def _finish(self, reason: str) -> None:
        """The end of the block or of the process. If nothing was requested since the last file, it
        is complete: a program that ends with an OOM keeps the file of the OOM, which ends with the
        failed request."""
        try:
            why = _process.why_nothing()
            is_complete = why is None and self._written == _process.state()
        except Exception as error:
            why, is_complete = f"PyTorch does not answer: {error}", False
        if why is not None:
            self._say_nothing(why)
        elif not is_complete:
            self._try_to_save(reason)

    def _try_to_save(self, reason: str) -> None:
        """Saves on an occasion of which the program knows nothing: an error must not end it."""
        try:
            self._save(reason)
        except Exception as error:
            _say(f"the recording could not be written: {type(error).__name__}: {error}")

    def _say_nothing(self, why: str) -> None:
        """One line, from the process that called `record()` and not from its helpers."""
        if self._is_child or os.getpid() != self._made_in or _is_helper():
            return
        # A launcher such as torchrun allocates nothing itself.
        try:
            if any(file.stat().st_mtime >= self._made for file in self.folder.glob("rank*.json")):
                return
        except OSError:
            pass
        _say(f"no recording was written: {why}")

    # ---- writing

    def _save(self, reason: str) -> None:
        with self._lock:
            self._saving = True
            try:
                self._write(reason)
            finally:
                self._saving = False
        _process.deliver_signal()

    def _write(self, reason: str) -> None:
        import json
        import pickle

        self._write_began = time.monotonic()
        state = _process.state()
        snapshot = _process.snapshot()
        events = sum(len(trace) for trace in snapshot.get("device_traces", []))
        if (
            self._oom is not None
            and self._name is not None
            and reason != "oom"
            and self._has_lost_oom(snapshot)
        ):
            _say(
                f"{self._shown / self._name}.pickle is kept as of the OOM: later events have replaced it in the history"
            )
            return
        self._find_request(snapshot)
        sidecar = _process.describe(self, reason)
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.folder / f".{os.getpid()}-{id(self):x}.tmp"
        _write_synced(unfinished, lambda file: pickle.dump(snapshot, file, protocol=4))
        del snapshot
        try:
            if self._name is None:
                self._name = _take_name(self.folder, unfinished, f"rank{rank()}")
            else:
                os.replace(unfinished, self.folder / f"{self._name}.pickle")
        finally:
            if unfinished.exists():
                unfinished.unlink()
        text = json.dumps(sidecar, indent=1) + "\n"
        _write_synced(unfinished, lambda file: file.write(text.encode()))
        os.replace(unfinished, self.folder / f"{self._name}.json")
        _sync_folder(self.folder)
        self._written = state
        self._write_ended = time.monotonic()
        self._announce(reason, events)

    def _has_lost_oom(self, snapshot: Dict[str, Any]) -> bool:
        """Whether a history of limited length no longer contains the failed request."""
        traces = snapshot.get("device_traces", [])
        return not any(entry.get("action") == "oom" for trace in traces for entry in trace)

    def _find_request(self, snapshot: Dict[str, Any]) -> None:
        """PyTorch tells its observers the size of the segment that it could not get. The history has
        the request, and also that of an OOM that was not seen."""
        for device, trace in enumerate(snapshot.get("device_traces", [])):
            failed = next((one for one in reversed(trace) if one.get("action") == "oom"), None)
            if failed is None:
                continue
            if self._oom is None and self._ran_out_unseen:
                free = int(failed.get("device_free", 0))
                self._oom = _process.out_of_memory(device, int(failed["size"]), None, free)
            elif self._oom is not None and self._oom["device"] == device:
                self._oom["requested_bytes"] = int(failed["size"])

    def _announce(self, reason: str, events: int) -> None:
        number, world = rank(), world_size()
        if number != 0 and reason != "oom":
            return
        file = self._shown / f"{self._name}.pickle"
        after = {"oom": " when memory ran out", "sigterm": " on SIGTERM"}.get(reason, "")
        _say(f"wrote {file} ({events:,} events){after}")
        if number == 0:
            _say(f"next: oomph advise {self._next_argument(file, world)}")

    def _next_argument(self, file: Path, world: int) -> str:
        """The file, or what names the files of all ranks of this run."""
        import shlex

        if world == 1:
            return shlex.quote(str(file))
        # A second run into the same folder has written rank0-2.pickle, rank1-2.pickle ...
        name = self._name or ""
        suffix = name[name.index("-") :] if "-" in name else ""
        return (
            shlex.quote(str(self._shown / f"rank*{suffix}.pickle"))
            if suffix
            else shlex.quote(f"{self._shown}/")
        )


class _Process:
    """The recorders of this process, and PyTorch's recorder, of which there is one."""

    def __init__(self) -> None:
        self.recorders: List[Recorder] = []
        self.torch: Any = None
        # Why PyTorch is not there, if the program tried to import it.
        self.no_torch = "PyTorch was not imported"
        self.queued = False
        # The process in which CUDA was initialised. In a forked process it may be initialised
        # again.
        self.pid = 0
        self.enabled = False
        # Those of the first recorder, which started PyTorch's.
        self.last: Optional[int] = None
        self.stacks = True
        self.observed_in = 0
        # Whether PyTorch does not tell when memory runs out.
        self.is_blind = False
        self.problem: Optional[str] = None
        self.has_handlers = False
        self.finder: Optional[_TorchFinder] = None
        self.previous_handler: Any = None
        self.pending_signal: Optional[int] = None
        self.fractions: Optional[Dict[int, float]] = None

    # ---- beginning and end

    def add(self, recorder: Recorder) -> None:
        self.recorders.append(recorder)
        if not self.has_handlers:
            self.has_handlers = True
            atexit.register(self.at_exit)
            self.wrap_os_exit()
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "cuda"):
            self.attach(torch)
        elif self.finder is None:
            self.finder = _TorchFinder(self.attach, self.missing, self.failed)
            sys.meta_path.insert(0, self.finder)
        recorder._failures_before = self.failures()

    def remove(self, recorder: Recorder) -> None:
        if recorder not in self.recorders:
            return
        self.recorders.remove(recorder)
        if not self.recorders and self.enabled and self.is_own():
            self.enabled = False
            disable(self.torch)

    def missing(self) -> None:
        self.no_torch = "PyTorch is not installed"

    def failed(self) -> None:
        self.no_torch = "PyTorch could not be imported"

    def attach(self, torch: ModuleType) -> None:
        """After `import torch`. Nothing here initialises CUDA."""
        self.torch = torch
        self.finder = None
        if not hasattr(self.torch.cuda.memory, "_record_memory_history"):
            self.problem = (
                f"PyTorch {self.torch.__version__} has no recorder; 2.0 is the first that has one"
            )
            return
        if self.torch.cuda.is_initialized():
            self.begin()
        else:
            self.remember_fractions()
            if not self.queued:
                self.queued = True
                self.torch.cuda._lazy_call(self.begin)

    def begin(self) -> None:
        """When CUDA is initialised. An exception would reach the program, so there is none."""
        if not self.recorders:
            return
        try:
            self.pid = os.getpid()
            if not self.enabled:
                self.last, self.stacks = self.recorders[0].last, self.recorders[0].stacks
                self.enabled = enable(self.torch, self.last, self.stacks)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self.problem = f"PyTorch cannot record this allocator: {reason}"
            return
        try:
            self.observe()
        except Exception:
            # Allocators other than PyTorch's own have no observers. The file is then written at the
            # end.
            pass
        self.handle_sigterm()

    def observe(self) -> None:
        """An observer cannot be removed, so there is one for all recorders of the process."""
        if self.observed_in == os.getpid():
            return
        attach = self.torch._C._cuda_attach_out_of_memory_observer
        count = int(self.torch.cuda.device_count())
        if release(self.torch) < (2, 1):
            for device in range(count):
                with self.torch.cuda.device(device):
                    attach(self.ran_out)
        elif release(self.torch) < (2, 4) and count > 1:
            # All devices but the first get an empty function. Their OOM would be `RuntimeError:
            # bad_function_call`, which programs do not catch.
            self.is_blind = True
        else:
            attach(self.ran_out)
        self.observed_in = os.getpid()

    def handle_sigterm(self) -> None:
        """Once: a handler that the program installed before is called after this one, and one that
        it installs later may call this one."""
        if (
            self.previous_handler is not None
            or threading.current_thread() is not threading.main_thread()
        ):
            return
        present = signal.getsignal(signal.SIGTERM)
        if present is signal.SIG_DFL or callable(present):
            self.previous_handler = present
            signal.signal(signal.SIGTERM, self.terminated)

    def wrap_os_exit(self) -> None:
        """`os._exit` runs no exit handlers. Processes that multiprocessing forked end with it."""
        original = os._exit

        def exit_after_writing(status: int) -> Any:
            try:
                self.at_exit()
            finally:
                original(status)

        os._exit = exit_after_writing

    def remember_fractions(self) -> None:
        """Releases before 2.6 do not tell the memory fraction."""
        module = self.torch._C
        original = getattr(module, "_cuda_setMemoryFraction", None)
        if (
            self.fractions is not None
            or original is None
            or hasattr(module, "_cuda_getMemoryFraction")
        ):
            return
        fractions: Dict[int, float] = {}

        def set_fraction(fraction: float, device: int) -> Any:
            done = original(fraction, device)
            fractions[int(device)] = float(fraction)
            return done

        module._cuda_setMemoryFraction = set_fraction
        self.fractions = fractions

    # ---- occasions

    def is_own(self) -> bool:
        """Whether PyTorch's recorder was started in this process, and not in the one that it was
        forked from."""
        return self.pid == os.getpid()

    def ran_out(self, device: int, requested: int, limit: int, free: int) -> None:
        if self.is_own():
            for recorder in list(self.recorders):
                recorder._ran_out(int(device), int(requested), int(limit), int(free))

    def at_exit(self) -> None:
        for recorder in list(self.recorders):
            recorder._end("exit")
        self.recorders.clear()

    def terminated(self, number: int, frame: Optional[FrameType]) -> None:
        if self.is_own():
            if any(recorder._saving for recorder in self.recorders):
                # A file is being written, perhaps in the code that this handler interrupts.
                self.pending_signal = number
                return
            for recorder in list(self.recorders):
                if "sigterm" in recorder.when:
                    recorder._finish("sigterm")
        if callable(self.previous_handler):
            self.previous_handler(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def deliver_signal(self) -> None:
        number, self.pending_signal = self.pending_signal, None
        if number is not None:
            os.kill(os.getpid(), number)

    # ---- what PyTorch knows

    def why_nothing(self) -> Optional[str]:
        """Why there is nothing to write; None if there is something."""
        if self.torch is None:
            return self.no_torch
        if self.problem is not None:
            return self.problem
        if not self.is_own():
            if self.torch.version.cuda is None and getattr(self.torch.version, "hip", None) is None:
                return f"PyTorch {self.torch.__version__} is built without CUDA"
            return "the program did not use a GPU"
        return None if self.state() != (0, 0) else "nothing was allocated on a GPU"

    def devices(self) -> List[int]:
        """The devices on which this process has a context. To ask others would make one."""
        count = int(self.torch.cuda.device_count())
        return [device for device in range(count) if self.torch._C._cuda_hasPrimaryContext(device)]

    def state(self) -> State:
        """How many requests there were, and how many of them failed: whether anything happened
        since."""
        requests = failures = 0
        for device in self.devices():
            stats = self.torch.cuda.memory_stats(device)
            requests += int(stats.get("allocation.all.allocated", 0))
            failures += int(stats.get("num_ooms", 0))
        return requests, failures

    def failures(self) -> int:
        """How many requests failed; 0 where that is not known."""
        counted: Optional[State] = known(self.state) if self.is_own() else None
        return 0 if counted is None else counted[1]

    def snapshot(self) -> Dict[str, Any]:
        found: Dict[str, Any] = self.torch.cuda.memory._snapshot()
        return found

    def out_of_memory(
        self, device: int, requested: int, limit: Optional[int], free: int
    ) -> Dict[str, Any]:
        total = known(lambda: int(self.torch.cuda.get_device_properties(device).total_memory))
        return {
            "device": device,
            "requested_bytes": requested,
            "total_bytes": limit if total is None else total,
            "free_bytes": free,
            # PyTorch reports the limit of the memory fraction in the place of the total.
            "limit_bytes": limit
            if total is not None and limit is not None and limit < total
            else None,
        }

    def describe(self, recorder: Recorder, reason: str) -> Dict[str, Any]:
        """The sidecar: what the snapshot does not contain. Unknown is null."""
        import datetime
        import platform

        from . import facts
        from .binary import version

        torch = self.torch
        now = datetime.datetime.now(datetime.timezone.utc)
        variables = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        nvml = facts.Nvml()
        try:
            return {
                "schema": 1,
                "oomph": version(),
                "written": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
                "reason": reason,
                "program": list(getattr(sys, "orig_argv", None) or [sys.executable, *sys.argv]),
                "pid": os.getpid(),
                "rank": rank(),
                "world_size": world_size(),
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "cuda": torch.version.cuda,
                "driver": nvml.driver_version(),
                "nccl": facts.nccl_version(torch),
                "backend": known(lambda: str(torch.cuda.get_allocator_backend())),
                "alloc_conf": next(
                    (os.environ[name] for name in variables if name in os.environ), None
                ),
                "devices": [
                    facts.describe_device(torch, device, nvml, self.fractions)
                    for device in self.devices()
                ],
                "last": self.last,
                "stacks": self.stacks,
                "out_of_memory": recorder._oom,
            }
        finally:
            nvml.close()


class _TorchFinder:
    """Finds torch as always, and adds what happens after it is loaded."""

    def __init__(
        self,
        loaded: Callable[[ModuleType], None],
        missing: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        self.loaded = loaded
        self.missing = missing
        self.failed = failed
        self.searching = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        # `oomph rehearse` has a finder that asks all others: this one must not ask it again.
        if name != "torch" or self.searching:
            return None
        self.searching = True
        try:
            place = sys.meta_path.index(self)
            later = [
                finder for finder in sys.meta_path[place + 1 :] if hasattr(finder, "find_spec")
            ]
            specs = (finder.find_spec(name, path, target) for finder in later)
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            self.searching = False
        if spec is None:
            self.missing()
        elif spec.loader is not None and hasattr(spec.loader, "exec_module"):
            self.extend(spec.loader)
        return spec

    def extend(self, loader: Any) -> None:
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            try:
                original(module)
            except BaseException:
                self.failed()
                raise
            loader.__dict__.pop("exec_module", None)
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
            self.loaded(module)

        loader.exec_module = exec_module


_process = _Process()


def enable(torch: Any, last: Optional[int], stacks: bool, events: bool = True) -> bool:
    """Starts PyTorch's recorder; whether it had to be started. One that the program started is left
    as it is. Without events, only the stacks of blocks that are allocated are kept."""
    import inspect

    if release(torch) < (2, 1):
        # It does not tell whether it records; without a history it keeps one event.
        if any(len(trace) > 1 for trace in torch.cuda.memory._snapshot()["device_traces"]):
            return False
        _record_2_0(torch, True, stacks, 1 if not events else ALL_ENTRIES if last is None else last)
        return True
    is_enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    if is_enabled is not None and is_enabled():
        return False
    start = torch.cuda.memory._record_memory_history
    names = set(inspect.signature(start).parameters)
    # Stacks of frees are not used, and with them PyTorch 2.10 and later end programs that checkpoint
    # blocks with dropout (pytorch/pytorch#179536).
    options: Dict[str, Any] = {"context": None}
    if stacks:
        options = {"context": "alloc", "stacks": "python"}
    if last is not None:
        options["max_entries"] = last
    if "clear_history" in names:
        # Events of an earlier recording, with a gap between the two.
        options["clear_history"] = True
    start("all" if events else "state", **options)
    return True


def disable(torch: Any) -> None:
    """Ends PyTorch's recorder, but not in a rehearsal, which replaces its function by a method: it
    records until the program ends."""
    stop = torch.cuda.memory._record_memory_history
    if release(torch) >= (2, 1):
        stop(None)
    elif not hasattr(stop, "__self__"):
        _record_2_0(torch, False, False, 1)


def _record_2_0(torch: Any, enabled: bool, stacks: bool, entries: int) -> None:
    """The recorder of PyTorch 2.0, which each device has for itself. With CUDA 11, to select a device
    makes no context there."""
    for device in range(torch.cuda.device_count()):
        with torch.cuda.device(device):
            torch._C._cuda_recordMemoryHistory(enabled, stacks, False, entries, stacks)


def release(torch: Any) -> Tuple[int, int]:
    """The release of PyTorch, such as (2, 11). One that has another form is new."""
    import re

    found = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    return (int(found[1]), int(found[2])) if found else (sys.maxsize, 0)


def known(ask: Callable[[], Any]) -> Any:
    """The answer, or None where it cannot be had."""
    try:
        return ask()
    except Exception:
        return None


def rank() -> int:
    """The rank of this process, as its launcher or torch.distributed says."""
    return _from_launcher(RANK_VARIABLES, "get_rank", 0)


def world_size() -> int:
    """How many ranks there are."""
    return _from_launcher(WORLD_VARIABLES, "get_world_size", 1)


def _from_launcher(variables: Sequence[str], function: str, default: int) -> int:
    for name in variables:
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    distributed: Any = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(getattr(distributed, function)())
    except Exception:
        pass
    return default


def _is_helper() -> bool:
    """Whether multiprocessing started this process."""
    module: Any = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


def _say(text: str) -> None:
    try:
        print(f"oomph: {text}", file=sys.stderr, flush=True)
    except Exception:
        # stderr may be closed when the program ends.
        pass


def _write_synced(path: Path, write: Callable[[Any], Any]) -> None:
    """Writes a file and waits until the disk has it. What is incomplete is deleted."""
    try:
        with open(path, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        try:
            path.unlink()
        except OSError:
            pass
        raise


def _sync_folder(folder: Path) -> None:
    """Makes the new names durable, where the file system can do that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _take_name(folder: Path, unfinished: Path, name: str) -> str:
    """Gives the file the first of NAME, NAME-2, NAME-3 ... that is free. Another process may do the
    same now."""
    number = 1
    while True:
        candidate = name if number == 1 else f"{name}-{number}"
        path = folder / f"{candidate}.pickle"
        try:
            # Unlike a rename, a link fails if the name exists.
            os.link(unfinished, path)
            return candidate
        except FileExistsError:
            number += 1
        except OSError:
            # The file system has no links: take the name with an empty file, which is replaced at
            # once.
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            except FileExistsError:
                number += 1
                continue
            os.replace(unfinished, path)
            return candidate
