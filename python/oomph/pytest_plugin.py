"""Marks and options of pytest for GPU memory.

    @pytest.mark.gpu_memory_limit("2GiB")     # the peak of the test
    @pytest.mark.gpu_leaks(max_growth="1MiB") # memory that each run of the test leaves behind
    pytest --oomph-fail-on-leak               # the same for every test, in one run
    pytest --oomph-rehearse=24GiB             # without a GPU

PyTorch is imported by the tests. This module imports it only for a test with one of the marks.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Dict, Generator, Iterable, List, Optional, Tuple, Union

import pytest

from .recording import disable, enable
from .sizes import show_size

# Set for the pytest that `--oomph-rehearse` starts: the file for its exit status.
STATUS_VARIABLE = "OOMPH_PYTEST_STATUS"
WARM_UP_RUNS = 2
SITES = 5

_OPTION = "--oomph-rehearse"
_MARKS = ("gpu_memory_limit", "gpu_leaks")
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtpe", 1):
    _UNITS.update({_letter: 1000**_power, _letter + "b": 1000**_power})
    _UNITS.update({_letter + "i": 1024**_power, _letter + "ib": 1024**_power})

# Bytes by call site.
Sites = Dict[str, int]


def parse_size(text: Union[str, int]) -> int:
    """A number of bytes, as the options of `oomph` understand it: 2GiB, 500MB, 1048576."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-zA-Z]*)\s*", text)
        if isinstance(text, str)
        else None
    )
    factor = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ValueError(
            f"{text!r} is not an amount of memory; write it like '512MiB', '80GiB' or 1048576"
        )
    number = match.group(1)
    return int(float(number) * factor) if "." in number else int(number) * factor


# ---- hooks

# This module is loaded in every session where oomph is installed, and must not break those of an
# old pytest (pluggy before 1.2).
_IS_SUPPORTED = "wrapper" in inspect.signature(pytest.hookimpl).parameters
_TOO_OLD = f"oomph's marks and options need pytest 8 or newer, and this is {pytest.__version__}"


def _wrapper(tryfirst: bool = False, trylast: bool = False) -> Callable[[Any], Any]:
    """Marks a hook that wraps others. For an old pytest there is no such hook."""
    if not _IS_SUPPORTED:
        return lambda function: None
    marked: Callable[[Any], Any] = pytest.hookimpl(wrapper=True, tryfirst=tryfirst, trylast=trylast)
    return marked


# ---- options and marks


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("oomph", "GPU memory")
    group.addoption(
        _OPTION,
        nargs="?",
        const="",
        default=None,
        metavar="CARD",
        help="run the tests without a GPU: memory behaves as on the card (a size such as 24GiB, or "
        "a name such as rtx4090; default: h200), kernels compute nothing. Write the '='",
    )
    group.addoption(
        "--oomph-fail-on-leak",
        action="store_true",
        help="fail each test after which more GPU memory is allocated than before",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "gpu_memory_limit(size, kind='allocated'): fail if the peak of GPU memory during the test "
        "exceeds size; kind may be 'reserved'",
    )
    config.addinivalue_line(
        "markers",
        "gpu_leaks(max_growth='1MiB', runs=5): run the test several times, and fail if each run "
        "leaves more than max_growth of GPU memory allocated",
    )
    wants_leaks = config.getoption("oomph_fail_on_leak")
    if not _IS_SUPPORTED and (wants_leaks or config.getoption("oomph_rehearse") is not None):
        raise pytest.UsageError(_TOO_OLD)
    if wants_leaks:
        config.pluginmanager.register(LeakCheck(), "oomph-leak-check")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before fixtures are set up: they may need the GPU, too."""
    if any(item.get_closest_marker(mark) for mark in _MARKS):
        if not _IS_SUPPORTED:
            pytest.fail(_TOO_OLD, pytrace=False)
        why = _why_no_gpu()
        if why is not None:
            pytest.skip(why)


@_wrapper(trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    limit = item.get_closest_marker("gpu_memory_limit")
    leaks = item.get_closest_marker("gpu_leaks")
    check = LimitCheck(*limit.args, **limit.kwargs) if limit else None
    runs = RepeatedRuns(item, *leaks.args, **leaks.kwargs) if leaks else None
    if check:
        check.begin()
    try:
        result = yield
        if runs:
            runs.repeat()
        if check:
            check.judge()
        if runs:
            runs.judge()
        return result
    finally:
        if check:
            check.recorder.stop()


# ---- what PyTorch knows


def _why_no_gpu() -> Optional[str]:
    try:
        torch: Any = importlib.import_module("torch")
    except ModuleNotFoundError:
        return "PyTorch is not installed"
    except Exception as error:
        # Where there is no GPU, the libraries that PyTorch needs may be missing, too.
        why = f"PyTorch cannot be imported ({type(error).__name__})"
    else:
        if torch.cuda.is_available():
            return None
        why = "there is no GPU"
    return f"{why}; `pytest {_OPTION}` runs this test without a GPU"


def _torch_with_cuda() -> Any:
    """PyTorch if it is imported and has initialised CUDA, otherwise None."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return None
    return torch


