"""The answers of the program `oomph` as Python objects.

Each function runs the program and returns a frozen dataclass. Its fields have the names of the
program's JSON; `raw` has all of it, `print()` shows what the terminal shows, and `to_pandas()`
gives the table behind it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass, field
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
    Union,
)

from .binary import VERDICTS, OomphError, Output, error_message, run

PathLike = Union[str, "os.PathLike[str]"]
# A path of a recording, a folder with one per rank, the name of a workload, several of these, or a
# snapshot.
Source = Union[PathLike, Sequence[PathLike], Mapping[str, Any]]
T = TypeVar("T")
A = TypeVar("A", bound="Answer")


def _fill(kind: Type[T], row: Mapping[str, Any]) -> T:
    """A dataclass from the JSON object with its names. Names that it does not have stay in
    `raw`."""
    names = {one.name for one in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in row.items() if name in names})


def _fill_or_none(kind: Type[T], row: Optional[Mapping[str, Any]]) -> Optional[T]:
    return None if row is None else _fill(kind, row)


def _fill_all(kind: Type[T], rows: Optional[Iterable[Mapping[str, Any]]]) -> Tuple[T, ...]:
    return tuple(_fill(kind, row) for row in rows or ())


@dataclass(frozen=True)
class Answer:
    """What the program said about one source."""

    source: str
    raw: Dict[str, Any] = field(repr=False, compare=False)
    # What the terminal shows. One text for all sources of a call.
    text: str = field(repr=False, compare=False)
    exit_code: int
    # The answers for all sources, if there were several: files, or the ranks of a folder. This one
    # is the worst.
    others: Tuple[Any, ...] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return self.text

    @property
    def each(self) -> Tuple[Any, ...]:
        """The answers for all sources: this one, if there was one source."""
        return self.others or (self,)

    @classmethod
    def _nested(cls, row: Mapping[str, Any]) -> Dict[str, Any]:
        """The fields that are dataclasses themselves."""
        return {}

    @classmethod
    def _make(
        cls: Type[A], row: Dict[str, Any], output: "Output", others: Tuple[Any, ...] = ()
    ) -> A:
        source = str(row.get("source", ""))
        base = {
            "source": source,
            "raw": row,
            "text": output.stdout.rstrip(),
            "exit_code": output.exit_code,
            "others": others,
        }
        names = {one.name for one in dataclasses.fields(cls)}
        values = {name: value for name, value in row.items() if name in names}
        return cls(**{**values, **cls._nested(row), **base})

    def _table(self) -> List[Dict[str, Any]]:
        """The rows for `to_pandas()`."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """The table of the answer as a pandas DataFrame."""
        try:
            import pandas  # type: ignore[import-untyped, import-not-found, unused-ignore]
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas: pip install pandas") from error
        return pandas.DataFrame(self._table())

    def _repr_html_(self) -> str:
        from .notebook import to_html

        return to_html(self)


# ---- advise


@dataclass(frozen=True)
class Confidence:
    """Whether the model reproduces the recording: "exact", "partial" or "diverged"."""

    verdict: str
    entries: Optional[int] = None
    blocks_before: Optional[int] = None
    reasons: Sequence[Any] = ()


@dataclass(frozen=True)
class Predictions:
    """How many predictions for such settings were compared with real runs, and how many were
    exact."""

    exact: int
    runs: int


@dataclass(frozen=True)
class Holder:
    """A call site that held memory."""

    site: Optional[str]
    bytes: int
    blocks: int


@dataclass(frozen=True)
class OutOfMemory:
    """The request at which the recording ends because it failed."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    device_free_bytes: Optional[int] = None
    room_bytes: Optional[int] = None
    site: Optional[str] = None
    holders: Tuple[Holder, ...] = ()


