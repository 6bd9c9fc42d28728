#!/usr/bin/env python3
"""Makes the recordings of workloads/recorded with snapshots.csv and per_step.csv, gpt_grid.csv, and step_timings.csv for the GPT of 355M.

    python3 recorded.py --list                        every recording with its command
    python3 recorded.py train_amp --record FILE       one program; FILE is PyTorch's memory snapshot
    python3 recorded.py --all DIR                     all recordings, each in a process of its own, compressed with xz; snapshots.csv and
                                                      per_step.csv get PyTorch's counters at the end and after every step
    python3 recorded.py --grid                        peaks of three sizes of the GPT with seven techniques, as CSV
    python3 recorded.py --times                       peaks and median steps of the GPT of 355M, as CSV

The reference model is a decoder with LayerNorm before each part, learned positions, fused causal attention, a ReLU MLP of four
times the width, a head that shares no weights, cross-entropy and AdamW. It is made on the CPU and moved. The history starts
before that. A name is RUN[.SETTING]; the setting is passed to the process in PYTORCH_CUDA_ALLOC_CONF.
"""

import argparse
import contextlib
import csv
import json
import lzma
import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """A program: what it trains, with which techniques and with which fault."""

    program: str = "gpt"
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocab: int = 50257
    context: int = 1024
    batch: int = 8
    steps: int = 6
    techniques: tuple = ()
    fault: str = ""
    shortest: int = 0
    stacks: bool = False
    fraction: float = 0.0


BASE = Run()
SMALL = replace(BASE, batch=2)
VARLEN = replace(BASE, batch=4, steps=24, shortest=64)

RUNS = {
    "train_base": BASE,
    "train_amp": replace(BASE, techniques=("amp",)),
    "train_ckpt": replace(BASE, techniques=("ckpt",)),
    "train_ckpt_amp": replace(BASE, techniques=("ckpt", "amp")),
    "train_halfbatch": replace(BASE, batch=4),
    "train_accum4": replace(BASE, techniques=("accum4",)),
    "train_zero_fill": replace(BASE, techniques=("zero_fill",)),
    "train_offload": replace(BASE, techniques=("offload",)),
    "train_inplace": replace(BASE, techniques=("inplace",)),
    "train_emptycache": replace(BASE, techniques=("empty_cache",)),
    "train_sgd": replace(BASE, techniques=("sgd",)),
    "leak_loss_graph": replace(SMALL, fault="loss_graph"),
    "leak_outputs": replace(SMALL, fault="outputs"),
    "leak_outputs_detached": replace(SMALL, fault="outputs_detached"),
    "leak_outputs_cpu": replace(SMALL, fault="outputs_cpu"),
    "leak_retain_graph": replace(SMALL, fault="retain_graph"),
    "leak_retain_rebound": replace(SMALL, fault="retain_rebound"),
    "leak_retain_twice": replace(SMALL, fault="retain_twice"),
    "leak_no_zero_grad": replace(SMALL, fault="no_zero_grad", steps=8),
    "leak_cycle": replace(SMALL, fault="cycle", steps=8),
    "val_no_grad": replace(SMALL, fault="val_no_grad"),
    "val_with_grad": replace(SMALL, fault="val_grad"),
    "val_keep_outputs": replace(SMALL, fault="val_keep"),
    "val_keep_no_grad": replace(SMALL, fault="val_keep_no_grad"),
    "varlen": VARLEN,
    "varlen_stack": replace(VARLEN, batch=2, steps=8, stacks=True),
    "streams": replace(BASE, program="streams"),
    "infer_kv": replace(BASE, program="infer_kv", batch=4, steps=96),
    "resnet_base": replace(BASE, program="resnet", batch=64),
    "resnet_amp": replace(BASE, program="resnet", batch=64, techniques=("amp",)),
    "oom_base": replace(BASE, fraction=0.06),
    "varlen_cap042": replace(VARLEN, fraction=0.042),
    "varlen_cap047": replace(VARLEN, fraction=0.047),
    "varlen_cap052": replace(VARLEN, fraction=0.052),
}

SETTINGS = {
    "": "",
    "exp": "expandable_segments:True",
    "split64": "max_split_size_mb:64",
    "round4": "roundup_power2_divisions:4",
    "gc": "garbage_collection_threshold:0.6",
    "exp_round": "expandable_segments:True,roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
}

WITH_ALL_SETTINGS = ("varlen", "train_base", "streams", "infer_kv")
CAPPED = ("varlen_cap042", "varlen_cap047", "varlen_cap052")


