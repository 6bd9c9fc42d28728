#!/usr/bin/env python3
"""Checks how PyTorch programs under oomph behave: how they end, and beside threads, forks, graphs and other processes.

    python3 behaviour.py --library liboomph.so
    python3 behaviour.py --library liboomph.so --check soak --seconds 240
    oomph rehearse -- python3 tools/torch-plugin/behaviour.py

Each check is a process of its own and must end as its function says, with no error on the way. Where the GPU
computes nothing (in a rehearsal), contents are not compared. `soak` runs only when it is asked for. In `failing_driver` driver calls
fail at random (OOMPH_FAULTS); --seed N chooses which. Exits with status 1 if a check fails.
"""

import argparse
import atexit
import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
MIB = 1 << 20
TIMEOUT_SECONDS = 300


def bytes_of(mebibytes):
    import torch

    return torch.full((mebibytes * MIB,), mebibytes % 251, dtype=torch.uint8, device="cuda")


def computes():
    """Whether the GPU computes."""
    return "OOMPH_REHEARSE_FOLDER" not in os.environ


def live_at_exit(_):
    """Tensors of the main module and of a reference cycle are live when the interpreter ends."""
    global kept
    kept = [bytes_of(size) for size in range(1, 40)]
    cycle = {"tensor": bytes_of(30)}
    cycle["itself"] = cycle


def exception(_):
    """An exception ends the program while tensors are live."""
    kept = bytes_of(50)
    raise ValueError(f"on purpose, with {kept.numel()} bytes")


def leave_at_once(_):
    """The process ends without exit handlers."""
    kept = bytes_of(50)
    print(kept.numel())
    sys.stdout.flush()
    os._exit(7)


def signalled(_):
    """SIGTERM ends the program while a tensor is live."""
    kept = bytes_of(50)
    print(kept.numel())
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def thread_at_exit(_):
    """A thread allocates until the main thread has ended. (A daemon thread would abort: under PyTorch's own allocator too.)"""

    def churn():
        kept = []
        while threading.main_thread().is_alive():
            kept.append(bytes_of(random.randrange(1, 30)))
            del kept[: max(0, len(kept) - 5)]

    threading.Thread(target=churn).start()
    time.sleep(0.5)


def handler_at_exit(_):
    """An exit handler that was set before PyTorch was loaded allocates."""


def graph_at_exit(_):
    """A captured graph and its memory are live when the program ends."""
    import torch

    global kept
    static = bytes_of(20)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        static.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result = static + 1
    graph.replay()
    kept = (graph, result, static)


def forked_workers(_):
    """Forked workers of a data loader with pinned memory, after the first use of the GPU."""
    assert bytes_of(1).numel()
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(64 * 1024).reshape(64, 1024))
    for (rows,) in DataLoader(data, batch_size=16, num_workers=2, pin_memory=True):
        total = rows.to("cuda", non_blocking=True).sum()
    torch.cuda.synchronize()
    print(total)


def spawned(rank, options):
    use(options)
    assert bytes_of(10 + rank).numel()


def spawned_processes(options):
    """Spawned processes, each with the allocator."""
    import torch.multiprocessing as mp

    kept = bytes_of(20)
    mp.spawn(spawned, args=(options,), nprocs=2)
    print(kept.numel())


def threads(options):
    """Threads with streams of their own fill, compare and free blocks; some blocks pass from stream to stream."""
    import torch

    failed = []

    def work(number):
        chosen = random.Random(number)
        stream = torch.cuda.Stream()
        kept, damaged = [], torch.zeros(2, dtype=torch.int64, device="cuda")
        main = torch.cuda.current_stream()
        main.synchronize()
        try:
            for _ in range(200):
                with torch.cuda.stream(stream):
                    value = chosen.randrange(251)
                    size = chosen.randrange(1, 1 << chosen.randrange(10, 25))
                    kept.append((torch.full((size,), value, dtype=torch.uint8, device="cuda"), value))
                while len(kept) > chosen.randrange(20):
                    tensor, value = kept.pop(chosen.randrange(len(kept)))
                    elsewhere = chosen.random() < 0.3
                    reads = main if elsewhere else stream
                    reads.wait_stream(stream)
                    with torch.cuda.stream(reads):
                        damaged[int(elsewhere)] += (tensor != value).sum()
                    # The host does not wait here, so the block is reused while it is read if this is not heeded.
                    tensor.record_stream(reads)
            stream.synchronize()
            main.synchronize()
            if computes() and int(damaged.sum()) != 0:
                failed.append((number, damaged.tolist()))
        except Exception as error:
            failed.append((number, repr(error)))

    started = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert not failed, failed


