"""Runs inside a program that `oomph rehearse` started: loads the shadow GPU before torch, records, and writes what was seen.

Nothing happens in a Python that does not import torch. CUDA is initialised by the program, never by this module. A process
that was forked from one that records does not write: every handler compares process numbers.
"""

import atexit
import ctypes
import importlib
import json
import math
import os
import pickle
import signal
import sys
import sysconfig
import threading
import time
from types import FrameType, ModuleType
from typing import Any, Callable, Dict, List, Optional, Tuple

from _oomph_cudnn import InstalledCudnn
from _oomph_compile import compile_facts, is_helper

# Set by `oomph rehearse`.
FOLDER = "OOMPH_REHEARSE_FOLDER"
PROGRAM = "OOMPH_REHEARSE_PROGRAM"
EVENTS = "OOMPH_REHEARSE_EVENTS"
STEPS = "OOMPH_REHEARSE_STEPS"
LIMIT = "OOMPH_REHEARSE_LIMIT"
# Set here, for the processes that this one starts: the libraries of a torch folder.
LIBRARIES = "OOMPH_REHEARSE_LIBRARIES"
# Read by the shadow GPU.
DEVICE = "OOMPH_SHADOW_DEVICE"

RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
# The recorder keeps the newest entries. Each takes up to a kilobyte of host memory, and a program may not end by itself.
MOST_ENTRIES = 5_000_000
# Stacks of frees are not used, and with them PyTorch 2.10 and later end programs that checkpoint blocks with dropout
# (pytorch/pytorch#179536).
CONTEXT = "alloc"
SECONDS_BETWEEN_EVENTS = 0.2
# PyTorch looks at its collectives ten times a second.
SECONDS_FOR_WATCHDOG = 0.3
# The exit code of a program that cannot be rehearsed; the reason is among the events.
REFUSED = 2

ReadCallback = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_int)


def send(event: str, **facts: Any) -> None:
    """Appends one line to the file that `oomph` reads while the program runs."""
    path = os.environ.get(EVENTS)
    if not path:
        return
    line = json.dumps({"event": event, "pid": os.getpid(), "rank": rank(), **facts}) + "\n"
    try:
        # One write of a short line: lines of several processes do not mix.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    except OSError:
        pass


def rank() -> int:
    """The rank of this process, as its launcher or torch.distributed says."""
    for name in RANK_VARIABLES:
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank())
    except Exception:
        pass
    return 0


def refuse(reason: str) -> None:
    """Ends the program: it cannot be rehearsed."""
    send("refused", reason=reason)
    raise SystemExit(REFUSED)


def oomph_folder() -> Tuple[str, ...]:
    """The folder of oomph's package, if the program uses it."""
    module = sys.modules.get("oomph")
    file = getattr(module, "__file__", None)
    return (os.path.dirname(file) + os.sep,) if file and hasattr(module, "use_allocator") else ()


class ProgramLines:
    """Finds the line of the program that a call came from."""

    def __init__(self, torch_folder: str) -> None:
        paths = sysconfig.get_paths()
        self.standard = tuple({paths["stdlib"] + os.sep, paths["platstdlib"] + os.sep})
        self.skipped = (torch_folder + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep)
        self.known: Dict[str, bool] = {}

    def is_program(self, file: str) -> bool:
        """Whether a file is neither torch's, nor oomph's, nor of the standard library."""
        answer = self.known.get(file)
        if answer is None:
            packaged = "site-packages" in file or "dist-packages" in file
            standard = file.startswith(self.standard) and not packaged
            answer = not (file.startswith(("<",) + self.skipped + oomph_folder()) or standard)
            self.known[file] = answer
        return answer

    def here(self) -> Optional[str]:
        """The line of the program that is running. Threads of autograd have none: the main thread waits for them."""
        found = self.of(sys._getframe())
        if found is None and threading.current_thread() is not threading.main_thread():
            # In the main thread this would be the frame of this function: a variable that refers to its own frame keeps
            # the tensors of all calling functions alive.
            found = self.of(sys._current_frames().get(threading.main_thread().ident or 0))
        return found

    def of(self, frame: Optional[FrameType]) -> Optional[str]:
        """The first frame of the program, as `file:line function`."""
        while frame is not None:
            if self.is_program(frame.f_code.co_filename):
                return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
            frame = frame.f_back
        return None


