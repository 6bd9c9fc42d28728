"""What the callbacks for Hugging Face and Lightning share: they record a training, then advise."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Optional, Tuple, Union

from .recording import Recorder, rank, record

# Half a million events are some ten to hundred steps, and at most 500 MB of host memory.
LAST_EVENTS = 500_000


class TrainingRecorder:
    """Records a training from its beginning to its end, or only some of its steps."""

    def __init__(
        self,
        folder: Union[str, "os.PathLike[str]"],
        steps: Optional[Tuple[int, int]],
        advise: bool,
        last: Optional[int],
    ) -> None:
        if steps is not None and not 0 <= steps[0] < steps[1]:
            raise ValueError(
                f"steps={steps!r}: write (start, stop), such as (2, 5) for the steps 2, 3 and 4"
            )
        self.folder = folder
        self.steps = steps
        self.last = last
        self.wants_advice = advise
        self.step = 0
        self.recorder: Optional[Recorder] = None
        self._stack = contextlib.ExitStack()

    def begin(self) -> None:
        """The training begins, or what comes before it."""
        self.step = 0
        if self.steps is None:
            self._start()

    def step_begins(self) -> None:
        if self.steps is not None and self.step == self.steps[0]:
            self._start()

    def step_ends(self) -> None:
        self.step += 1
        if self.steps is not None and self.step == self.steps[1]:
            self.end()

    def end(self) -> None:
        """Writes the recording, and prints the advice."""
        recorder = self.close()
        if recorder is not None and recorder.path is not None and self.wants_advice and rank() == 0:
            _print_advice(recorder)

    @property
    def ran_out(self) -> bool:
        """Whether memory ran out while it recorded."""
        return self.recorder is not None and self.recorder.ran_out

    def close(self) -> Optional[Recorder]:
        """Writes the recording; the recorder, if there is one that was not closed before."""
        recorder, self.recorder = self.recorder, None
        self._stack.close()
        return recorder

    def _start(self) -> None:
        if self.recorder is None:
            self.recorder = self._stack.enter_context(record(self.folder, last=self.last))


def _print_advice(recorder: Recorder) -> None:
    """An error must not end the training."""
    try:
        text = str(recorder.advise())
    except Exception as error:
        text = f"oomph: there is no advice: {error}"
    print(text, file=sys.stderr, flush=True)