@dataclass(frozen=True)
class Tried:
    """One of the settings or allocators that were tried. `settings` is None for allocators that
    PyTorch does not have."""

    strategy: str
    settings: Optional[str]
    status: str
    fits: Optional[bool] = None
    needed_bytes: Optional[int] = None
    needed_card_bytes: Optional[int] = None
    uncapped_reserved_bytes: Optional[int] = None
    driver_without_launches_ns: Optional[int] = None
    current: bool = False
    recommended: bool = False
    closest: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Advice(Answer):
    """The allocator settings to use. `print(advice)` shows it; `export` is the line to paste."""

    # Settings as in PYTORCH_ALLOC_CONF; "" is PyTorch's defaults, None that no setting is enough.
    recommended: Optional[str] = None
    export: Optional[str] = None
    export_note: Optional[str] = None
    changes: bool = False
    current: Optional[str] = None
    # Whether it fits with the recommended and with the current settings; None if no card and no
    # limit is known.
    fits: Optional[bool] = None
    fits_now: Optional[bool] = None
    # The least memory in which the recording completes, with the recommended and the current
    # settings.
    needed_bytes: Optional[int] = None
    needed_now_bytes: Optional[int] = None
    saved_bytes: Optional[int] = None
    uncapped_reserved_bytes: Optional[int] = None
    uncapped_reserved_now_bytes: Optional[int] = None
    live_peak_bytes: Optional[int] = None
    limit_bytes: Optional[int] = None
    overhead_bytes: Optional[int] = None
    release: Optional[str] = None
    closest: Any = None
    reasons: Sequence[Any] = field(default=(), repr=False)
    confidence: Optional[Confidence] = None
    predictions: Optional[Predictions] = None
    out_of_memory: Optional[OutOfMemory] = None
    tried: Tuple[Tried, ...] = field(default=(), repr=False)

    @classmethod
    def _nested(cls, row: Mapping[str, Any]) -> Dict[str, Any]:
        ended = row.get("dead_end")
        if ended is not None:
            ended = {**ended, "holders": _fill_all(Holder, ended.get("holders"))}
        return {
            "confidence": _fill_or_none(Confidence, row.get("confidence")),
            "predictions": _fill_or_none(Predictions, row.get("predictions")),
            "out_of_memory": _fill_or_none(OutOfMemory, ended),
            "tried": _fill_all(Tried, row.get("tried")),
        }

    @property
    def cannot_tell(self) -> bool:
        """Whether the recording has no history to judge."""
        return self.raw.get("history_gap") is not None

    def _table(self) -> List[Dict[str, Any]]:
        return [dataclasses.asdict(one) for one in self.tried]


def advise(
    source: Source,
    *,
    card: Optional[str] = None,
    limit: Optional[Union[str, float]] = None,
    **options: Any,
) -> Advice:
    """The allocator settings to use, and how sure that is. Other options are those of `oomph
    advise`."""
    return _answer(Advice, "advise", source, {"card": card, "limit": limit, **options})


# ---- leaks


@dataclass(frozen=True)
class Grower:
    """A call site, tag or size whose memory grows."""

    name: str
    by: str
    bytes_per_step: int
    bytes_before: Optional[int] = None
    bytes_after: Optional[int] = None
    blocks_before: Optional[int] = None
    blocks_after: Optional[int] = None


@dataclass(frozen=True)
class Step:
    """The memory of one step."""

    step: int
    allocated_bytes: Optional[int] = None
    peak_allocated_bytes: Optional[int] = None
    reserved_bytes: Optional[int] = None
    kept_bytes: Optional[int] = None
    surviving_bytes: Optional[int] = None
    transient_bytes: Optional[int] = None


@dataclass(frozen=True)
class Leaks(Answer):
    """Whether memory grows from step to step."""

    # "leak", "steady", "growing_cache", "fragmentation" or "cannot_tell".
    verdict: str = ""
    # Why it cannot be told: a word for programs, and a sentence.
    doubt: Optional[str] = None
    reason: Optional[str] = None
    bytes_per_step: Optional[int] = None
    bytes_per_step_low: Optional[int] = None
    bytes_per_step_high: Optional[int] = None
    p_value: Optional[float] = None
    level_bytes: Optional[int] = None
    capacity_bytes: Optional[int] = None
    first_step: Optional[int] = None
    last_step: Optional[int] = None
    runs_out_at_step: Optional[int] = None
    ran_out_at_step: Optional[int] = None
    course: Optional[str] = None
    growers: Tuple[Grower, ...] = ()
    per_step: Tuple[Step, ...] = field(default=(), repr=False)

    @classmethod
    def _nested(cls, row: Mapping[str, Any]) -> Dict[str, Any]:
        return {
            "growers": _fill_all(Grower, row.get("growers")),
            "per_step": _fill_all(Step, row.get("per_step")),
        }

    @property
    def leaks(self) -> bool:
        return self.verdict == "leak"

    def _table(self) -> List[Dict[str, Any]]:
        return [dict(row) for row in self.raw.get("per_step", [])]


