"""What `python -m oomph record` tells the processes that it records, by environment variables.

The folder of this file is in PYTHONPATH for its `sitecustomize.py`.
"""

from __future__ import annotations

import os
from typing import Dict, Optional

FOLDER = "OOMPH_RECORD_FOLDER"
SHOWN = "OOMPH_RECORD_SHOWN"
LAST = "OOMPH_RECORD_LAST"
STACKS = "OOMPH_RECORD_STACKS"
# The process that the user started. Only it says that nothing was recorded.
PROCESS = "OOMPH_RECORD_PROCESS"


def environment(folder: str, last: Optional[int], stacks: bool) -> Dict[str, str]:
    """The variables for a program that is recorded into a folder."""
    here = os.path.dirname(os.path.abspath(__file__))
    present = os.environ.get("PYTHONPATH", "")
    return {
        FOLDER: os.path.abspath(folder),
        SHOWN: folder,
        LAST: "" if last is None else str(last),
        STACKS: "1" if stacks else "0",
        PROCESS: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join([here, present]) if present else here,
    }


def start() -> None:
    """Begins to record in a process that `python -m oomph record` started, or in one of its
    children."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    from pathlib import Path

    from ..recording import Recorder, start as start_recorder

    last = os.environ.get(LAST)
    start_recorder(
        Recorder(
            Path(folder),
            shown=Path(os.environ.get(SHOWN) or folder),
            last=int(last) if last else None,
            stacks=os.environ.get(STACKS) != "0",
            is_child=os.environ.get(PROCESS) != str(os.getpid()),
        )
    )