def _per_device(torch: Any, statistic: str) -> List[int]:
    """A statistic of each device, such as `allocated_bytes.all.peak`. It makes no context."""
    stats = (torch.cuda.memory_stats(device) for device in range(torch.cuda.device_count()))
    return [int(found.get(statistic, 0)) for found in stats]


def _settled_memory() -> List[int]:
    """The bytes allocated on each device after a garbage collection."""
    torch = _torch_with_cuda()
    if torch is None:
        return []
    gc.collect()
    # cuBLAS keeps a workspace for each stream, which the first matrix product allocates.
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    return _per_device(torch, "allocated_bytes.all.current")


def _growth(before: List[int], after: List[int]) -> Tuple[int, int]:
    """The device that grew most, and by how much."""
    before = before + [0] * (len(after) - len(before))
    grown = [(now - then, -device) for device, (then, now) in enumerate(zip(before, after))]
    most, device = max(grown, default=(0, 0))
    return -device, most


class StackRecorder:
    """PyTorch's recorder, which keeps the Python stack of each block. It is not restarted."""

    def __init__(self, events: bool = False) -> None:
        # Also keep each request and each free, not only the stacks of blocks that are allocated.
        self.events = events
        self.wanted = False
        self.queued = False
        self.started = False

    def start(self) -> None:
        torch: Any = sys.modules.get("torch")
        self.wanted = True
        if _torch_with_cuda() is not None:
            self.record(torch)
        elif torch is not None and hasattr(torch, "cuda") and not self.queued:
            # PyTorch calls this when the test initialises CUDA.
            self.queued = True
            torch.cuda._lazy_call(lambda: self.record(torch))

    def record(self, torch: Any) -> None:
        if not self.wanted:
            return
        try:
            self.started = enable(torch, None, True, self.events) or self.started
        except Exception:
            # Other allocators cannot be recorded. Call sites are then unknown.
            pass

    def stop(self) -> None:
        self.wanted = False
        if self.started:
            disable(sys.modules["torch"])
            self.started = False


def _snapshot() -> Dict[str, Any]:
    torch = _torch_with_cuda()
    try:
        return dict(torch.cuda.memory._snapshot()) if torch else {}
    except Exception:
        return {}


def _live_blocks(
    snapshot: Dict[str, Any], device: int
) -> Iterable[Tuple[int, int, List[Dict[str, Any]]]]:
    """Address, size and stack of each allocated block."""
    for segment in snapshot.get("segments", []):
        address = int(segment.get("address", 0))
        for block in segment.get("blocks", []):
            if segment.get("device", 0) == device and block.get("state") == "active_allocated":
                # PyTorch 2.0 keeps the stacks of all blocks that were here, the newest first.
                history = block.get("history") or [{}]
                yield (
                    int(block.get("address", address)),
                    int(block["size"]),
                    block.get("frames") or history[0].get("frames") or [],
                )
            address += int(block["size"])


def _site(frames: List[Dict[str, Any]]) -> str:
    """The innermost line that is not PyTorch's, as `file:line function`."""
    torch: Any = sys.modules.get("torch")
    folder = os.path.dirname(torch.__file__) + os.sep if torch is not None else ""
    own = [frame for frame in frames if not frame["filename"].startswith((folder, "<"))]
    for frame in (own or frames)[:1]:
        path = frame["filename"]
        near = os.path.relpath(path)
        return f"{path if near.startswith('..') else near}:{frame['line']} {frame['name']}"
    return "unknown (backward runs on threads without Python)"