def leaks(source: Source, **options: Any) -> Leaks:
    """Whether memory leaks, and where. Several files are snapshots of one program, in order, unless
    `each=True`."""
    return _answer(Leaks, "leaks", source, options)


# ---- inspect


@dataclass(frozen=True)
class Operation:
    """What one call site, tag or size requested."""

    name: str
    requests: int
    requested_bytes: int
    live_bytes: int
    peak_live_bytes: int
    freed_bytes: Optional[int] = None


@dataclass(frozen=True)
class Peak:
    """The most bytes that were alive at one time."""

    bytes: int
    blocks: int
    event: int


@dataclass(frozen=True)
class Inspection(Answer):
    """What is in a recording. `operations` is filled with `by="site"`, `"tag"` or `"size"`."""

    events: Optional[int] = None
    steps: Optional[int] = None
    streams: Optional[int] = None
    threads: Optional[int] = None
    requested_bytes: Optional[int] = None
    largest_request: Optional[int] = None
    live_bytes: Optional[int] = None
    live_blocks: Optional[int] = None
    peak: Optional[Peak] = None
    phases: Sequence[str] = field(default=(), repr=False)
    operations: Tuple[Operation, ...] = field(default=(), repr=False)
    live_over_time: Sequence[int] = field(default=(), repr=False)

    @classmethod
    def _nested(cls, row: Mapping[str, Any]) -> Dict[str, Any]:
        return {
            "peak": _fill_or_none(Peak, row.get("peak")),
            "operations": _fill_all(Operation, row.get("operations")),
        }

    def _table(self) -> List[Dict[str, Any]]:
        """The operations, or the sizes where there are none."""
        return [dict(row) for row in self.raw.get("operations") or self.raw.get("sizes", [])]


def inspect(source: Source, **options: Any) -> Inspection:
    """What is in a recording: events, sizes, peak; with `by="site", at="peak"` which call sites
    hold memory."""
    return _answer(Inspection, "inspect", source, options)


# ---- replay


@dataclass(frozen=True)
class Run:
    """A recording or workload under one strategy."""

    workload: str
    strategy: str
    status: str
    peak_allocated_bytes: Optional[int] = None
    peak_reserved_bytes: Optional[int] = None
    peak_device_used_bytes: Optional[int] = None
    live_peak_bytes: Optional[int] = None
    fragmentation_share: Optional[float] = None
    limit_bytes: Optional[int] = None
    ooms: Optional[int] = None
    oom_step: Optional[int] = None
    oom_cause: Optional[str] = None
    retries: Optional[int] = None
    driver_calls: Optional[int] = None
    driver_ns: Optional[int] = None
    reason: str = ""


@dataclass(frozen=True)
class Replay(Answer):
    """Recordings or workloads under several strategies."""

    runs: Tuple[Run, ...] = ()

    def _table(self) -> List[Dict[str, Any]]:
        return [dict(row) for row in self.raw.get("rows", [])]


def replay(
    source: Source, strategy: Union[None, str, Sequence[str]] = None, **options: Any
) -> Replay:
    """Runs a recording or workload under allocator strategies. `oomph list strategies` names
    them."""
    with _Arguments(source, {"strategy": strategy, **options}) as arguments:
        document, output = _ask("replay", arguments)
    runs = _fill_all(Run, document["rows"])
    return Replay(
        source=runs[0].workload if runs else "",
        raw=document,
        text=output.stdout.rstrip(),
        exit_code=output.exit_code,
        others=(),
        runs=runs,
    )


# ---- rehearse


