#!/usr/bin/env python3
"""Trains a small GPT under PyTorch's native allocator and under oomph's strategies, and compares.

    python3 train.py --library liboomph.so --steps 20 --json training.json
    python3 train.py --library liboomph.so --strategy oomph --strategy caching --layers 24 --width 1024 --heads 16

Every allocator runs in its own process, because PyTorch selects one before its first allocation and keeps it. The same
seed and deterministic algorithms make the losses comparable bit for bit: another allocator changes addresses only, so any
difference means that memory was handed out twice or too early. Each batch is copied on a side stream and used on the main
one, so that record_stream is needed. Exits with status 1 if losses differ or a run fails.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

STRATEGIES = ["oomph", "caching", "caching:expandable_segments:True", "pool", "stitch", "async"]
MIB = 1 << 20


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="target/release/liboomph.so", help="oomph's shared library")
    parser.add_argument("--strategy", action="append", help="may be repeated; default: " + " ".join(STRATEGIES))
    parser.add_argument("--json", help="a file for everything that was measured")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=50257)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--variable", action="store_true", help="another sequence length each step")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    return parser.parse_args()


def plug_in(library):
    """Replaces PyTorch's allocator by oomph, including the hooks."""
    import torch

    plugged = torch.cuda.memory.CUDAPluggableAllocator(library, "oomph_alloc", "oomph_free")
    functions = ctypes.CDLL(library)
    address = lambda name: ctypes.cast(getattr(functions, name), ctypes.c_void_p).value
    hooks = plugged.allocator()
    hooks.set_record_stream_fn(address("oomph_record_stream"))
    hooks.set_reset_fn(address("oomph_reset"))
    hooks.set_memory_fraction_fn(address("oomph_memory_fraction"))
    torch.cuda.memory.change_current_allocator(plugged)


def build_model(options):
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.before_attention = nn.LayerNorm(options.width)
            self.queries_keys_values = nn.Linear(options.width, 3 * options.width)
            self.projection = nn.Linear(options.width, options.width)
            self.before_mlp = nn.LayerNorm(options.width)
            self.mlp = nn.Sequential(
                nn.Linear(options.width, 4 * options.width), nn.ReLU(), nn.Linear(4 * options.width, options.width)
            )

        def forward(self, x):
            batch, length, width = x.shape
            parts = self.queries_keys_values(self.before_attention(x)).chunk(3, dim=-1)
            heads = [part.view(batch, length, options.heads, -1).transpose(1, 2) for part in parts]
            mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + self.mlp(self.before_mlp(x))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(options.vocab, options.width)
            self.positions = nn.Embedding(options.context, options.width)
            self.layers = nn.Sequential(*[Layer() for _ in range(options.layers)])
            self.norm = nn.LayerNorm(options.width)
            self.head = nn.Linear(options.width, options.vocab, bias=False)

        def forward(self, tokens, targets):
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            x = self.layers(self.tokens(tokens) + self.positions(positions))
            logits = self.head(self.norm(x))
            return nn.functional.cross_entropy(logits.view(-1, options.vocab), targets.reshape(-1))

    return Gpt()


def train(options):
    """Trains in this process and prints the result as one line of JSON."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    native = options.run == "native"
    if not native:
        plug_in(options.library)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    random = torch.Generator().manual_seed(2)
    model = build_model(options).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    side = torch.cuda.Stream()

    def next_batch():
        length = options.context
        if options.variable:
            length = int(torch.randint(64, options.context + 1, (1,), generator=random))
        host = torch.randint(0, options.vocab, (options.batch, length + 1), generator=random).pin_memory()
        with torch.cuda.stream(side):
            batch = host.to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        batch.record_stream(torch.cuda.current_stream())
        return batch, host

    losses, milliseconds = [], []
    with sdpa_kernel(SDPBackend.MATH):
        for _ in range(options.steps):
            torch.cuda.synchronize()
            began = time.perf_counter()
            batch, host = next_batch()
            loss = model(batch[:, :-1], batch[:, 1:])
            del batch
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            del loss
            torch.cuda.synchronize()
            milliseconds.append(1e3 * (time.perf_counter() - began))
    seen = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "losses": losses, "step_ms": milliseconds}
    if native:
        seen["peak_reserved"] = torch.cuda.max_memory_reserved()
        seen["peak_allocated"] = torch.cuda.max_memory_allocated()
    print(json.dumps(seen))


def run_alone(allocator):
    """Trains under one allocator in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        books = os.path.join(folder, "statistics.json")
        environment = dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8", OOMPH_STATS=books, OOMPH_OUT_OF_MEMORY="throw")
        if allocator != "native":
            environment["OOMPH_STRATEGY"] = allocator
        command = [sys.executable, *sys.argv, "--run", allocator]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        said = (ended.stderr.strip().splitlines() or ["nothing"])[-1]
        if ended.returncode != 0:
            return {"allocator": allocator, "failure": f"status {ended.returncode}: {said}"}
        seen = dict(json.loads(ended.stdout.splitlines()[-1]), allocator=allocator)
        if allocator != "native":
            with open(books) as file:
                seen["statistics"] = json.load(file)
            peak = seen["statistics"]["devices"][0]["stats"]["peak"]
            seen["peak_reserved"], seen["peak_allocated"] = peak["reserved"], peak["allocated"]
            if ended.stderr.strip():
                seen["said"] = ended.stderr.strip()
        return seen


def table(runs):
    """Compares the runs with the first one."""
    base = runs[0]
    rows = [("allocator", "losses", "last loss", "reserved MiB", "allocated MiB", "step ms", "against native")]
    for run in runs:
        if "failure" in run:
            rows.append((run["allocator"], run["failure"], "", "", "", "", ""))
            continue
        step = run["median_step_ms"]
        ratio = f"{step / base['median_step_ms']:.3f}" if "median_step_ms" in base else ""
        sizes = (f"{run[key] / MIB:.0f}" for key in ("peak_reserved", "peak_allocated"))
        rows.append((run["allocator"], run["verdict"], f"{run['losses'][-1]:.9g}", *sizes, f"{step:.2f}", ratio))
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def main():
    options = arguments()
    if options.run:
        return train(options)
    options.library = os.path.abspath(options.library)
    sys.argv += ["--library", options.library]
    runs = []
    for allocator in ["native", *(options.strategy or STRATEGIES)]:
        print(f"training under {allocator} ...", file=sys.stderr, flush=True)
        run = run_alone(allocator)
        if "failure" not in run:
            # Warm-up: the first steps fill caches and select kernels.
            run["median_step_ms"] = statistics.median(run["step_ms"][min(3, len(run["step_ms"]) - 1) :])
            same = runs and "losses" in runs[0] and run["losses"] == runs[0]["losses"]
            run["verdict"] = "native" if allocator == "native" else "equal" if same else "DIFFERENT"
        runs.append(run)
    print(table(runs))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"schema": 1, "options": vars(options), "runs": runs}, file, indent=1)
    return 0 if all(run.get("verdict") in ("native", "equal") for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