def memory_returns(_):
    """empty_cache gives everything back, and memory that ran out is an exception after which the program goes on."""
    import torch

    torch.cuda.synchronize()
    bytes_of(1)
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    kept = [bytes_of(size) for size in range(1, 60)]
    try:
        torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
        raise AssertionError("4 TiB were allocated")
    except torch.OutOfMemoryError as error:
        assert "CUDA out of memory. Tried to allocate 4096 GiB" in str(error), error
    try:
        while True:
            kept.append(torch.empty(8 << 30, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        assert len(kept) > 59, len(kept)
    kept.append(bytes_of(60))
    del kept
    torch.cuda.empty_cache()
    after = torch.cuda.mem_get_info()[0]
    assert before == after, (before, after)
    assert torch.cuda.memory_reserved() == 0, torch.cuda.memory_reserved()


def exported(_):
    """Memory can be passed on as a file descriptor, and the importer sees the same bytes."""
    tensor = bytes_of(40)
    import torch

    torch.cuda.synchronize()
    driver = ctypes.CDLL("libcuda.so.1")
    handle, file = ctypes.c_ulonglong(), ctypes.c_int(-1)
    # The part of the tensor that is one piece of physical memory.
    begin, size = ctypes.c_ulonglong(), ctypes.c_size_t()
    code = driver.cuMemGetAddressRange_v2(ctypes.byref(begin), ctypes.byref(size), ctypes.c_ulonglong(tensor.data_ptr()))
    assert code == 0 and begin.value == tensor.data_ptr(), (code, begin.value, tensor.data_ptr())
    code = driver.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(tensor.data_ptr()))
    assert code == 0, f"cuMemRetainAllocationHandle returned {code}"
    # 1: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR. 801: not supported.
    code = driver.cuMemExportToShareableHandle(ctypes.byref(file), handle, 1, ctypes.c_ulonglong(0))
    assert driver.cuMemRelease(handle) == 0
    if not computes():
        assert code in (0, 801), f"cuMemExportToShareableHandle returned {code}"
        return
    assert code == 0 and file.value >= 0, f"cuMemExportToShareableHandle returned {code}"
    imported, base = ctypes.c_ulonglong(), ctypes.c_ulonglong()
    assert driver.cuMemImportFromShareableHandle(ctypes.byref(imported), ctypes.c_void_p(file.value), 1) == 0
    assert driver.cuMemAddressReserve(ctypes.byref(base), size, ctypes.c_size_t(0), base, base) == 0
    assert driver.cuMemMap(base, size, ctypes.c_size_t(0), imported, ctypes.c_ulonglong(0)) == 0
    access = (ctypes.c_int * 3)(1, 0, 3)
    assert driver.cuMemSetAccess(base, size, access, ctypes.c_size_t(1)) == 0
    seen = (ctypes.c_ubyte * 1024)()
    assert driver.cuMemcpyDtoH_v2(seen, base, ctypes.c_size_t(1024)) == 0
    assert set(seen) == {40}, set(seen)
    os.close(file.value)


def failing_driver(options):
    """Trains for --seconds while driver calls fail at random. Steps that fail are repeated, and all trainings end alike."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    import torch
    from torch import nn

    torch.use_deterministic_algorithms(True)
    ends, counts = time.monotonic() + options.seconds, {"trainings": 0, "steps": 0, "failed": 0}

    def repeated(work):
        for attempt in range(1000):
            try:
                return work()
            # `std::bad_alloc`, if it is not known that memory has run out.
            except (RuntimeError, MemoryError):
                counts["failed"] += 1
                if attempt == 999:
                    raise

    def train():
        torch.manual_seed(1)
        model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.GELU())))
        repeated(lambda: model.to("cuda"))
        for step in range(20):
            batch = torch.randn(64 * (1 + step * 7 % 11), 1024)

            def gradients():
                for parameter in model.parameters():
                    parameter.grad = None
                model(batch.to("cuda")).square().mean().backward()

            repeated(gradients)
            with torch.no_grad():
                # In place: nothing is requested, so that this does not fail half-way.
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
            counts["steps"] += 1
            if step % 5 == 4:
                torch.cuda.empty_cache()
        counts["trainings"] += 1
        return b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())

    trained, held = set(), set()
    while counts["trainings"] < 2 or time.monotonic() < ends:
        trained.add(train())
        for _ in range(20):
            # Frees that the driver stopped are repeated.
            torch.cuda.empty_cache()
        held.add(torch.cuda.memory_allocated())
    print(counts)
    assert counts["failed"] > 0 and len(held) == 1, (counts, held)
    assert not computes() or len(trained) == 1, "trainings differ"


HOG = """
import sys, torch
free = torch.cuda.mem_get_info()[0]
kept = torch.empty(free - (1 << 30), dtype=torch.uint8, device="cuda")
print("full", flush=True)
sys.stdin.readline()
"""


def another_process(_):
    """Another process takes nearly all memory of the GPU, and ends: requests fail between, and are served again."""
    import torch

    kept = bytes_of(100)
    other = subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "full\n"
    if computes():
        try:
            torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
            raise AssertionError("the memory of another process was allocated")
        except torch.OutOfMemoryError as error:
            assert "is free" in str(error), error
        assert bool((kept == 100).all())
    other.communicate("\n")
    assert torch.empty(4 << 30, dtype=torch.uint8, device="cuda").numel() == 4 << 30


def soak(options):
    """Random work under a limit for --seconds: blocks, streams, graphs, emptied caches. Contents are compared throughout."""
    import torch

    torch.cuda.set_per_process_memory_fraction(0.02)
    compare, ends, chosen = computes(), time.monotonic() + options.seconds, random.Random(options.seed)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    kept, counts = [], {"blocks": 0, "out of memory": 0, "graphs": 0, "damaged": 0}
    # Comparing must not need the memory that has just run out.
    same = torch.empty(1 << 22, dtype=torch.bool, device="cuda")

    def check(tensor, value):
        for part in tensor.split(same.numel()) if compare else ():
            if not bool(torch.eq(part, value, out=same[: part.numel()]).all()):
                counts["damaged"] += 1

    def free_one():
        tensor, value, stream = kept.pop(chosen.randrange(len(kept)))
        with torch.cuda.stream(stream):
            check(tensor, value)

    def captured():
        static = torch.full((chosen.randrange(1, 1 << 22),), 1, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = (static * 2 + 1) * 3
        return graph, static, result

    graphs = []
    while time.monotonic() < ends:
        if not graphs or chosen.random() < 0.002:
            del graphs[: max(0, len(graphs) - 3)]
            try:
                graphs.append(captured())
                counts["graphs"] += 1
            except torch.OutOfMemoryError:
                counts["out of memory"] += 1
        if chosen.random() < 0.05 and graphs:
            graph, static, result = chosen.choice(graphs)
            value = chosen.randrange(1000)
            static.fill_(value)
            graph.replay()
            check(result, (value * 2 + 1) * 3)
        if chosen.random() < 0.001:
            torch.cuda.empty_cache()
        stream = chosen.choice(streams)
        try:
            with torch.cuda.stream(stream):
                size, value = chosen.randrange(1, 1 << chosen.randrange(9, 29)), chosen.randrange(251)
                kept.append((torch.full((size,), value, dtype=torch.uint8, device="cuda"), value, stream))
                counts["blocks"] += 1
        except torch.OutOfMemoryError:
            counts["out of memory"] += 1
            for _ in range(len(kept) // 2):
                free_one()
        while len(kept) > chosen.randrange(10, 200):
            free_one()
    print(counts)
    assert counts["damaged"] == 0, counts
    assert not compare or min(counts["graphs"], counts["out of memory"]) > 0, counts


# The status with which each check ends.
CHECKS = {
    live_at_exit: 0, exception: 1, leave_at_once: 7, signalled: -signal.SIGTERM, thread_at_exit: 0, handler_at_exit: 0,
    graph_at_exit: 0, forked_workers: 0, spawned_processes: 0, threads: 0, exported: 0, failing_driver: 0,
}
# The checks in which driver calls fail, and their OOMPH_FAULTS.
FAULTS = {failing_driver: 20}
# These look at all memory of the GPU, or take all time.
ALONE = {memory_returns: 0, another_process: 0, soak: 0}
BY_NAME = {check.__name__: check for check in [*CHECKS, *ALONE]}
# What may not be in the output of a check that ends well.
CRASHES = ("Traceback", "panicked", "terminate called", "Segmentation", "core dumped")
COMPLAINTS = (*CRASHES, "CUDA error", "CUDA_ERROR")
# Lines of our library at exit; any other line of it is an error.
STATISTICS = re.compile(r"oomph: (\S+ on )?device \d+")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="target/release/liboomph.so", help="oomph's shared library")
    parser.add_argument("--package", default=os.path.join(HERE, "../../python"), help="the folder of the Python package oomph")
    parser.add_argument("--check", action="append", choices=BY_NAME, help="may be repeated; default: all but soak")
    parser.add_argument("--seconds", type=int, default=20, help="how long soak and failing_driver take")
    parser.add_argument("--seed", type=int, default=0, help="what soak does at random, and which calls fail in failing_driver")
    parser.add_argument("--run", choices=BY_NAME, help=argparse.SUPPRESS)
    return parser.parse_args()


def use(options):
    """Replaces PyTorch's allocator."""
    sys.path.insert(0, os.path.abspath(options.package))
    os.environ["OOMPH_LIBRARY"] = os.path.abspath(options.library)
    import oomph

    oomph.use_allocator("oomph")


def run_here(options):
    if options.run == "handler_at_exit":
        atexit.register(lambda: print(bytes_of(5).numel()))
    use(options)
    BY_NAME[options.run](options)


class Check:
    """A running check."""

    def __init__(self, name, options):
        self.name, self.output = name, tempfile.TemporaryFile("w+")
        command = [sys.executable, os.path.abspath(__file__), "--run", name, "--library", os.path.abspath(options.library)]
        command += ["--package", os.path.abspath(options.package), "--seconds", str(options.seconds), "--seed", str(options.seed)]
        self.one_in = FAULTS.get(BY_NAME[name], 0)
        environment = dict(os.environ, OOMPH_FAULTS=f"{self.one_in}:{options.seed}")
        self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT, env=environment)

    def verdict(self, limit):
        """What is wrong, or None."""
        try:
            status = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = None
        self.output.seek(0)
        self.text = self.output.read()
        if status is None:
            return f"has not ended after {limit} s; said: {self.text.strip()[-2000:] or 'nothing'}"
        wanted = {**CHECKS, **ALONE}[BY_NAME[self.name]]
        complaints = [word for word in (CRASHES if self.one_in else COMPLAINTS) if word in self.text]
        if not self.one_in:
            ours = [line for line in self.text.splitlines() if line.startswith("oomph: ")]
            complaints += [line for line in ours if not STATISTICS.match(line)]
        if wanted == 1 and complaints == ["Traceback"] and "on purpose" in self.text:
            complaints = []
        if status == wanted and not complaints:
            return None
        return f"ended with status {status} instead of {wanted}; said: {self.text.strip()[-2000:] or 'nothing'}"


def main():
    options = arguments()
    if options.run:
        run_here(options)
        return 0
    names = options.check or [name for name in BY_NAME if name != "soak"]
    together = [name for name in names if BY_NAME[name] in CHECKS]
    started = [Check(name, options) for name in together]
    limit = TIMEOUT_SECONDS + options.seconds
    checks = [(check, check.verdict(limit)) for check in started]
    for name in names:
        if BY_NAME[name] in ALONE:
            check = Check(name, options)
            checks.append((check, check.verdict(limit)))
    for check, wrong in checks:
        said = [line for line in check.text.splitlines() if line.startswith("{")] if wrong is None else []
        print(f"{check.name:20} {wrong or 'as it should be'} {' '.join(said)}")
    failed = [check.name for check, wrong in checks if wrong]
    print(f"{len(checks)} checks, {len(failed)} failed {' '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