@dataclass(frozen=True)
class Rehearsal(Answer):
    """A program that ran without a GPU. With several cards or variants the fields are those of the
    first."""

    # "fits", "does_not_fit", "failed" ...
    verdict: str = ""
    card: str = ""
    total_bytes: Optional[int] = None
    limit_bytes: Optional[int] = None
    peak_allocated_bytes: Optional[int] = None
    peak_reserved_bytes: Optional[int] = None
    peak_card_bytes: Optional[int] = None
    context_bytes: Optional[int] = None
    steps: Optional[int] = None
    settled_after: Optional[int] = None
    # The largest value that fits, with `largest`.
    value: Optional[int] = None
    variant: Optional[str] = None
    failure: Optional[str] = None
    recordings: Sequence[str] = field(default=(), repr=False)
    largest_recording: Optional[str] = None
    oom: Any = field(default=None, repr=False)
    torch: Optional[str] = None
    wall_seconds: Optional[float] = None
    # What the program printed.
    output: str = field(default="", repr=False, compare=False)

    @property
    def fits(self) -> bool:
        """Whether it came to its end on every card, in every variant."""
        return all(one.verdict == "fits" for one in self.each)

    def advise(self, **options: Any) -> Advice:
        """What `oomph advise` says about its recording."""
        if self.largest_recording is None:
            raise OomphError("this rehearsal has no recording")
        return advise(self.largest_recording, **options)

    def _table(self) -> List[Dict[str, Any]]:
        return [dict(one.raw) for one in self.each]


def rehearse(
    command: Union[str, Sequence[str], Callable[..., Any]],
    *,
    card: Union[str, Sequence[str]] = "h200",
    largest: Union[None, str, Mapping[str, Tuple[int, int]]] = None,
    **options: Any,
) -> Rehearsal:
    """Runs a program without a GPU, and tells whether it fits on a card. Its own failure is a
    verdict, not an exception.

    command: a list of words, a line as in a shell, or a function. The function runs in a new
        Python: it must be at the top level of a module or script, whose own work is behind `if
        __name__ == "__main__"`. It is called without arguments, or with the value of `largest` by
        its name.
    card: a size such as "24GiB", or a name such as "rtx4090"; several run one after the other.
    largest: `{"batch": (1, 256)}` finds the largest value of `{batch}` in the command that fits.
    """
    if isinstance(largest, Mapping):
        for name, bounds in largest.items():
            if not isinstance(bounds, (list, tuple)) or len(bounds) != 2:
                raise ValueError(
                    f"largest: {name}={bounds!r} is not a range; write it like {{{name!r}: (1, 256)}}"
                )
        largest = ",".join(f"{name}={low}..{high}" for name, (low, high) in largest.items())
    if callable(command):
        words = _command_of(command, largest)
    elif isinstance(command, str):
        import shlex

        words = shlex.split(command)
    else:
        words = [os.fspath(word) for word in command]
    if not words:
        raise ValueError('the command is empty; write it like "python train.py"')
    cards = card if isinstance(card, str) else ",".join(card)
    if not cards:
        raise ValueError('there is no card; write it like "24GiB" or "rtx4090"')
    flags = _flags({"card": cards, "largest": largest, **options})
    # Every exit code may be the program's own.
    document, output = _ask(
        "rehearse", ["--answer-only", *flags, "--", *words], verdicts=range(-64, 256)
    )
    rows: List[Dict[str, Any]] = document["rows"]
    source = command.__qualname__ if callable(command) else " ".join(words)
    every = tuple(
        dataclasses.replace(Rehearsal._make(row, output), source=source, output=output.stderr)
        for row in rows
    )
    return every[0] if len(every) == 1 else dataclasses.replace(every[0], others=every)


def _last_error(stderr: str) -> str:
    """The error of the program `oomph`, after whatever the rehearsed program printed."""
    place = stderr.rfind("\nerror: ") + 1
    return error_message(stderr[place:]) or "the program gave no answer"


# The function's module is run under another name, so that its `if __name__ == "__main__"` does not
# begin again.
_CALL_IN_SCRIPT = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "function = runpy.run_path(sys.argv[2], run_name='__rehearsal__')[sys.argv[3]]; "
    "function(**dict((name, int(value)) for name, value in (word.split('=') for word in sys.argv[4:])))"
)
_CALL_IN_MODULE = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "function = getattr(importlib.import_module(sys.argv[2]), sys.argv[3]); "
    "function(**dict((name, int(value)) for name, value in (word.split('=') for word in sys.argv[4:])))"
)


