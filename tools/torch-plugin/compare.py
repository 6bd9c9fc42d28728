#!/usr/bin/env python3
"""Runs programs under PyTorch's allocator, under expandable segments and under oomph, in turns, and compares.

    python3 compare.py --library liboomph.so --turns 5 --runs runs.jsonl
    python3 compare.py --library liboomph.so --program fsdp --program unet --check

The programs are those of tools/recording/programs.py. PyTorch is loaded once; every run is a process that is forked from
there before the GPU is used. A turn has one process for each allocator. They take turns step by step, one at a time and on the
same processor cores, so that what changes with time meets all of them. Runs are appended to the file of --runs when a
program ends; called again, the script goes on from there. --check trains once under each allocator with deterministic
algorithms and compares what was trained bit by bit.

The table has, for each program: peak reserved over peak allocated memory under each allocator (the median over the turns); the
median step; two ratios of oomph to the faster of the others, each with a 95 % interval over the turns (Student's t, of
logarithms); the time of the first three steps; and the driver calls of oomph in the last third of the steps. The first ratio is
that of the same step, the median over the steps of a turn after the third. The second is that of the time of all steps
after the first one: it contains the steps in which memory is moved. Which allocator is the faster one in a turn is decided by
the other turns: decided by the same times, it would be the one that was faster by chance. Programs do at least 30 steps here, so
that most of them are steady.
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import operator
import os
import random
import statistics
import sys
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
ALLOCATORS = ["native", "expandable", "oomph"]
# Programs of graphs, of servers and of training, with steady and with varying shapes.
DEFAULT = [
    "swiglu_var", "unet", "moe", "serving", "prefetch", "fsdp", "fsdp1", "generation", "embeddings", "swiglu", "graphed",
    "graph_server", "gpt2", "llama",
]
WARM_STEPS = 3
# Some programs end sooner by themselves.
LEAST_STEPS = 30
# What a process sends while it waits.
READY = "ready"
# Two-sided 95 % quantiles of Student's t, by degrees of freedom.
STUDENT = [math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="target/release/liboomph.so", help="oomph's shared library")
    parser.add_argument("--package", default=os.path.join(HERE, "../../python"), help="the folder of the Python package oomph")
    parser.add_argument("--programs", default=os.path.join(HERE, "../recording/programs.py"), help="the file of the programs")
    parser.add_argument("--program", action="append", help="may be repeated; default: " + " ".join(DEFAULT))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after this time")
    parser.add_argument("--runs", default="runs.jsonl", help="a file for the runs")
    parser.add_argument("--check", action="store_true", help="compare results instead of times")
    return parser.parse_args()


def run_here(options, name, allocator, parent):
    """Runs one program in this process, one step each time its parent says so. Returns what was seen."""
    import torch
    import programs

    def pause():
        parent.send(READY)
        parent.recv()

    if allocator == "expandable":
        newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (newer or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")
    # Read when oomph and cuBLAS are first used.
    os.environ["OOMPH_LIBRARY"] = options.library
    if options.check:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    pause()
    # The main thread and that of the backward pass.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    calls = lambda: 0
    if allocator == "oomph":
        import oomph.allocator

        oomph.use_allocator("oomph")
        import ctypes

        library = ctypes.CDLL(oomph.allocator.find_library())
        library.oomph_driver_calls.restype = ctypes.c_size_t
        calls = lambda: library.oomph_driver_calls(0)
    if options.check:
        torch.use_deterministic_algorithms(True, warn_only=True)
        # The fused kernels of attention add up in any order.
        for kernel in ("flash", "mem_efficient", "cudnn"):
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)
    torch.manual_seed(1)
    random.seed(1)
    milliseconds, driver_calls = [], []

    def steps(count):
        for step in range(count if options.check else max(count, LEAST_STEPS)):
            torch.cuda.synchronize()
            before = calls()
            pause()
            # The GPU changes to this process before the step begins.
            torch.cuda._sleep(1)
            torch.cuda.synchronize()
            began = time.perf_counter()
            yield step
            torch.cuda.synchronize()
            milliseconds.append(1e3 * (time.perf_counter() - began))
            driver_calls.append(calls() - before)

    trained = getattr(programs, name)(steps)
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    seen = {
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "peak_reserved": stats["reserved_bytes.all.peak"],
        "peak_allocated": stats["allocated_bytes.all.peak"],
        "step_ms": [round(value, 4) for value in milliseconds],
        "driver_calls": driver_calls,
    }
    if options.check:
        digest = hashlib.sha256()
        for tensor in trained:
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        seen["digest"] = digest.hexdigest()
    return seen


def run_and_leave(options, name, allocator, parent):
    """The whole life of a forked process."""
    try:
        parent.send(run_here(options, name, allocator, parent))
    except BaseException as error:
        parent.send({"failure": traceback.format_exception_only(error)[-1].strip()})
    # Unloading takes longer than some programs. How programs end is seen by behaviour.py.
    os._exit(0)


def loaded_once(options):
    """What makes processes that have loaded PyTorch already."""
    sys.path[:0] = [os.path.dirname(os.path.abspath(options.programs)), os.path.abspath(options.package)]
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    context = multiprocessing.get_context("forkserver")
    # A module that is not installed is left out.
    context.set_forkserver_preload(["torch", *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama"))])
    return context


class Run:
    """A process for one run."""

    def __init__(self, context, options, program, allocator, turn):
        self.what = {"program": program, "allocator": allocator, "turn": turn}
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=run_and_leave, args=(options, program, allocator, other))
        self.process.start()
        other.close()

    def advance(self):
        """Lets the process run until it waits again; returns what was seen when it has ended, else None."""
        self.pipe.send(READY)
        return self.wait()

    def wait(self):
        """The same for a process that has just begun."""
        try:
            said = self.pipe.recv()
        except EOFError:
            self.process.join()
            said = {"failure": f"the process ended with status {self.process.exitcode}"}
        return None if said == READY else {**self.what, **said}


def run_together(runs):
    """Runs processes step by step in turns until all have ended; returns what was seen."""
    ended = []
    while runs:
        seen = {run: run.advance() for run in runs}
        ended += [done for done in seen.values() if done]
        runs = [run for run in runs if seen[run] is None]
    return ended


def planned(options, done):
    """What is left: programs, each with the runs of one turn in order."""
    # The native allocator twice: whether the program itself gives the same result again.
    allocators = [*ALLOCATORS, "native"] if options.check else ALLOCATORS
    for turn in range(1 if options.check else options.turns):
        first = turn % len(allocators)
        places = [*range(first, len(allocators)), *range(first)]
        if turn % 2:
            # So that an allocator does not always follow the same one.
            places.reverse()
        for program in options.program or DEFAULT:
            keys = [(program, allocators[place], turn + (place == 3)) for place in places]
            if not set(keys) <= done:
                yield program, keys


def interval(ratios):
    """The geometric mean of ratios and its 95 % interval."""
    logarithms = [math.log(ratio) for ratio in ratios]
    mean = statistics.mean(logarithms)
    if len(ratios) < 2:
        return math.exp(mean), math.nan, math.nan
    freedom = min(len(ratios) - 1, len(STUDENT) - 1)
    half = STUDENT[freedom] * statistics.stdev(logarithms) / math.sqrt(len(ratios))
    return tuple(math.exp(value) for value in (mean, mean - half, mean + half))


def same_step_ratios(ours, others):
    """For each turn, the median ratio of the same step of two runs."""
    other_steps = {run["turn"]: run["step_ms"] for run in others}
    pairs = [(run["step_ms"], other_steps[run["turn"]]) for run in ours if run["turn"] in other_steps]
    return [statistics.median(map(operator.truediv, mine[WARM_STEPS:], other[WARM_STEPS:])) for mine, other in pairs]


def all_steps_ratios(ours, others):
    """For each turn, the ratio of the time of all steps after the first."""
    other_sums = {run["turn"]: sum(run["step_ms"][1:]) for run in others}
    return [sum(run["step_ms"][1:]) / other_sums[run["turn"]] for run in ours if run["turn"] in other_sums]


def over_the_better(ratios, of):
    """The ratio of oomph to the faster of the others, and its interval."""
    found = [ratios(of["oomph"], of[name]) for name in ("native", "expandable")]

    def to_the_better(turn):
        return max(found, key=lambda all_turns: (math.prod(all_turns) / all_turns[turn], all_turns[turn]))[turn]

    return "{:.3f} ({:.3f} to {:.3f})".format(*interval([to_the_better(turn) for turn in range(len(found[0]))]))


def summary(runs):
    """One row for each program."""
    heads = ["program", "native", "expandable", "oomph", "step ms, native", "expandable", "oomph", "same step", "all but the first"]
    rows = [[*heads, "first 3 steps ms", "driver calls in late steps"]]
    for program in dict.fromkeys(run["program"] for run in runs):
        of = {name: [r for r in runs if (r["program"], r["allocator"]) == (program, name)] for name in ALLOCATORS}
        failures = [run["failure"] for group in of.values() for run in group if "failure" in run]
        if failures or not all(of.values()):
            rows.append([program, failures[0] if failures else "not all runs are done"])
            continue
        over = [statistics.median(r["peak_reserved"] / r["peak_allocated"] for r in of[name]) for name in ALLOCATORS]
        step = {name: {r["turn"]: statistics.median(r["step_ms"][WARM_STEPS:]) for r in of[name]} for name in ALLOCATORS}
        medians = {name: statistics.median(step[name].values()) for name in ALLOCATORS}
        first = [statistics.median(sum(r["step_ms"][:WARM_STEPS]) for r in of[name]) for name in ALLOCATORS]
        late = [sum(r["driver_calls"][-(len(r["driver_calls"]) // 3) :]) for r in of["oomph"]]
        rows.append([
            program,
            *(f"{value:.4f}" for value in over),
            *(f"{medians[name]:.2f}" for name in ALLOCATORS),
            over_the_better(same_step_ratios, of),
            over_the_better(all_steps_ratios, of),
            " / ".join(f"{value:.0f}" for value in first),
            str(max(late)),
        ])
    return rows


def verdicts(runs):
    """Whether every allocator trained the same."""
    rows = [["program", "native again", "expandable", "oomph"]]
    for program in dict.fromkeys(run["program"] for run in runs):
        of = {(r["allocator"], r["turn"]): r.get("digest", r.get("failure")) for r in runs if r["program"] == program}
        base = of.get(("native", 0))
        keys = [("native", 1), ("expandable", 0), ("oomph", 0)]
        rows.append([program, *("equal" if of.get(key) == base else f"DIFFERENT {of.get(key)}" for key in keys)])
    return rows


def main():
    options = arguments()
    options.library, options.runs = os.path.abspath(options.library), os.path.abspath(options.runs)
    runs = []
    if os.path.exists(options.runs):
        with open(options.runs) as file:
            runs = [json.loads(line) for line in file]
    ends = time.monotonic() + 60 * options.minutes
    context = loaded_once(options)
    for program, keys in planned(options, {(run["program"], run["allocator"], run["turn"]) for run in runs}):
        if time.monotonic() > ends:
            break
        started = [Run(context, options, *key) for key in keys]
        failed = [seen for seen in [run.wait() for run in started] if seen]
        if failed:
            for run in started:
                run.process.kill()
            raise SystemExit(f"a process could not begin: {failed[0]['failure']}")
        seen = run_together(started)
        runs += seen
        with open(options.runs, "a") as file:
            file.writelines(json.dumps(run) + "\n" for run in seen)
        failures = " ".join(run["failure"] for run in seen if "failure" in run)
        print(f"{program}, turn {seen[0]['turn']} {failures}", file=sys.stderr, flush=True)
    rows = verdicts(runs) if options.check else summary(runs)
    width = max(len(row) for row in rows)
    print("\n".join("| " + " | ".join(row + [""] * (width - len(row))) + " |" for row in rows))
    return 0 if all("failure" not in run for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