def _bytes_by_site(blocks: Iterable[Tuple[int, int, List[Dict[str, Any]]]]) -> Sites:
    found: Sites = {}
    for _, size, frames in blocks:
        site = _site(frames)
        found[site] = found.get(site, 0) + size
    return found


def _site_lines(sites: Sites) -> str:
    """The largest sites, one per line. Those below a thousandth of the largest are left out."""
    largest = sorted(sites.items(), key=lambda pair: -pair[1])[:SITES]
    least = max(1, largest[0][1] // 1000) if largest else 1
    return "".join(f"\n  {show_size(size):>10}  {site}" for site, size in largest if size >= least)


# ---- @pytest.mark.gpu_memory_limit


class LimitCheck:
    """Compares the peak of one test with a limit."""

    def __init__(self, size: Union[str, int], kind: str = "allocated") -> None:
        if kind not in ("allocated", "reserved"):
            raise ValueError(
                f"gpu_memory_limit: kind={kind!r} is neither 'allocated' nor 'reserved'"
            )
        self.limit = parse_size(size)
        self.kind = kind
        self.recorder = StackRecorder(events=True)
        self.before: List[int] = []
        self.began_us = 0

    def begin(self) -> None:
        self.before = _settled_memory()
        self.began_us = int(time.time() * 1e6)
        self.recorder.start()
        torch = _torch_with_cuda()
        if torch is None:
            return
        if self.kind == "reserved":
            # The cache of earlier tests is not part of this one.
            torch.cuda.empty_cache()
            self.before = _per_device(torch, "reserved_bytes.all.current")
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)

    def judge(self) -> None:
        torch = _torch_with_cuda()
        peaks = _per_device(torch, f"{self.kind}_bytes.all.peak") if torch else []
        peak = max(peaks, default=0)
        if peak > self.limit:
            pytest.fail(self.message(peaks.index(peak), peak), pytrace=False)

    def message(self, device: int, peak: int) -> str:
        text = (
            f"gpu_memory_limit: {show_size(peak)} {self.kind} at the peak on device {device}; "
            f"the limit is {show_size(self.limit)}: {show_size(peak - self.limit)} too much"
        )
        before = self.before[device] if device < len(self.before) else 0
        if before:
            text += f"\n{show_size(before)} of it were {self.kind} before the test"
        lines = _site_lines(sites_at_peak(_snapshot(), device, self.began_us))
        return text + (f"\nallocated at the peak, by call site:{lines}" if lines else "")


def sites_at_peak(snapshot: Dict[str, Any], device: int, since_us: int) -> Sites:
    """What was allocated when most was, by call site, without what is older than the recorder."""
    traces = snapshot.get("device_traces", [])
    events = traces[device] if device < len(traces) else []
    live: Dict[int, Dict[str, Any]] = {}

    def follow(event: Dict[str, Any]) -> int:
        """By how much the event changes what is allocated."""
        if event["action"] == "alloc":
            live[event["addr"]] = event
            return int(event["size"])
        if event["action"] == "free_requested" and event["addr"] in live:
            return -int(live.pop(event["addr"])["size"])
        return 0

    total = most = peak = 0
    for place, event in enumerate(events, 1):
        total += follow(event)
        if total > most and event.get("time_us", since_us) >= since_us:
            most, peak = total, place
    live.clear()
    for event in events[:peak]:
        follow(event)
    return _bytes_by_site(
        (address, event["size"], event.get("frames") or []) for address, event in live.items()
    )


# ---- @pytest.mark.gpu_leaks