def _command_of(function: Callable[..., Any], largest: Optional[str]) -> List[str]:
    """The command that calls a function in a new Python."""
    if os.environ.get("OOMPH_REHEARSE_FOLDER"):
        raise OomphError(
            "this is a rehearsal already: the script calls rehearse() when it is imported; "
            'put that behind `if __name__ == "__main__":`'
        )
    name = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", None)
    if (
        not name.isidentifier()
        or module is None
        or getattr(sys.modules.get(module), name, None) is not function
    ):
        raise OomphError(
            f"{name or function!r} cannot be called in a new Python: it must be a function at the top level of a module. "
            "Write it to a file and import it from there"
        )
    values = [
        f"{part.split('=')[0]}={{{part.split('=')[0]}}}"
        for part in (largest or "").split(",")
        if part
    ]
    paths = json.dumps([os.path.abspath(path) for path in sys.path])
    if module != "__main__":
        return [sys.executable, "-c", _CALL_IN_MODULE, paths, module, name, *values]
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or not os.path.isfile(file):
        raise OomphError(
            f"{name} was defined in a notebook or console: write it to a file and import it from there"
        )
    return [sys.executable, "-c", _CALL_IN_SCRIPT, paths, os.path.abspath(file), name, *values]


# ---- running the program


def _flags(options: Mapping[str, Any]) -> List[str]:
    """Keyword arguments as options: `device_index=1` is `--device-index 1`, a list repeats the
    option."""
    words: List[str] = []
    for name, value in options.items():
        flag = "--" + name.rstrip("_").replace("_", "-")
        if flag == "--format":
            raise TypeError("the format is JSON; print() shows the text")
        if isinstance(value, Mapping):
            value = [f"{key}={one}" for key, one in value.items()]
        if value is True:
            words.append(flag)
        elif isinstance(value, (list, tuple)):
            for one in value:
                words += [flag, str(one)]
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words


class _Arguments:
    """The arguments of a call. A snapshot lies in a temporary file for as long as the program
    runs."""

    def __init__(self, source: Source, options: Mapping[str, Any]) -> None:
        self.source = source
        self.options = options
        self.folder: Any = None

    def __enter__(self) -> List[str]:
        flags = _flags(self.options)
        if isinstance(self.source, Mapping):
            import pickle
            import tempfile

            self.folder = tempfile.TemporaryDirectory(prefix="oomph-")
            path = os.path.join(self.folder.name, "snapshot.pickle")
            with open(path, "wb") as file:
                pickle.dump(dict(self.source), file, protocol=4)
            return [*flags, path]
        try:
            many = (
                [self.source] if isinstance(self.source, (str, os.PathLike)) else list(self.source)
            )
            paths = [os.fspath(one) for one in many]
        except TypeError:
            raise TypeError(
                f"{self.source!r} is not a source: pass a path, several paths, or a snapshot"
            ) from None
        if not paths:
            raise ValueError("there is no source: pass a path, several paths, or a snapshot")
        return [*flags, "--", *paths]

    def __exit__(self, *error: object) -> None:
        if self.folder is not None:
            self.folder.cleanup()


def _ask(
    command: str, arguments: Sequence[str], verdicts: Sequence[int] = VERDICTS
) -> Tuple[Dict[str, Any], "Output"]:
    """Runs the program for its text, and for its JSON in a file."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="oomph-") as folder:
        path = os.path.join(folder, "answer.json")
        output = run([command, "--export-json", path, *arguments], verdicts)
        try:
            with open(path, encoding="utf-8") as file:
                document: Dict[str, Any] = json.load(file)
        except (OSError, ValueError):
            raise OomphError(_last_error(output.stderr), output.exit_code) from None
        return document, output


def _answer(kind: Type[A], command: str, source: Source, options: Mapping[str, Any]) -> A:
    with _Arguments(source, options) as arguments:
        document, output = _ask(command, arguments)
    rows: List[Dict[str, Any]] = document["rows"]
    worst = 0
    if "figure" in document:
        # One row per rank, with the answers for its devices.
        ranks = [str(row.get("rank")) for row in rows]
        worst = ranks.index(str(document["worst"])) if document.get("worst") is not None else 0
        places = [sum(len(row["answers"]) for row in rows[:place]) for place in range(len(rows))]
        rows, worst = [one for row in rows for one in row["answers"]], places[worst]
    elif command == "advise":
        worst = max(range(len(rows)), key=lambda place: rows[place].get("needed_now_bytes") or 0)
    every = tuple(kind._make(row, output) for row in rows)
    return every[worst] if len(every) == 1 else dataclasses.replace(every[worst], others=every)