class ShadowLibraries:
    """The shadow GPU in this process: its core and a stand-in for each library of NVIDIA."""

    def __init__(self, torch_folder: str) -> None:
        files = self.files(torch_folder)
        self.folder = os.path.dirname(files[0])
        self.core = ctypes.CDLL(files[0], mode=ctypes.RTLD_GLOBAL)
        self.others = [ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL) for file in files[1:]]
        # Triton links its launchers with the driver that it finds.
        os.environ.setdefault("TRITON_LIBCUDA_PATH", self.folder)
        self.callback: Any = None
        self.cudnn = InstalledCudnn(self.core, torch_folder, files)

    def files(self, torch_folder: str) -> List[str]:
        """The core first. `oomph` writes them where they are missing; the processes of one program ask once."""
        try:
            known = json.loads(os.environ.get(LIBRARIES, "{}"))
        except ValueError:
            known = {}
        files = known.get(torch_folder)
        if not files or not all(os.path.exists(file) for file in files):
            files = self.prepare(torch_folder)
            os.environ[LIBRARIES] = json.dumps({**known, torch_folder: files})
        return [str(file) for file in files]

    def prepare(self, torch_folder: str) -> List[str]:
        import subprocess

        # The program's own variables may change what a process loads; `oomph` needs none of them.
        command = [os.environ[PROGRAM], "rehearse", "--prepare", torch_folder]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            text = done.stderr.decode(errors="replace").strip()
            refuse(text[len("error: ") :] if text.startswith("error: ") else text)
        return done.stdout.decode().splitlines()

    def on_read(self, handler: Callable[[int, str, int], None]) -> None:
        """Calls the handler for each value that is read back and not known."""

        def callback(length: int, kernel: Optional[bytes], kind: int) -> None:
            handler(int(length), (kernel or b"").decode(errors="replace"), int(kind))

        self.callback = ReadCallback(callback)
        try:
            self.core.oomph_shadow_on_read(self.callback)
        except AttributeError:
            pass

    def report(self) -> Any:
        """What the core counted."""
        try:
            function = self.core.oomph_shadow_report
        except AttributeError:
            return None
        function.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        function.restype = ctypes.c_size_t
        # It may grow between the two calls.
        buffer = ctypes.create_string_buffer(function(None, 0) + 65536)
        function(buffer, len(buffer))
        try:
            return json.loads(buffer.value.decode(errors="replace"))
        except ValueError:
            return None


def wheel_versions(torch_folder: str) -> Dict[str, int]:
    """The versions of NVIDIA's libraries that the wheel was built with, as the libraries would give them."""
    import re
    from importlib import metadata

    try:
        found = metadata.distributions(name="torch", path=[os.path.dirname(torch_folder)])
        lines = [line for one in found for line in (one.requires or [])]
    except Exception:
        lines = []
    versions: Dict[str, int] = {}
    for line in lines:
        match = re.match(r"nvidia-(cudnn|nccl|cublas)(?:-cu\d+)?\s*\(?==\s*(\d+)\.(\d+)\.(\d+)", line)
        if match:
            major, minor, patch = (int(part) for part in match.groups()[1:])
            old = match.group(1) == "cudnn" and major < 9
            versions[match.group(1)] = major * (1000 if old else 10000) + minor * 100 + patch
    try:
        with open(os.path.join(torch_folder, "version.py"), encoding="utf-8") as file:
            match = re.search(r"^cuda\b.*=\s*['\"](\d+)\.(\d+)", file.read(), re.MULTILINE)
        if match:
            versions["cuda"] = int(match.group(1)) * 1000 + int(match.group(2)) * 10
    except OSError:
        pass
    return versions


