"""What it costs when a step allocates its memory with cuMemAlloc while kernels run, and frees all of it at its end.

    empty-cache.py    prints one JSON line for each experiment; times are milliseconds unless their name says microseconds

`overlap`: 87 blocks of 64 MiB are allocated while a kernel of known length runs. If calls took place beside the kernel, `host`
is the sum of the calls and `end` is the longer of both. `touch`: each block is written twice, the first time after it
was allocated. `step`: kernels of about 30 ms with blocks allocated between them, the end awaited, all blocks freed; `kept`: the same
without allocations and frees.
"""

import ctypes
import json
import statistics
import time

import torch

COUNT, MIB = 87, 1 << 20
cuda = ctypes.CDLL("libcuda.so.1")


def check(code):
    if code:
        raise SystemExit(f"CUDA error {code}")


def alloc(size):
    pointer = ctypes.c_uint64()
    begin = time.perf_counter_ns()
    check(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)))
    return pointer, (time.perf_counter_ns() - begin) / 1e3


def free(pointer):
    begin = time.perf_counter_ns()
    check(cuda.cuMemFree_v2(pointer))
    return (time.perf_counter_ns() - begin) / 1e3


def fill(pointer, size):
    check(cuda.cuMemsetD8Async(pointer, ctypes.c_ubyte(1), ctypes.c_size_t(size), None))


def milliseconds(begin):
    return (time.perf_counter_ns() - begin) / 1e6


def middle(values):
    return round(statistics.median(values), 3)


def show(**row):
    print(json.dumps(row), flush=True)


torch.cuda.init()
left = torch.randn(8192, 8192, device="cuda")
result = torch.empty_like(left)
thin = torch.randn(64, 1024, device="cuda")


def work(count=1):
    for _ in range(count):
        torch.mm(left, left, out=result)


def wait():
    torch.cuda.synchronize()


work(3)
wait()
begin = time.perf_counter_ns()
work(4)
wait()
kernel = milliseconds(begin)
for size in (2, 20, 64):
    for turn in range(3):
        time.sleep(0.05)
        work(4)
        begin = time.perf_counter_ns()
        blocks = [alloc(size * MIB) for _ in range(COUNT)]
        host = milliseconds(begin)
        wait()
        end = milliseconds(begin)
        frees = [free(pointer) for pointer, _ in blocks]
        times = [took for _, took in blocks]
        show(what="overlap", mib=size, turn=turn, kernel=round(kernel, 2), host=round(host, 2), end=round(end, 2),
             first_us=round(times[0], 1), alloc_us=middle(times), most_us=round(max(times[1:]), 1), free_us=middle(frees))


def touched(blocks):
    """Times of a fill of each block, by events."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(blocks) + 1)]
    stream = torch.cuda.current_stream()
    events[0].record(stream)
    for (pointer, _), event in zip(blocks, events[1:]):
        fill(pointer, 64 * MIB)
        event.record(stream)
    wait()
    return [before.elapsed_time(after) * 1e3 for before, after in zip(events, events[1:])]


for turn in range(3):
    blocks = [alloc(64 * MIB) for _ in range(COUNT)]
    first, second = touched(blocks), touched(blocks)
    show(what="touch", turn=turn, first_us=middle(first), second_us=middle(second))
    for pointer, _ in blocks:
        free(pointer)


def step(blocks, allocates):
    """About 30 ms of kernels in 88 parts."""
    for index in range(COUNT):
        if allocates:
            blocks.append(alloc(64 * MIB)[0])
        for _ in range(6):
            fill(blocks[index], 64 * MIB)
            torch.mul(left[:2048], 2.0, out=result[:2048])
    wait()
    if allocates:
        while blocks:
            free(blocks.pop())


for allocates in (False, True, False, True):
    blocks = [] if allocates else [alloc(64 * MIB)[0] for _ in range(COUNT)]
    times = []
    for _ in range(12):
        begin = time.perf_counter_ns()
        step(blocks, allocates)
        times.append(milliseconds(begin))
    show(what="step" if allocates else "kept", median=middle(times[3:]), least=round(min(times), 3), most=round(max(times[3:]), 3))
    for pointer in blocks:
        free(pointer)