class RepeatedRuns:
    """Runs the body of a test several times, and judges what each run leaves behind."""

    def __init__(
        self, item: pytest.Item, max_growth: Union[str, int] = "1MiB", runs: int = 5
    ) -> None:
        if runs <= WARM_UP_RUNS:
            raise ValueError(
                f"gpu_leaks: runs={runs} is too few; the first {WARM_UP_RUNS} only warm up"
            )
        self.item = item
        self.max_growth = parse_size(max_growth)
        self.runs = runs
        self.memory: List[List[int]] = []

    def repeat(self) -> None:
        """The runs after the first, which pytest itself makes."""
        self.memory.append(_settled_memory())
        for run in range(2, self.runs + 1):
            try:
                self.item.runtest()
            except Exception:
                text = f"This happened in run {run} of {self.runs}: gpu_leaks repeats the test."
                self.item.add_report_section("call", "oomph", text)
                raise
            self.memory.append(_settled_memory())

    def judge(self) -> None:
        judged = self.runs - WARM_UP_RUNS
        device, total = _growth(self.memory[WARM_UP_RUNS - 1], self.memory[-1])
        if total <= self.max_growth * judged:
            return
        held = " -> ".join(
            show_size(memory[device] if device < len(memory) else 0) for memory in self.memory
        )
        pytest.fail(
            f"gpu_leaks: each run leaves {show_size(total // judged)} allocated "
            f"on device {device}; max_growth is {show_size(self.max_growth)}\n"
            f"allocated after runs 1 to {self.runs}: {held}{self.growing_sites(device)}",
            pytrace=False,
        )

    def growing_sites(self, device: int) -> str:
        """Runs the test once more with PyTorch's recorder, and compares the allocated blocks."""
        recorder = StackRecorder()
        recorder.start()
        try:
            before = _bytes_by_site(_live_blocks(_snapshot(), device))
            self.item.runtest()
            _settled_memory()
            after = _bytes_by_site(_live_blocks(_snapshot(), device))
        except Exception as error:
            return f"\nthe call sites are unknown: one more run failed with {type(error).__name__}"
        finally:
            recorder.stop()
        lines = _site_lines({site: size - before.get(site, 0) for site, size in after.items()})
        return (
            f"\ngrowth in one more run, by call site:{lines}"
            if lines
            else "\nthe call sites are unknown"
        )


# ---- --oomph-fail-on-leak


