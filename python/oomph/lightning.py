"""A callback for the Trainer of Lightning.

from oomph.lightning import MemoryCallback

trainer = Trainer(..., callbacks=[MemoryCallback("mem")])
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Optional, Tuple, Union

from .training import LAST_EVENTS, TrainingRecorder


def _callback_class() -> Any:
    """That of the package which the program uses: `lightning` or the older `pytorch_lightning`."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    names.sort(key=lambda name: name not in sys.modules)
    for name in names:
        try:
            return importlib.import_module(name).Callback
        except ModuleNotFoundError as error:
            missing = error
    raise ImportError(
        f"oomph.lightning needs the package lightning or pytorch_lightning: {missing}"
    )


_Callback: Any = _callback_class()


class MemoryCallback(_Callback):  # type: ignore[misc]
    """Records GPU memory while the Trainer trains, and prints what `oomph advise` says about it.

    folder: where `rank0.pickle` is written. Every rank writes its own file.
    steps: (start, stop) records the batches from `start` to `stop - 1`, counted from 0; otherwise
        all are recorded.
    advise: print the advice when the recording ends, or at an OOM.
    last: keep only this many events.
    """

    def __init__(
        self,
        folder: Union[str, "os.PathLike[str]"] = "mem",
        steps: Optional[Tuple[int, int]] = None,
        advise: bool = True,
        last: Optional[int] = LAST_EVENTS,
    ) -> None:
        super().__init__()
        self._training = TrainingRecorder(folder, steps, advise, last)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before the model is moved to the GPU."""
        if stage == "fit":
            self._training.begin()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._training.step_begins()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._training.step_ends()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._training.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._training.ran_out:
            self._training.end()
        else:
            self._training.close()
