"""What recording costs on a GPU: the time of a training step without a recorder, with PyTorch's own and with oomph's.

usage: PYTHONPATH=python python3 tools/recording/cost.py [ROUNDS]
Each round times all three, in an order that changes, so that clocks and temperature are shared. Both recorders keep Python
stacks.
"""

import statistics
import sys
import tempfile
import time

import torch

import oomph

STEPS = 15
KINDS = ("none", "torch", "oomph")


def build():
    torch.manual_seed(0)
    layer = lambda: torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, norm_first=True)
    layers = torch.nn.ModuleList([layer() for _ in range(12)]).cuda()
    optimizer = torch.optim.AdamW(layers.parameters(), fused=True)

    def step():
        x = torch.randn(8, 512, 1024, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            for layer in layers:
                x = layer(x)
            loss = x.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step):
    times = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return times


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    folder = tempfile.mkdtemp()
    history = torch.cuda.memory._record_memory_history
    step = build()
    for _ in range(10):
        step()
    times = {kind: [] for kind in KINDS}
    ratios = []
    for number in range(rounds):
        medians = {}
        for place in range(3):
            kind = KINDS[(number + place) % 3]
            if kind == "torch":
                history(context="alloc", stacks="python")
            recorder = oomph.record(folder) if kind == "oomph" else None
            these = timed(step)
            if kind == "torch":
                history(None)
            if recorder is not None:
                recorder.stop()
            times[kind] += these
            medians[kind] = statistics.median(these)
        ratios.append(medians["oomph"] / medians["torch"])
    for kind in KINDS:
        print(f"{kind:6} median {statistics.median(times[kind]) * 1e3:.3f} ms")
    print(f"oomph over torch: median of {rounds} rounds {statistics.median(ratios):.4f}, from {min(ratios):.4f} to {max(ratios):.4f}")
    recorder = oomph.record(folder)
    for _ in range(20):
        step()
    began = time.perf_counter()
    path = recorder.save()
    print(f"written in {time.perf_counter() - began:.2f} s: {path.stat().st_size} bytes")


main()
