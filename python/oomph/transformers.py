"""A callback for the Trainer of Hugging Face.

from oomph.transformers import MemoryCallback

trainer = Trainer(..., callbacks=[MemoryCallback("mem")])
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Optional, Tuple, Union

from .training import LAST_EVENTS, TrainingRecorder

try:
    _TrainerCallback: Any = importlib.import_module("transformers").TrainerCallback
except ModuleNotFoundError as error:
    raise ImportError(f"oomph.transformers needs the package transformers: {error}") from error


class MemoryCallback(_TrainerCallback):  # type: ignore[misc]
    """Records GPU memory while the Trainer trains, and prints what `oomph advise` says about it.

    folder: where `rank0.pickle` is written. Every rank writes its own file.
    steps: (start, stop) records the steps from `start` to `stop - 1`, counted from 0; otherwise
        all are recorded.
    advise: print the advice when the recording ends; after an OOM, below the traceback.
    last: keep only this many events.

    Make it before the Trainer, which moves the model to the GPU, so that the weights have a call
    site.
    """

    def __init__(
        self,
        folder: Union[str, "os.PathLike[str]"] = "mem",
        steps: Optional[Tuple[int, int]] = None,
        advise: bool = True,
        last: Optional[int] = LAST_EVENTS,
    ) -> None:
        self._training = TrainingRecorder(folder, steps, advise, last)
        self._advise_after_exceptions()
        self._training.begin()

    def _advise_after_exceptions(self) -> None:
        """A Trainer tells its callbacks nothing about exceptions."""
        print_traceback = sys.excepthook

        def hook(*error: Any) -> None:
            print_traceback(*error)
            self._after_oom()

        sys.excepthook = hook
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        if shell is not None:
            # A notebook shows exceptions in its own way.
            shell.events.register("post_run_cell", lambda *_: self._after_oom())

    def _after_oom(self) -> None:
        if self._training.ran_out:
            self._training.end()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.begin()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.step_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.step_ends()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.end()