class LeakCheck:
    """Compares the memory before and after each test."""

    def __init__(self) -> None:
        self.recorder = StackRecorder()
        self.before: List[int] = []
        self.failed = False
        self.fixture_depth = 0

    @_wrapper(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        self.failed = False
        self.before = _settled_memory()
        self.recorder.start()
        return (yield)

    @_wrapper()
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        """Memory of a fixture that lives longer than the test is not a leak of the test."""
        if fixturedef.scope == "function" or self.fixture_depth:
            return (yield)
        before = _settled_memory()
        self.fixture_depth += 1
        try:
            return (yield)
        finally:
            self.fixture_depth -= 1
            after = _settled_memory()
            zeros = [0] * len(after)
            grown = zip((before or zeros), after, (self.before or zeros))
            self.before = [held + now - then for then, now, held in grown]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.failed

    @_wrapper(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        result = yield
        # The traceback of a failed test keeps its variables. The mark gpu_leaks has its own check.
        if self.failed or item.get_closest_marker("gpu_leaks") or _torch_with_cuda() is None:
            return result
        # pytest drops the values of the fixtures after this hook.
        getattr(item, "funcargs", {}).clear()
        device, growth = _growth(self.before, _settled_memory())
        if growth > 0:
            pytest.fail(self.message(item, device, growth), pytrace=False)
        return result

    def message(self, item: pytest.Item, device: int, growth: int) -> str:
        code = getattr(getattr(item, "function", None), "__code__", None)
        blocks = (
            block
            for block in _live_blocks(_snapshot(), device)
            if code
            and any(
                (f["filename"], f["name"]) == (code.co_filename, code.co_name) for f in block[2]
            )
        )
        lines = _site_lines(_bytes_by_site(blocks))
        text = (
            f"--oomph-fail-on-leak: {show_size(growth)} more are allocated on device {device} "
            "than before the test"
        )
        return text + (
            f"\nallocated by the test and not freed, by call site:{lines}" if lines else ""
        )

    def pytest_unconfigure(self) -> None:
        self.recorder.stop()


# ---- --oomph-rehearse


@_wrapper(tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, args: List[str]
) -> Generator[None, object, object]:
    """Before any conftest.py is imported and before output is captured, pytest is replaced."""
    wanted = any(arg == _OPTION or arg.startswith(_OPTION + "=") for arg in args)
    if wanted and "OOMPH_REHEARSE_PROGRAM" not in os.environ:
        raise SystemExit(rehearse(args))
    status_file = os.environ.pop(STATUS_VARIABLE, None)
    if status_file is not None:
        early_config.pluginmanager.register(StatusWriter(status_file), "oomph-status-writer")
    return (yield)


class StatusWriter:
    """Writes the exit status of pytest: that of `oomph rehearse` may be 108, does not fit."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.session: Optional[pytest.Session] = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    def pytest_unconfigure(self) -> None:
        if self.session is not None:
            with open(self.path, "w", encoding="utf-8") as file:
                file.write(str(int(self.session.exitstatus)))


# Run by `oomph rehearse`: gives pytest the terminal. The output of `oomph` itself is caught.
_GIVE_OUTPUT = """\
import os, sys
for source, target in zip(sys.argv[1:3], (1, 2)):
    os.dup2(int(source), target)
    os.close(int(source))
os.execv(sys.argv[3], sys.argv[3:])
"""


def rehearse(args: List[str]) -> int:
    """Runs pytest with these arguments on the shadow GPU; its exit status."""
    from .binary import OomphError, find_binary

    cards = [arg[len(_OPTION) + 1 :] for arg in args if arg.startswith(_OPTION + "=")]
    card = ["--card", cards[-1]] if cards else []
    if cards and "," in cards[-1]:
        raise pytest.UsageError(f"{_OPTION}={cards[-1]}: the tests run on one card")
    _check_next_word(args)
    try:
        binary = find_binary()
    except OomphError as error:
        raise pytest.UsageError(f"{_OPTION}: {error}") from error
    rest = [arg for arg in args if arg != _OPTION and not arg.startswith(_OPTION + "=")]
    folder = tempfile.mkdtemp(prefix="oomph-pytest-")
    status_file = os.path.join(folder, "status")
    environment = {**os.environ, STATUS_VARIABLE: status_file}
    # The arguments contain those of this variable and of the configuration file.
    environment.pop("PYTEST_ADDOPTS", None)
    terminal = [os.dup(1), os.dup(2)]
    command = [
        binary,
        "rehearse",
        "--format",
        "json",
        "--output",
        os.path.join(folder, "recording"),
        *card,
        "--",
    ]
    command += [sys.executable, "-I", "-S", "-c", _GIVE_OUTPUT, *map(str, terminal)]
    command += [sys.executable, *_this_pytest(), "-o", "addopts=", *rest]
    try:
        with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                command, stdout=answer, stderr=errors, env=environment, pass_fds=terminal
            )
            while True:
                try:
                    code = process.wait()
                    break
                except KeyboardInterrupt:
                    # The other pytest gets the signal, too, and ends as always.
                    continue
            answer.seek(0)
            errors.seek(0)
            _say_answer(
                answer.read().decode(errors="replace"), errors.read().decode(errors="replace")
            )
        try:
            with open(status_file, encoding="utf-8") as file:
                return int(file.read())
        except (OSError, ValueError):
            return code
    finally:
        for descriptor in terminal:
            os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)


def _check_next_word(args: List[str]) -> None:
    """The word after the option is a path, but some mean a card."""
    for option, word in zip(args, args[1:]):
        is_card = re.fullmatch(r"[0-9a-zA-Z][0-9a-zA-Z.-]*", word) and not word.endswith(".py")
        if option == _OPTION and is_card and not os.path.exists(word):
            raise pytest.UsageError(f"there is no file {word}; if it is a card: {_OPTION}={word}")


def _this_pytest() -> List[str]:
    """How pytest was started: only `python -m pytest` puts the current folder into sys.path."""
    name = os.path.basename(sys.argv[0])
    return (
        [sys.argv[0]]
        if name in ("pytest", "py.test") and os.path.isfile(sys.argv[0])
        else ["-m", "pytest"]
    )


def _say_answer(answer: str, errors: str) -> None:
    """What a test cannot know: the card, the peaks, and values that are not real."""
    from .binary import error_message

    lines = [line for line in error_message(errors).splitlines() if line.strip()]
    try:
        row = json.loads(answer)["rows"][0]
        peaks = [show_size(int(row[f"peak_{kind}_bytes"])) for kind in ("allocated", "reserved")]
        lines.append(f"rehearsed on {row['card']}: peak {peaks[0]} allocated, {peaks[1]} reserved")
        places = sorted({str(read["where"]) for read in row["reads"] if read.get("where")})
        if places:
            lines.append("values that were computed on the GPU are not known. They were read here:")
            lines += [f"  {place}" for place in places[:SITES]]
    except (ValueError, KeyError, IndexError, TypeError):
        # No answer: `oomph` has said why.
        pass
    for line in lines:
        print(f"oomph: {line}", file=sys.stderr)