def describe_device(torch_folder: str) -> None:
    """Completes the description of the shadow GPU: versions of the wheel, and a GPU for each local rank."""
    pairs = dict(part.split("=", 1) for part in os.environ.get(DEVICE, "").split(";") if "=" in part)
    for name, version in wheel_versions(torch_folder).items():
        pairs.setdefault(name, str(version))
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdigit() and int(local) > int(pairs.get("devices", "1")):
        pairs["devices"] = local
    os.environ[DEVICE] = ";".join(f"{name}={value}" for name, value in pairs.items())


class Peaks:
    """The highest figures of one device, over all resets of the program."""

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0
        self.requested = 0
        self.retries = 0
        self.ooms = 0

    def add(self, stats: Dict[str, Any]) -> bool:
        """Whether the highest figures rose."""
        before = (self.allocated, self.reserved)
        peak = lambda name: int(stats.get(name, {}).get("all", {}).get("peak", 0))  # noqa: E731
        self.allocated = max(self.allocated, peak("allocated_bytes"))
        self.reserved = max(self.reserved, peak("reserved_bytes"))
        self.requested = max(self.requested, peak("requested_bytes"))
        self.retries = max(self.retries, int(stats.get("num_alloc_retries", 0)))
        self.ooms = max(self.ooms, int(stats.get("num_ooms", 0)))
        return before != (self.allocated, self.reserved)


