#!/usr/bin/env python3
"""Captures and replays CUDA graphs under PyTorch's native allocator and under oomph, and compares.

    python3 graphs.py --library liboomph.so --json graphs.json
    python3 graphs.py --library liboomph.so --program server --strategy caching

Every program runs in its own process under each allocator, because PyTorch keeps the allocator of its first request. The
same seed and deterministic algorithms make results comparable bit for bit: another allocator changes addresses only, so
any difference means that the memory of a graph was given to others. Between replays each program fills eager memory with
rubbish, which must not reach a graph. Exits with status 1 if results differ or a run fails.
"""

import argparse
import ctypes
import hashlib
import json
import os
import subprocess
import sys
import tempfile

MIB = 1 << 20
HOOKS = {
    "set_record_stream_fn": "oomph_record_stream",
    "set_reset_fn": "oomph_reset",
    "set_memory_fraction_fn": "oomph_memory_fraction",
    "set_begin_allocate_to_pool": "oomph_begin_pool",
    "set_end_allocate_to_pool_fn": "oomph_end_pool",
    "set_release_pool": "oomph_release_pool",
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="target/release/liboomph.so", help="oomph's shared library")
    parser.add_argument("--strategy", action="append", help="may be repeated; default: oomph")
    parser.add_argument("--program", action="append", choices=sorted(PROGRAMS), help="may be repeated; default: all")
    parser.add_argument("--json", help="a file for everything that was measured")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--run", nargs=2, metavar=("PROGRAM", "ALLOCATOR"), help=argparse.SUPPRESS)
    return parser.parse_args()


class Results:
    """A digest of tensors, and what a program holds."""

    def __init__(self, library):
        self.digest = hashlib.sha256()
        self.library = library
        self.calls_before = None

    def add(self, tensor):
        import torch

        host = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self.digest.update(host.numpy().tobytes())

    def reserved(self):
        import torch

        return self.library.oomph_reserved(0) if self.library else torch.cuda.memory_reserved()

    def driver_calls(self):
        return self.library.oomph_driver_calls(0) if self.library else None

    def replays_begin(self):
        self.calls_before = self.driver_calls()

    def replays_end(self):
        return None if self.calls_before is None else self.driver_calls() - self.calls_before


def plug_in(path):
    """Replaces PyTorch's allocator by oomph, including the hooks."""
    import torch

    plugged = torch.cuda.memory.CUDAPluggableAllocator(path, "oomph_alloc", "oomph_free")
    functions = ctypes.CDLL(path)
    for name in ("oomph_reserved", "oomph_driver_calls"):
        getattr(functions, name).restype = ctypes.c_size_t
    hooks = plugged.allocator()
    for setter, name in HOOKS.items():
        getattr(hooks, setter)(ctypes.cast(getattr(functions, name), ctypes.c_void_p).value)
    torch.cuda.memory.change_current_allocator(plugged)
    return functions


def network(options):
    from torch import nn

    width = options.width
    blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(options.layers)]
    return nn.Sequential(*blocks).cuda()


