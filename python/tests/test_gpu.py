"""The package on a real GPU: recording, advice, allocator, pytest plugin, Trainer callback."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import shadow

import oomph


def has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None or os.environ.get("OOMPH_REHEARSE_FOLDER"):
        return False
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code]).returncode == 0


pytestmark = pytest.mark.skipif(not has_gpu(), reason="there is no GPU, or no PyTorch for it")


def run(program: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    (folder / "program.py").write_text(program, encoding="utf-8")
    return shadow.run([sys.executable, "program.py"], folder, shadow.environment())


OOM_UNDER_A_FRACTION = """
import oomph
oomph.record("mem")
import torch
assert not torch.cuda.is_initialized()
torch.cuda.set_per_process_memory_fraction(0.05)
kept = []
for size in range(40, 4000, 8):
    kept.append(torch.empty(size << 20, dtype=torch.uint8, device="cuda"))
    if size % 24 == 0:
        del kept[0]
"""


def test_oom_is_recorded_with_its_limit_and_reproduced(tmp_path: Path) -> None:
    done = run(OOM_UNDER_A_FRACTION, tmp_path)
    assert done.returncode == 1 and "OutOfMemoryError" in done.stdout
    assert "oomph: next: oomph advise mem/rank0.pickle" in done.stdout
    facts = json.loads((tmp_path / "mem" / "rank0.json").read_text())
    (device,) = facts["devices"]
    assert facts["reason"] == "oom" and facts["driver"] and facts["out_of_memory"]
    assert device["limit_bytes"] == int(0.05 * device["total_bytes"])
    assert device["process_bytes"] is None or device["process_bytes"] > device["reserved_bytes"]
    recording = tmp_path / "mem" / "rank0.pickle"
    verified = shadow.run([shadow.binary(), "verify", str(recording)], tmp_path)
    assert verified.returncode == 0, verified.stdout
    advice = oomph.advise(recording)
    assert advice.confidence is not None and advice.confidence.verdict == "exact"
    limit = advice.raw["recorded_limit"]
    assert limit["bytes"] == device["limit_bytes"] and limit["inferred"] is False


def test_recordings_begin_and_end_with_their_blocks(tmp_path: Path) -> None:
    done = run(
        """
import oomph, pickle, torch
before = torch.empty(1 << 20, device="cuda")
with oomph.record("mem") as first:
    inside = torch.empty(1 << 20, device="cuda")
outside = torch.empty(1 << 22, device="cuda")
with oomph.record("mem") as second:
    later = torch.empty(1 << 21, device="cuda")
for recorder in (first, second):
    snapshot = pickle.load(open(recorder.path, "rb"))
    sizes = [entry["size"] for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"]
    print("sizes", sizes)
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stdout
    assert f"sizes [{4 << 20}]" in done.stdout and f"sizes [{8 << 20}]" in done.stdout


def test_async_backend_is_said(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import torch; torch.empty(1 << 20, device='cuda')")
    variables = {**shadow.environment(), "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}
    command = [sys.executable, "-m", "oomph", "record", "plain.py"]
    done = shadow.run(command, tmp_path, variables)
    assert done.returncode == 0 and "cudaMallocAsync" in done.stdout
    assert not list(tmp_path.glob("mem/*"))


def test_allocator_trains_and_keeps_its_limit(tmp_path: Path) -> None:
    done = run(
        """
import oomph
oomph.use_allocator("oomph", limit="4GiB")
import torch
torch.manual_seed(0)
layers = [torch.nn.Linear(1024, 1024) for _ in range(8)]
model = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(model.parameters())
side = torch.cuda.Stream()
for step in range(20):
    loss = model(torch.randn(512 + 64 * step, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.cuda.stream(side):
        copy = loss.detach() * 2
        loss.record_stream(side)
torch.cuda.synchronize()
print("loss", float(loss) > 0)
torch.cuda.empty_cache()
try:
    torch.empty(5 << 30, dtype=torch.uint8, device="cuda")
except RuntimeError as error:
    print("refused")
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stdout
    assert "loss True" in done.stdout and "refused" in done.stdout
    assert "oomph: oomph on device 0" in done.stdout


TESTED = """
import pytest
import torch

kept = []


@pytest.mark.gpu_memory_limit("64MiB")
def test_peak():
    torch.zeros(100 << 20, dtype=torch.uint8, device="cuda")


@pytest.mark.gpu_leaks(max_growth="1MiB")
def test_leak():
    kept.append(torch.zeros(4 << 20, dtype=torch.uint8, device="cuda"))


@pytest.mark.gpu_memory_limit("1GiB")
@pytest.mark.gpu_leaks(max_growth="1MiB")
def test_sound():
    assert float(torch.ones(1000, device="cuda").sum()) == 1000
"""


def test_pytest_plugin(tmp_path: Path) -> None:
    (tmp_path / "test_model.py").write_text(TESTED)
    command = [sys.executable, "-m", "pytest", "-p", "oomph.pytest_plugin", "test_model.py"]
    done = shadow.run(command, tmp_path, shadow.environment())
    assert "2 failed, 1 passed" in done.stdout, done.stdout
    assert "100 MiB allocated at the peak on device 0; the limit is 64.0 MiB" in done.stdout
    assert "each run leaves 4.00 MiB allocated" in done.stdout


def test_trainer_callback_advises_after_an_oom(tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    done = run(
        """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from oomph.transformers import MemoryCallback

callback = MemoryCallback("mem")
torch.cuda.set_per_process_memory_fraction(0.05)
model = GPT2LMHeadModel(GPT2Config(n_layer=6))
data = [{"input_ids": [1] * 512, "labels": [1] * 512} for _ in range(512)]
arguments = TrainingArguments("out", per_device_train_batch_size=32, max_steps=4, report_to=[])
Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback]).train()
""",
        tmp_path,
    )
    assert done.returncode == 1, done.stdout
    assert "rank0.pickle: your own memory limit refused this request" in done.stdout, done.stdout
