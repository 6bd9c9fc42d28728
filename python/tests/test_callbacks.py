"""The callbacks: when they record and advise, and real Trainers on the shadow GPU."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, List, Optional, Type

import pytest
import shadow

from oomph import training
from oomph.training import TrainingRecorder


class FakeRecorder:
    """A recorder that writes at the end of its block, as the real one does."""

    def __init__(self, folder: Path, log: List[str]) -> None:
        self.folder = folder
        self.log = log
        self.path: Optional[Path] = None
        self.ran_out = False

    def __enter__(self) -> "FakeRecorder":
        self.log.append("record")
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.write()

    def write(self) -> None:
        self.log.append("write")
        self.path = self.folder / "rank0.pickle"

    def advise(self) -> str:
        self.log.append("advise")
        return "the advice"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> List[str]:
    found: List[str] = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(training, "record", lambda folder, last: FakeRecorder(tmp_path, found))
    return found


def train(recorder: TrainingRecorder, log: List[str], steps: int) -> None:
    recorder.begin()
    for step in range(steps):
        recorder.step_begins()
        log.append(f"step {step}")
        recorder.step_ends()
    recorder.end()


def test_whole_training_is_recorded(log: List[str], capsys: pytest.CaptureFixture[str]) -> None:
    train(TrainingRecorder("mem", None, True, None), log, 2)
    assert log == ["record", "step 0", "step 1", "write", "advise"]
    assert capsys.readouterr().err == "the advice\n"


def test_steps_are_recorded_once_in_each_training(log: List[str]) -> None:
    recorder = TrainingRecorder("mem", (1, 3), True, None)
    once = ["step 0", "record", "step 1", "step 2", "write", "advise", "step 3"]
    train(recorder, log, 4)
    assert log == once
    train(recorder, log, 4)
    assert log == once * 2


def test_training_that_ends_before_the_last_step_is_written(log: List[str]) -> None:
    train(TrainingRecorder("mem", (1, 9), True, None), log, 2)
    assert log == ["step 0", "record", "step 1", "write", "advise"]


def test_only_the_first_rank_advises(log: List[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    train(TrainingRecorder("mem", None, True, None), log, 1)
    assert log == ["record", "step 0", "write"]


def test_advice_can_be_switched_off(log: List[str]) -> None:
    train(TrainingRecorder("mem", None, False, None), log, 1)
    assert log == ["record", "step 0", "write"]


def test_failed_advice_does_not_end_the_training(
    log: List[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: FakeRecorder) -> str:
        raise RuntimeError("no program")

    monkeypatch.setattr(FakeRecorder, "advise", fail)
    train(TrainingRecorder("mem", None, True, None), log, 1)
    assert capsys.readouterr().err == "oomph: there is no advice: no program\n"


def test_oom_is_known_from_the_recorder(log: List[str]) -> None:
    recorder = TrainingRecorder("mem", None, True, None)
    assert not recorder.ran_out
    recorder.begin()
    fake: Any = recorder.recorder
    assert not recorder.ran_out
    fake.ran_out = True
    assert recorder.ran_out


@pytest.mark.parametrize("steps", [(3, 3), (-1, 2), (5, 2)])
def test_wrong_steps_are_refused(steps: Any) -> None:
    with pytest.raises(ValueError, match=r"write \(start, stop\)"):
        TrainingRecorder("mem", steps, True, None)


HUGGING_FACE = (
    shadow.RECORDER_IS_OFF
    + """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from oomph.transformers import MemoryCallback

class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        text = torch.arange(128)
        return {"input_ids": text, "labels": text}

def train(batch, callback):
    config = GPT2Config(n_layer=2, n_embd=512, n_head=4, vocab_size=1000, n_positions=128)
    settings = TrainingArguments(
        "out", max_steps=4, per_device_train_batch_size=batch, save_strategy="no", report_to=[],
        disable_tqdm=True,
    )
    model = GPT2LMHeadModel(config)
    Trainer(model=model, args=settings, train_dataset=Texts(), callbacks=[callback]).train()

train(2, MemoryCallback("some", steps=(1, 3)))
print("the first training has ended", flush=True)
train(512, MemoryCallback("all"))
"""
)

LIGHTNING = (
    shadow.RECORDER_IS_OFF
    + """
import lightning.pytorch as lightning
from oomph.lightning import MemoryCallback

class Network(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)])

    def training_step(self, batch, index):
        return self.layers(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

def train(batch, callback):
    data = torch.utils.data.DataLoader(torch.zeros(4 * batch, 1024), batch_size=batch)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
    )
    trainer.fit(Network(), data)

train(2, MemoryCallback("some", steps=(1, 3)))
print("the first training has ended", flush=True)
train(1 << 17, MemoryCallback("all"))
"""
)


def check_two_trainings(output: str, folder: Path, advice_is_last: bool) -> None:
    """The first records two steps. The second runs out of memory, and the exception goes on."""
    first, _, second = output.partition("the first training has ended")
    assert "rank0.pickle: " in first and "\n  OOM  " not in first, output
    assert json.loads((folder / "some" / "rank0.json").read_text())["out_of_memory"] is None
    with open(folder / "some" / "rank0.pickle", "rb") as file:
        notes = pickle.load(file).get("external_annotations")
    # PyTorch before 2.5 does not mark the steps of its optimizers.
    assert notes is not None or shadow.torch_release() < (2, 5)
    marks = [note["name"] for note in notes or () if note["stage"] == "START"]
    assert notes is None or sum("Optimizer.step" in name for name in marks) == 2
    assert "OutOfMemoryError: CUDA out of memory" in second
    assert "\n  OOM  " in second and "\n  held by  " in second
    assert json.loads((folder / "all" / "rank0.json").read_text())["reason"] == "oom"
    assert (second.index("\n  OOM  ") > second.index("OutOfMemoryError:")) == advice_is_last


def test_hugging_face(tmp_path: Path) -> None:
    shadow.skip_before((2, 6), "transformers 5.22")
    ran = shadow.rehearse(HUGGING_FACE, tmp_path, "2GiB", shadow.hf_site("transformers"))
    assert ran.returncode == 108, ran.stdout
    check_two_trainings(ran.stdout, tmp_path, advice_is_last=True)


def test_lightning(tmp_path: Path) -> None:
    shadow.skip_before((2, 1), "lightning 2.6")
    ran = shadow.rehearse(LIGHTNING, tmp_path, "2GiB", shadow.hf_site("lightning"))
    assert ran.returncode == 108, ran.stdout
    check_two_trainings(ran.stdout, tmp_path, advice_is_last=False)


def test_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "oomph.transformers", raising=False)
    with pytest.raises(ImportError, match="needs the package transformers"):
        importlib.import_module("oomph.transformers")


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_has_two_names(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback is of the package that the program has imported."""

    class Callback:
        pass

    names = ("lightning", "lightning.pytorch", "pytorch_lightning")
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    loaded: Any = ModuleType(package)
    loaded.Callback = Callback
    monkeypatch.setitem(sys.modules, package, loaded)
    monkeypatch.delitem(sys.modules, "oomph.lightning", raising=False)
    assert issubclass(importlib.import_module("oomph.lightning").MemoryCallback, Callback)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "oomph.lightning")
    with pytest.raises(ImportError, match="needs the package lightning or pytorch_lightning"):
        importlib.import_module("oomph.lightning")