def disturb():
    """Eager work between replays: memory that a graph lost would be overwritten here."""
    import torch

    for mebibytes in (1, 7, 33, 64):
        torch.full((mebibytes * MIB // 4,), float("nan"), device="cuda")


def replayed(options, results, replay):
    """Replays with eager work in between; `replay` returns the tensors to compare."""
    import torch

    for step in range(options.replays):
        if step == 2:
            # Eager memory is warm from here on.
            torch.cuda.synchronize()
            results.replays_begin()
        tensors = replay(step)
        if step % 10 == 0:
            for tensor in tensors:
                results.add(tensor)
        del tensors
        disturb()
    torch.cuda.synchronize()
    calls = results.replays_end()
    return {"reserved": results.reserved(), "driver_calls": calls}


def by_hand(options, results):
    """A whole training step, with a side stream, captured by hand."""
    import torch

    model = network(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)
    batch, target = (torch.randn(256, options.width, device="cuda") for _ in range(2))
    side = torch.cuda.Stream()

    def step():
        optimizer.zero_grad(set_to_none=True)
        doubled = batch * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            noise = doubled.sin()
            doubled.record_stream(side)
        del doubled
        loss = (model(batch) - target).square().mean()
        torch.cuda.current_stream().wait_stream(side)
        noise.record_stream(torch.cuda.current_stream())
        loss = loss + noise.mean()
        loss.backward()
        optimizer.step()
        return loss

    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(warm)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay(number):
        batch.fill_(0.01 * number)
        graph.replay()
        return [loss, next(model.parameters())]

    return replayed(options, results, replay)


def callables(options, results):
    """make_graphed_callables: forward and backward graphs in one pool."""
    import torch

    model = network(options)
    sample = torch.randn(256, options.width, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(model, (sample,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def replay(number):
        optimizer.zero_grad(set_to_none=True)
        batch = torch.full_like(sample, 0.01 * number).requires_grad_()
        loss = graphed(batch).square().mean()
        loss.backward()
        optimizer.step()
        return [loss, batch.grad]

    return replayed(options, results, replay)


def compiled(options, results):
    """torch.compile without trees of graphs."""
    import torch
    import torch._inductor.config as config

    config.triton.cudagraph_trees = False
    model = network(options)
    fast = torch.compile(model, mode="reduce-overhead")

    def replay(number):
        with torch.no_grad():
            return [fast(torch.full((256, options.width), 0.01 * number, device="cuda"))]

    return replayed(options, results, replay)


def server(options, results):
    """Graphs of several batch sizes in one pool, largest first, as servers of language models have them."""
    import torch

    model = network(options).eval()
    graphs, pool = {}, torch.cuda.graph_pool_handle()
    with torch.no_grad():
        for size in (512, 256, 128, 64, 32, 16, 8, 4, 2, 1):
            static = torch.zeros(size, options.width, device="cuda")
            model(static)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                answer = model(static)
            graphs[size] = (graph, static, answer)
        cache = [torch.zeros(MIB, device="cuda") for _ in range(16)]

        def replay(number):
            size = sorted(graphs)[number % len(graphs)]
            graph, static, answer = graphs[size]
            static.fill_(0.01 * number)
            graph.replay()
            cache[number % len(cache)].add_(answer.sum())
            return [answer, cache[number % len(cache)]]

        return replayed(options, results, replay)


def recaptured(options, results):
    """Graphs that are given up and captured again: their memory comes back."""
    import torch

    model = network(options).eval()
    held = []
    with torch.no_grad():
        for size in (64, 512, 128, 256):
            static = torch.full((size, options.width), 0.5, device="cuda")
            model(static)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                answer = model(static)
            graph.replay()
            results.add(answer)
            disturb()
            del graph, answer, static
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            held.append(results.reserved())
    return {"reserved": max(held), "held_after_each": held, "driver_calls": None}


PROGRAMS = {
    "by-hand": by_hand,
    "callables": callables,
    "compiled": compiled,
    "server": server,
    "recaptured": recaptured,
}


def run_program(options):
    """Runs one program in this process and prints what it saw as one line of JSON."""
    import torch

    program, allocator = options.run
    results = Results(None if allocator == "native" else plug_in(options.library))
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    seen = PROGRAMS[program](options, results)
    seen.update(digest=results.digest.hexdigest(), torch=torch.__version__, gpu=torch.cuda.get_device_name())
    print(json.dumps(seen))


def run_alone(program, allocator):
    """Runs one program under one allocator in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        books = os.path.join(folder, "statistics.json")
        environment = dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8", OOMPH_STATS=books, OOMPH_OUT_OF_MEMORY="throw")
        if allocator != "native":
            environment["OOMPH_STRATEGY"] = allocator
        command = [sys.executable, *sys.argv, "--run", program, allocator]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ended.returncode != 0:
            said = (ended.stderr.strip().splitlines() or ["nothing"])[-1]
            return {"failure": f"status {ended.returncode}: {said}"}
        seen = json.loads(ended.stdout.splitlines()[-1])
        complaints = [line for line in ended.stderr.splitlines() if line.startswith("oomph: ")]
        if complaints:
            return {**seen, "failure": complaints[0]}
        if allocator != "native":
            with open(books) as file:
                seen["statistics"] = json.load(file)
        return seen


def table(runs):
    rows = [("program", "allocator", "native MiB", "oomph MiB", "equal results", "driver calls in replays")]
    for run in runs:
        native, ours = run["native"], run["oomph"]
        failure = native.get("failure") or ours.get("failure")
        mebibytes = [f"{seen['reserved'] / MIB:.0f}" if "reserved" in seen else "" for seen in (native, ours)]
        verdict = failure or ("yes" if native["digest"] == ours["digest"] else "NO")
        calls = ours.get("driver_calls")
        rows.append((run["program"], run["allocator"], *mebibytes, verdict, "" if calls is None else str(calls)))
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def main():
    options = arguments()
    if options.run:
        return run_program(options)
    options.library = os.path.abspath(options.library)
    sys.argv += ["--library", options.library]
    runs = []
    for program in options.program or PROGRAMS:
        print(f"running {program} ...", file=sys.stderr, flush=True)
        native = run_alone(program, "native")
        for allocator in options.strategy or ["oomph"]:
            runs.append({"program": program, "allocator": allocator, "native": native, "oomph": run_alone(program, allocator)})
    print(table(runs))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"schema": 1, "options": vars(options), "runs": runs}, file, indent=1)
    sound = all("failure" not in run[side] for run in runs for side in ("native", "oomph"))
    return 0 if sound and all(run["native"]["digest"] == run["oomph"]["digest"] for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
