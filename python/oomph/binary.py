"""Finds the `oomph` program and runs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Iterator, NamedTuple, Optional, Sequence

BINARY_VARIABLE = "OOMPH_BINARY"
# Exit codes that are answers: it leaks, it does not fit, it cannot be told.
LEAKS = 105
DOES_NOT_FIT = 108
CANNOT_TELL = 109
VERDICTS = (LEAKS, DOES_NOT_FIT, CANNOT_TELL)

_PACKAGE = Path(__file__).resolve().parent


class OomphError(Exception):
    """An error of oomph: its message, and the exit code of the program if it was started."""

    def __init__(self, message: str, exit_code: Optional[int] = None) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


class Output(NamedTuple):
    """What one run of the program printed."""

    stdout: str
    stderr: str
    exit_code: int


def _candidates() -> Iterator[Path]:
    """Where installers put the program, the likeliest place first."""
    import site
    import sysconfig

    name = "oomph.exe" if os.name == "nt" else "oomph"
    yield Path(sysconfig.get_path("scripts")) / name
    # `pip install --user`.
    yield Path(site.getuserbase()) / "bin" / name
    # `pip install --target DIR` and `--prefix DIR`.
    yield _PACKAGE.parent / "bin" / name
    for parent in _PACKAGE.parents:
        if parent.name == "lib":
            yield parent.parent / "bin" / name
            break
    # The repository, after `cargo build --release`.
    if (_PACKAGE.parents[1] / "Cargo.toml").is_file():
        yield _PACKAGE.parents[1] / "target" / "release" / name


def find_binary() -> str:
    """The path of the program. `OOMPH_BINARY` overrides where it is looked for."""
    override = os.environ.get(BINARY_VARIABLE)
    if override:
        if not os.path.isfile(override):
            raise OomphError(f"{BINARY_VARIABLE}={override}: there is no such file")
        return override
    for path in _candidates():
        if path.is_file() and os.access(path, os.X_OK):
            return str(path)
    import shutil

    found = shutil.which("oomph")
    if found is None:
        raise OomphError(
            f"the program `oomph` is not installed beside this package ({_PACKAGE}); "
            f"reinstall it with pip, or set {BINARY_VARIABLE} to its path"
        )
    return found


def error_message(stderr: str) -> str:
    """The message of the program, without its prefix and without hints about its command line."""
    text = stderr.strip()
    for hint in ("\n\nUsage: ", "\n\nFor more information, try "):
        text = text.partition(hint)[0]
    return text[len("error: ") :] if text.startswith("error: ") else text


def run(arguments: Sequence[str], verdicts: Sequence[int] = VERDICTS) -> Output:
    """Runs the program. Exit codes other than 0 and those in `verdicts` raise `OomphError`."""
    import subprocess

    command = [find_binary(), *arguments]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise OomphError(f"{command[0]} cannot be started: {error}") from error
    if done.returncode != 0 and done.returncode not in verdicts:
        message = (
            error_message(done.stderr) or f"{command[0]} ended with exit code {done.returncode}"
        )
        raise OomphError(message, done.returncode)
    return Output(done.stdout, done.stderr, done.returncode)


def replace_process(arguments: Sequence[str]) -> None:
    """Becomes the program: for `python -m oomph`, so that signals, terminal and exit code are its
    own."""
    binary = find_binary()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(binary, [binary, *arguments])


def version() -> str:
    """The version of this package."""
    from importlib import metadata

    try:
        return metadata.version("oomph")
    except metadata.PackageNotFoundError:
        pass
    # The repository, where nothing is installed.
    try:
        lines = (_PACKAGE.parents[1] / "Cargo.toml").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    values = (line.split('"')[1] for line in lines if line.startswith('version = "'))
    return next(values, "unknown")