def recordings():
    """Every recording: its name, its program, and the setting of the allocator."""
    found = {}
    for name, run in RUNS.items():
        settings = SETTINGS if name in WITH_ALL_SETTINGS else ["", "exp", "split64", "gc"] if name in CAPPED else [""]
        for setting in settings:
            found[f"{name}.{setting}" if setting else name] = (run, SETTINGS[setting])
    # With another batch the same generator draws other lengths.
    found["varlen.seed2"] = (replace(VARLEN, batch=6, steps=40), "")
    return found


def make_gpt(run):
    """The reference model, on the CPU."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(run.width, 3 * run.width)
            self.out = nn.Linear(run.width, run.width)

        def forward(self, hidden):
            batch, length, width = hidden.shape
            split = [part.view(batch, length, run.heads, -1) for part in self.qkv(hidden).split(width, 2)]
            query, key, value = [part.transpose(1, 2) for part in split]
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            return self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1 = nn.LayerNorm(run.width)
            self.attention = Attention()
            self.norm2 = nn.LayerNorm(run.width)
            self.up = nn.Linear(run.width, 4 * run.width)
            self.down = nn.Linear(4 * run.width, run.width)
            self.activation = nn.ReLU(inplace="inplace" in run.techniques)

        def forward(self, hidden):
            hidden = hidden + self.attention(self.norm1(hidden))
            return hidden + self.down(self.activation(self.up(self.norm2(hidden))))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(run.vocab, run.width)
            self.positions = nn.Embedding(run.context, run.width)
            self.blocks = nn.ModuleList([Block() for _ in range(run.layers)])
            self.norm = nn.LayerNorm(run.width)
            self.head = nn.Linear(run.width, run.vocab, bias=False)

        def forward(self, tokens, target=None):
            hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                recomputed = "ckpt" in run.techniques
                hidden = checkpoint(block, hidden, use_reentrant=False) if recomputed else block(hidden)
            logits = self.head(self.norm(hidden))
            if target is None:
                return logits
            return nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), target.view(-1))

    return Gpt()


class Program:
    """A run in this process: its model, its optimizer, and what it keeps between steps."""

    def __init__(self, run):
        import torch

        self.torch, self.run, self.device = torch, run, torch.device("cuda:0")
        self.random = torch.Generator().manual_seed(1)
        self.kept, self.total, self.steps = [], 0, 0
        if run.program == "resnet":
            import torchvision

            self.model = torchvision.models.resnet50().to(self.device)
        else:
            self.model = make_gpt(run).to(self.device)
        kind = torch.optim.SGD if "sgd" in run.techniques else torch.optim.AdamW
        self.optimizer = None if run.program == "infer_kv" else kind(self.model.parameters(), lr=1e-4)
        self.side = torch.cuda.Stream() if run.program == "streams" else None

    def tokens(self, batch, length):
        shape = (batch, length)
        return self.torch.randint(0, self.run.vocab, shape, generator=self.random).to(self.device)

    def precision(self):
        torch = self.torch
        return torch.autocast("cuda", dtype=torch.bfloat16) if "amp" in self.run.techniques else contextlib.nullcontext()

    def step(self):
        if self.run.program == "infer_kv":
            self.answer()
        elif self.run.program == "resnet":
            self.train_images()
        elif self.run.fault.startswith("val"):
            self.validate()
        else:
            self.train()
        if "empty_cache" in self.run.techniques:
            self.torch.cuda.empty_cache()
        self.steps += 1

    def validate(self):
        """A forward pass; its input and its output live until the next ones, or for ever."""
        no_grad = self.run.fault.endswith("no_grad")
        with self.torch.no_grad() if no_grad else contextlib.nullcontext():
            self.batch = self.tokens(self.run.batch, self.run.context)
            self.output = self.model(self.batch)
            if self.run.fault.startswith("val_keep"):
                self.kept.append(self.output)

    def train(self):
        run, fault = self.run, self.run.fault
        parts = 4 if "accum4" in run.techniques else 1
        for _ in range(parts):
            length = run.context
            if run.shortest:
                length = int(self.torch.randint(run.shortest, run.context + 1, (1,), generator=self.random))
            self.batch = self.tokens(run.batch // parts, length)
            if self.side:
                self.work_beside()
            offload = "offload" in run.techniques
            saved = self.torch.autograd.graph.save_on_cpu(pin_memory=True) if offload else contextlib.nullcontext()
            with self.precision(), saved:
                self.loss = self.model(self.batch, self.batch)
            if fault == "loss_graph":
                self.total = self.total + self.loss
                continue
            self.keep_outputs()
            self.loss.backward(retain_graph=fault.startswith("retain"))
            if fault == "retain_twice":
                self.loss.backward(retain_graph=True)
            if fault == "retain_graph":
                self.kept.append(self.loss)
        if fault != "loss_graph":
            self.optimizer.step()
        if fault != "no_zero_grad":
            self.optimizer.zero_grad(set_to_none="zero_fill" not in run.techniques)

    def keep_outputs(self):
        """The faults that keep something of each step."""
        fault, model, batch = self.run.fault, self.model, self.batch
        if fault == "outputs":
            self.kept.append(model(batch))
        elif fault == "outputs_detached":
            self.kept.append(model(batch).clone().detach())
        elif fault == "outputs_cpu":
            self.kept.append(model(batch).detach().cpu())
        elif fault == "cycle":
            # Each step has a class of its own: a class is part of reference cycles, too, and the collector counts objects.
            class Node:
                pass

            node = Node()
            node.tensor = self.torch.empty(16 << 20, device=self.device)
            node.me = node

    def work_beside(self):
        """Two tensors of 16 MiB on a side stream, which also reads the batch."""
        torch = self.torch
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            first = torch.ones(4 << 20, device=self.device)
            second = first * 2
            self.batch.record_stream(self.side)
        del first, second

    def train_images(self):
        torch, batch = self.torch, self.run.batch
        images = torch.randn(batch, 3, 224, 224, generator=self.random).to(self.device)
        labels = torch.randint(0, 1000, (batch,), generator=self.random).to(self.device)
        with self.precision():
            loss = torch.nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def answer(self):
        """A forward pass of 64 tokens. A cache tensor of one to seven parts is added; beyond twelve, one in the middle goes."""
        torch, run = self.torch, self.run
        with torch.no_grad():
            self.batch = self.tokens(run.batch, 64)
            logits = self.model(self.batch)
            parts = self.steps % 7 + 1
            self.kept.append(torch.empty(2, run.batch, 64 * parts, run.width, device=self.device))
            if len(self.kept) > 12:
                self.kept.pop(self.steps * 5 % 7)
        del logits


LEVELS = ["allocated_bytes.all.current", "reserved_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.peak"]
LEVELS += ["requested_bytes.all.current", "inactive_split_bytes.all.current"]


def play(run, record):
    """Plays a run and returns what PyTorch counted; `record` is the file of the snapshot."""
    import torch

    torch.manual_seed(0)
    if run.fraction:
        torch.cuda.set_per_process_memory_fraction(run.fraction)
    torch.backends.cuda.matmul.allow_tf32 = "tf32" in run.techniques
    torch.cuda.init()
    torch.cuda.synchronize()
    if record:
        context = "all" if run.stacks else None
        torch.cuda.memory._record_memory_history(enabled="all", context=context, stacks="python", max_entries=4_000_000)
    times, levels, failure = [], [], None
    try:
        program = Program(run)
        for _ in range(run.steps):
            torch.cuda.synchronize()
            start = time.perf_counter()
            program.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            levels.append([torch.cuda.memory_stats()[name] for name in LEVELS])
    except torch.cuda.OutOfMemoryError as error:
        failure = str(error).split(". GPU")[0]
    stats, entries = torch.cuda.memory_stats(), 0
    if record:
        snapshot = torch.cuda.memory._snapshot()
        entries = len(snapshot["device_traces"][0])
        Path(record).write_bytes(pickle.dumps(snapshot, protocol=4))
    counted = sorted(times[2:]) or [0.0]
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "peak_allocated": stats["allocated_bytes.all.peak"],
        "peak_reserved": stats["reserved_bytes.all.peak"],
        "steady_allocated": stats["allocated_bytes.all.current"],
        "final_reserved": stats["reserved_bytes.all.current"],
        "final_segments": stats["segment.all.current"],
        "final_inactive_split": stats["inactive_split_bytes.all.current"],
        "alloc_retries": stats["num_alloc_retries"],
        "ooms": stats["num_ooms"],
        "trace_events": entries,
        "levels": levels,
        "median_step_ms": round(1e3 * counted[len(counted) // 2], 3),
        "oom": failure,
    }


def apart(arguments, settings=""):
    """Runs this script in a process of its own and returns its last line as JSON: peaks and history belong to a process."""
    environment = dict(os.environ, PYTORCH_CUDA_ALLOC_CONF=settings)
    if not settings:
        environment.pop("PYTORCH_CUDA_ALLOC_CONF")
    words = [sys.executable, __file__, *arguments]
    done = subprocess.run(words, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


SNAPSHOT_COLUMNS = ["peak_allocated", "peak_reserved", "steady_allocated", "final_reserved", "final_segments", "final_inactive_split"]
SNAPSHOT_COLUMNS += ["alloc_retries", "ooms", "trace_events"]


def note(folder, name, run, settings, counted):
    """Adds the row of a recording to snapshots.csv, and those of its steps to per_step.csv."""
    header = ["snapshot", "alloc_conf", "memory_fraction", *SNAPSHOT_COLUMNS, "ended_in_oom"]
    header[header.index("steady_allocated")] = "final_allocated"
    row = [name, settings, run.fraction or "", *(counted[column] for column in SNAPSHOT_COLUMNS), int(counted["oom"] is not None)]
    append_rows(folder / "snapshots.csv", header, [row])
    header = ["snapshot", "step", "allocated", "reserved", "peak_allocated_so_far", "peak_reserved_so_far", "requested", "inactive_split"]
    append_rows(folder / "per_step.csv", header, [[name, step, *levels] for step, levels in enumerate(counted["levels"])])


def append_rows(place, header, rows):
    is_new = not place.exists()
    with open(place, "a", newline="") as out:
        csv.writer(out, lineterminator="\n").writerows([header] * is_new + rows)


def record_all(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, (run, settings) in recordings().items():
        place = folder / f"{name}.pickle.xz"
        if place.exists():
            continue
        with tempfile.TemporaryDirectory() as scratch:
            snapshot = Path(scratch) / "snapshot.pickle"
            counted = apart([name, "--record", str(snapshot)], settings)
            partial = place.with_suffix(".part")
            partial.write_bytes(lzma.compress(snapshot.read_bytes()))
            partial.rename(place)
        note(folder, name, run, settings, counted)
        print(name, counted["torch"], counted["device"], flush=True)


GRID_SIZES = [(12, 768, 12, 50257, 1024, 8), (24, 1024, 16, 50257, 1024, 8), (6, 512, 8, 32000, 512, 16)]
GRID_TECHNIQUES = {"base": "", "amp": "amp", "ckpt": "ckpt", "ckpt+amp": "ckpt,amp", "acc4": "accum4", "off": "offload", "sgd": "sgd"}
SIZE_OPTIONS = ("layers", "width", "heads", "vocab", "context", "batch")


def print_grid():
    print(",".join([*SIZE_OPTIONS, "technique", "peak_allocated", "peak_reserved", "steady_allocated"]))
    for size in GRID_SIZES:
        for name, techniques in GRID_TECHNIQUES.items():
            options = [f"--{option}={value}" for option, value in zip(SIZE_OPTIONS, size)]
            counted = apart(["train_base", *options, f"--techniques={techniques}"])
            cells = [*size, name, counted["peak_allocated"], counted["peak_reserved"], counted["steady_allocated"]]
            print(",".join(map(str, cells)), flush=True)


TIMED = [name for name in RUNS if name.startswith("train_") and name != "train_sgd"]


def print_times():
    print("run,variant,alloc_conf,peak_allocated,peak_reserved,median_step_ms")
    for variant, names, extra in [("fp32", TIMED, ""), ("tf32", ["train_base", "train_amp"], "tf32")]:
        for name in names:
            techniques = ",".join(filter(None, [*RUNS[name].techniques, extra]))
            size = ["--layers=24", "--width=1024", "--heads=16", "--steps=12"]
            counted = apart([name, *size, f"--techniques={techniques}"])
            row = [name, f"gpt-355M {variant}", "", counted["peak_allocated"], counted["peak_reserved"], counted["median_step_ms"]]
            print(",".join(map(str, row)), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="a recording, as --list shows them")
    parser.add_argument("--record", metavar="FILE", help="where the snapshot goes")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--all", metavar="DIR", type=Path)
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--techniques", help="instead of those of the recording, separated by commas")
    for option in (*SIZE_OPTIONS, "steps"):
        parser.add_argument(f"--{option}", type=int, help="instead of that of the recording")
    options = parser.parse_args()
    known = recordings()
    if options.list:
        for name, (_, settings) in known.items():
            setting = f"PYTORCH_CUDA_ALLOC_CONF='{settings}' " if settings else ""
            print(f"{setting}python3 tools/recording/recorded.py {name} --record {name}.pickle")
    elif options.all:
        record_all(options.all)
    elif options.grid:
        print_grid()
    elif options.times:
        print_times()
    elif options.name not in known:
        parser.error(f"no recording is named '{options.name}'; --list shows the names")
    else:
        changed = {option: getattr(options, option) for option in (*SIZE_OPTIONS, "steps") if getattr(options, option)}
        if options.techniques is not None:
            changed["techniques"] = tuple(filter(None, options.techniques.split(",")))
        print(json.dumps(play(replace(known[options.name][0], **changed), options.record)))


if __name__ == "__main__":
    main()
