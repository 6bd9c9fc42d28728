"""`python -m oomph record train.py` records a program; any other command is one of the program
`oomph`."""

from __future__ import annotations

import os
import sys
from typing import List, Optional, Sequence

from .binary import OomphError, replace_process

USAGE = "python -m oomph record [--output DIR] [--last N] [--no-stacks] (PROGRAM | -m MODULE) [ARGUMENTS ...]"


def record(arguments: Sequence[str]) -> None:
    """Becomes Python with the program. It imports nothing of oomph itself; its `sitecustomize`
    does."""
    import argparse

    from .bootstrap import environment

    parser = argparse.ArgumentParser(
        prog="python -m oomph record",
        usage=USAGE,
        description="Runs a Python program unchanged, and writes what it allocates on the GPU when it ends, "
        "runs out of memory or gets SIGTERM. Processes that it starts write their own files.",
        epilog="Then: oomph advise DIR/rank0.pickle",
        # `--last` must not be taken for an option of the program, nor its options for ours.
        allow_abbrev=False,
    )
    parser.add_argument(
        "--output", metavar="DIR", default="mem", help="the folder of the recordings (default: mem)"
    )
    parser.add_argument(
        "--last", metavar="N", type=int, help="keep only the last N events (default: all)"
    )
    parser.add_argument(
        "--no-stacks", action="store_true", help="leave out Python stacks: call sites are unknown"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="the program and its arguments")
    options = parser.parse_args(arguments)
    program: List[str] = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        parser.error("the program is missing, as in: python -m oomph record train.py --batch 8")
    if options.last is not None and options.last < 1:
        parser.error(f"--last {options.last} would record nothing")
    if sys.flags.ignore_environment or sys.flags.no_site:
        parser.error("Python with -E, -I or -S does not load the recorder; start it without")
    try:
        os.makedirs(options.output, exist_ok=True)
    except OSError as error:
        parser.error(f"--output {options.output}: {error.strerror}")
    os.environ.update(environment(options.output, options.last, not options.no_stacks))
    command = [sys.executable, *_interpreter_flags(), *(["-m"] if options.module else []), *program]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)


def _interpreter_flags() -> List[str]:
    """The options of this Python, such as -O and -W, for the one that runs the program."""
    import subprocess

    flags: List[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    # -u has no flag of its own.
    return flags + (
        ["-u"] if sys.stdout is not None and getattr(sys.stdout, "write_through", False) else []
    )


def main(arguments: Optional[Sequence[str]] = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["record"]:
        record(arguments[1:])
    try:
        replace_process(arguments)
    except OomphError as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