class Rehearsal:
    """Records one process."""

    def __init__(self, torch: ModuleType, libraries: ShadowLibraries, torch_folder: str) -> None:
        self.torch: Any = torch
        # Such as (2, 11).
        self.release = tuple(int(part) for part in self.torch.__version__.split(".")[:2])
        self.libraries = libraries
        self.lines = ProgramLines(torch_folder)
        self.pid = 0
        self.began = 0.0
        self.name: Optional[str] = None
        self.steps = 0
        self.steps_of: Dict[int, int] = {}
        self.most_steps = int(os.environ.get(STEPS) or 0)
        self.settled_after = 0
        self.stopped = False
        self.finished = False
        self.peaks: Dict[int, Peaks] = {}
        self.oom: Optional[Dict[str, Any]] = None
        self.reads: Dict[Tuple[str, str], List[int]] = {}
        self.problems: List[str] = []
        self.last_event = 0.0
        self.reading = threading.local()

    # ---- beginning

    def attach(self) -> None:
        """After torch was imported. Nothing here initialises CUDA."""
        torch = self.torch
        self.own_record = torch.cuda.memory._record_memory_history
        torch.cuda.memory._record_memory_history = self.record_for_program
        for owner, name in ((torch._C, "_cuda_resetPeakMemoryStats"), (torch._C, "_accelerator_resetPeakStats")):
            self.before(owner, name, self.note)
        self.before(os, "_exit", self.finish)
        # The module is not an attribute of torch.optim in all releases.
        importlib.import_module("torch.optim.optimizer").register_optimizer_step_post_hook(self.stepped)
        atexit.register(self.finish)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self.terminated)
        torch.cuda._lazy_call(self.begin)

    def before(self, owner: Any, name: str, action: Callable[[], Any]) -> None:
        """Makes a function do something first."""
        original = getattr(owner, name, None)
        if original is None:
            return

        def with_action(*args: Any, **kwargs: Any) -> Any:
            action()
            return original(*args, **kwargs)

        setattr(owner, name, with_action)

    def begin(self) -> None:
        """When the program initialises CUDA. In a forked process it may do so again."""
        self.pid = os.getpid()
        self.began = time.monotonic()
        torch = self.torch
        self.libraries.on_read(self.read)
        try:
            self.record()
        except Exception as error:
            self.problems.append(f"the program's allocator cannot be recorded: {error}")
        try:
            self.observe()
        except Exception as error:
            self.problems.append(f"failed requests are not observed: {error}")
        limit = int(os.environ.get(LIMIT) or 0)
        for device in range(torch.cuda.device_count()) if limit else ():
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(fraction_of(limit, total), device)
        send("cuda")

    def record(self) -> None:
        """Starts PyTorch's recorder on all devices."""
        if self.release >= (2, 1):
            self.own_record(context=CONTEXT, stacks="python", max_entries=MOST_ENTRIES)
            return
        # PyTorch 2.0 has a recorder for each device: with stacks of Python, without those of C++.
        for device in range(self.torch.cuda.device_count()):
            with self.torch.cuda.device(device):
                self.torch._C._cuda_recordMemoryHistory(True, True, False, MOST_ENTRIES, True)

    def observe(self) -> None:
        """Asks PyTorch to tell when memory runs out."""
        attach = self.torch._C._cuda_attach_out_of_memory_observer
        count = self.torch.cuda.device_count()
        if self.release < (2, 1):
            for device in range(count):
                with self.torch.cuda.device(device):
                    attach(self.ran_out)
        elif self.release >= (2, 4) or count == 1:
            attach(self.ran_out)
        # PyTorch 2.1 to 2.3 give all devices but the first an empty function, and their OOM would be another exception. There
        # the history tells (`unseen_oom`).

    def record_for_program(self, enabled: Any = "all", *args: Any, **kwargs: Any) -> Any:
        """The program's own recording is this one: a call changes what is kept of each event, and never ends it."""
        if enabled is None or enabled is False or self.finished:
            return None
        if not self.is_own():
            return self.own_record(enabled, *args, **kwargs)
        if self.release < (2, 1):
            return None
        context = None if kwargs.get("context", CONTEXT) is None else CONTEXT
        return self.own_record("all", context, "python", MOST_ENTRIES)

    def is_own(self) -> bool:
        """Whether this process is the one that records."""
        return self.pid == os.getpid()

    # ---- while it runs

    def note(self) -> bool:
        """Adds the present peaks; whether they rose."""
        if not self.is_own() or self.finished:
            return False
        rose = False
        for device in range(self.torch.cuda.device_count()):
            try:
                stats = self.torch.cuda.memory_stats_as_nested_dict(device)
            except Exception:
                return rose
            if device in self.peaks or stats.get("reserved_bytes", {}).get("all", {}).get("peak", 0):
                rose |= self.peaks.setdefault(device, Peaks()).add(stats)
        return rose

    def stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """After each step of an optimizer. With several optimizers, the one with the most steps counts."""
        if not self.is_own():
            return
        count = self.steps_of.get(id(optimizer), 0) + 1
        self.steps_of[id(optimizer)] = count
        if count <= self.steps:
            return
        self.steps = count
        if self.note():
            self.settled_after = count
        now = time.monotonic()
        if count == 1 or now - self.last_event >= SECONDS_BETWEEN_EVENTS:
            self.last_event = now
            most = max(self.peaks.values(), key=lambda peaks: peaks.reserved, default=Peaks())
            send("step", step=count, allocated=most.allocated, reserved=most.reserved)
        if self.most_steps and count >= self.most_steps:
            self.stop()

    # torch.compile must not trace this function.
    stepped._torchdynamo_disable = True  # type: ignore[attr-defined]

    def stop(self) -> None:
        """Ends the program after the steps that were asked for."""
        again, self.stopped = self.stopped, True
        self.finish()
        if again or threading.current_thread() is not threading.main_thread():
            # The program caught the first request to end, or this is not its main thread.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        raise SystemExit(0)

    def read(self, length: int, kernel: str, kind: int) -> None:
        """A value that was computed on the GPU was read back."""
        if self.finished:
            return
        where = self.lines.here() or ""
        counted = self.reads.setdefault((where, kernel), [0, 0, kind])
        counted[0] += 1
        counted[1] += length

    def ran_out(self, device: int, request: int, allocated: int, free: int) -> None:
        """A request failed. The recording is written now, in case the program does not come to its end."""
        if not self.is_own():
            return
        self.note()
        if self.oom is None:
            stats = self.torch.cuda.memory_stats_as_nested_dict(device)
            current = lambda name: int(stats.get(name, {}).get("all", {}).get("current", 0))  # noqa: E731
            self.oom = {
                "device": int(device),
                "step": self.steps + 1,
                "request": int(request),
                "free": int(free),
                "allocated": current("allocated_bytes"),
                "reserved": current("reserved_bytes"),
                "where": self.lines.here(),
            }
            self.write()

    def terminated(self, number: int, frame: Optional[FrameType]) -> None:
        """SIGTERM: what was recorded is kept, then the signal has its usual effect."""
        if self.is_own():
            send("terminated", where=self.lines.of(frame))
            self.finish()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # ---- end

    def finish(self) -> None:
        """Writes everything, once."""
        if self.finished or not self.is_own():
            return
        self.note()
        backend = getattr(self.torch.cuda.memory, "get_allocator_backend", None)
        if backend is not None and backend() == "pluggable":
            if all(peaks.reserved == 0 for peaks in self.peaks.values()):
                self.problems.append("the program replaced PyTorch's allocator: its peaks and its failed requests are not known")
            else:
                self.problems.append("the program replaced PyTorch's allocator: peaks are those of the other one")
        try:
            self.write()
        finally:
            self.finished = True
        send("end", step=self.steps)
        self.let_collectives_end()

    def let_collectives_end(self) -> None:
        """PyTorch's thread that watches collectives ends the process with an abort if it finds one that is not complete while
        the process exits. On a GPU they end by themselves; here time passes only when the program waits."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return
        try:
            for device in self.peaks:
                self.torch.cuda.synchronize(device)
        except Exception:
            return
        time.sleep(SECONDS_FOR_WATCHDOG)

    def write(self) -> None:
        """The recording of each device, and what else is known. Files appear whole or not at all."""
        folder = os.environ.get(FOLDER)
        if not folder:
            return
        self.name = self.name or unused_name(folder, f"rank-{rank()}")
        devices = [self.write_device(folder, self.name, device) for device in sorted(self.peaks)]
        if self.oom is None:
            self.oom = self.unseen_oom()
        facts = {
            "pid": self.pid,
            "rank": rank(),
            "torch": self.torch.__version__,
            "cuda": self.torch.version.cuda,
            "seconds": time.monotonic() - self.began,
            "steps": self.steps,
            "stopped": self.stopped,
            "settled_after": self.settled_after,
            "devices": devices,
            "oom": self.oom,
            "reads": [
                {"where": where, "kernel": kernel, "count": count, "bytes": length, "kind": kind}
                for (where, kernel), (count, length, kind) in sorted(self.reads.items())
            ],
            "problems": self.problems,
            "cudnn_reason": self.libraries.cudnn.reason,
            "compile": compile_facts(),
            "shadow": self.libraries.report(),
        }
        write_whole(os.path.join(folder, self.name + ".json"), json.dumps(facts, indent=1).encode())

    def unseen_oom(self) -> Optional[Dict[str, Any]]:
        """The last request that failed and of which PyTorch did not tell, from the history."""
        for device in (device for device, peaks in self.peaks.items() if peaks.ooms):
            allocated = reserved = 0
            found = None
            for entry in self.torch.cuda.memory._snapshot()["device_traces"][device]:
                sign = {"alloc": 1, "free_requested": -1}.get(entry["action"], 0)
                allocated += sign * entry["size"]
                sign = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}.get(entry["action"], 0)
                reserved += sign * entry["size"]
                if entry["action"] == "oom":
                    found = {
                        "device": device,
                        "step": self.steps + 1,
                        "request": entry["size"],
                        "free": entry.get("device_free", 0),
                        "allocated": allocated,
                        "reserved": reserved,
                        "where": self.line_of(entry.get("frames") or []),
                    }
            if found is not None:
                return found
        return None

    def line_of(self, frames: List[Dict[str, Any]]) -> Optional[str]:
        """The innermost line of the program in a recorded stack."""
        for frame in frames:
            if self.lines.is_program(frame["filename"]):
                return f"{frame['filename']}:{frame['line']} {frame['name']}"
        return None

    def write_device(self, folder: str, name: str, device: int) -> Dict[str, Any]:
        peaks = self.peaks[device]
        facts = {
            "device": device,
            "peak_allocated": peaks.allocated,
            "peak_reserved": peaks.reserved,
            "peak_requested": peaks.requested,
            "retries": peaks.retries,
            "ooms": peaks.ooms,
            "recording": None,
            "entries": 0,
        }
        try:
            snapshot = dict(self.torch.cuda.memory._snapshot())
        except Exception as error:
            self.problems.append(f"PyTorch wrote no snapshot: {error}")
            return facts
        traces = snapshot.get("device_traces", [])
        snapshot["device_traces"] = [trace if place == device else [] for place, trace in enumerate(traces)]
        snapshot["segments"] = [one for one in snapshot.get("segments", []) if one.get("device", 0) == device]
        file = name + (f"-device-{device}" if len(self.peaks) > 1 else "") + ".pickle"
        write_whole(os.path.join(folder, file), pickle.dumps(snapshot, protocol=4))
        facts["recording"] = file
        facts["entries"] = len(traces[device]) if device < len(traces) else 0
        return facts


def fraction_of(limit: int, total: int) -> float:
    """The fraction of which PyTorch makes exactly this limit: it cuts the product to whole bytes."""
    fraction = min(limit / total, 1.0)
    while int(fraction * total) < limit and fraction < 1.0:
        fraction = math.nextafter(fraction, 1.0)
    return fraction


def unused_name(folder: str, name: str) -> str:
    """The first of NAME, NAME-2, NAME-3 that no other process has; taken by creating its file."""
    number = 1
    while True:
        candidate = name if number == 1 else f"{name}-{number}"
        try:
            os.close(os.open(os.path.join(folder, candidate + ".json"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            return candidate
        except FileExistsError:
            number += 1


def write_whole(path: str, content: bytes) -> None:
    """Writes beside the file, then renames."""
    unfinished = f"{path}.{os.getpid()}.tmp"
    try:
        with open(unfinished, "wb") as file:
            file.write(content)
        os.replace(unfinished, path)
    finally:
        if os.path.exists(unfinished):
            os.unlink(unfinished)


def attach_ranks(core: Any) -> None:
    """Loads the part that ranks of a bigger world need."""
    if os.environ.get("WORLD_SIZE", "1") in ("", "0", "1"):
        return
    import importlib.util

    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_oomph_ranks.py")
    spec = importlib.util.spec_from_file_location("_oomph_ranks", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.attach(core)


class TorchFinder:
    """Finds torch as always, and adds what happens before and after it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        finders = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in finders if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            send("missing", executable=sys.executable)
        if spec is not None and spec.loader is not None and spec.origin:
            self.extend(spec.loader, os.path.dirname(os.path.abspath(spec.origin)))
        return spec

    def extend(self, loader: Any, folder: str) -> None:
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
            del loader.exec_module
            send("torch", folder=folder)
            describe_device(folder)
            libraries = ShadowLibraries(folder)
            original(module)
            if not is_helper(folder):
                Rehearsal(module, libraries, folder).attach()
                attach_ranks(libraries.core)

        loader.exec_module = exec_module


def install() -> None:
    """From now on, `import torch` finds the shadow GPU."""
    if os.environ.get(PROGRAM):
        send("python", executable=sys.executable)
        sys.meta_path.insert(0, TorchFinder())
