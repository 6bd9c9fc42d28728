"""Costs of cuMemAlloc and cuMemFree in one process, in microseconds, three contexts one after the other.

    alloc-costs.py SECONDS ORDER    wait so long in each context; begin with half of the memory (half), sizes that
                                    double (doubling) or blocks of 20 MiB (grow)

Between two calls the host writes 1 MiB; `oomph doctor --calibrate` writes 768 KiB.
"""

import ctypes
import json
import sys
import time

MIB = 1 << 20
cuda = ctypes.CDLL("libcuda.so.1")
device = ctypes.c_int()


def check(code):
    if code:
        sys.exit(f"CUDA error {code}")


def write_host_memory():
    memory = bytearray(MIB)
    for place in range(0, MIB, 64):
        memory[place] = 1


def alloc(size):
    write_host_memory()
    pointer = ctypes.c_uint64()
    begin = time.perf_counter_ns()
    check(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)))
    return pointer, (time.perf_counter_ns() - begin) / 1e3


def free(pointer):
    write_host_memory()
    begin = time.perf_counter_ns()
    check(cuda.cuMemFree_v2(pointer))
    return (time.perf_counter_ns() - begin) / 1e3


def median(values):
    return round(sorted(values)[len(values) // 2], 1)


def show(**row):
    print(json.dumps({"first": seconds, "context": context, **row}), flush=True)


def grow(size, count, label):
    """Blocks of one size, all kept and then freed."""
    blocks = [alloc(size) for _ in range(count)]
    times, frees = [took for _, took in blocks], [free(pointer) for pointer, _ in blocks]
    rest = times[3:]
    show(label="grow " + label, mib=size // MIB, first3=[round(took, 1) for took in times[:3]], rest=median(rest),
         mean=round(sum(rest) / len(rest), 1), free=median(frees))


def doubling(label):
    """256 MiB to 8 GiB, each once, all kept and then freed."""
    blocks = [alloc((256 << step) * MIB) for step in range(6)]
    frees = [free(pointer) for pointer, _ in blocks]
    show(label="doubling " + label, alloc=[round(took, 1) for _, took in blocks],
         sum=round(sum(took for _, took in blocks)), free=[round(took, 1) for took in frees])


def half(label):
    pointer, took = alloc(64204 * MIB)
    show(label="half " + label, alloc=round(took, 1), free=round(free(pointer), 1))


def loops():
    """One block at a time, with and without a pause after its free."""
    for mib in [2, 20, 128, 512, 1024, 2048, 8192]:
        for pause in (0, 0.05):
            times, frees = [], []
            for _ in range(9):
                pointer, took = alloc(mib * MIB)
                times.append(took)
                frees.append(free(pointer))
                time.sleep(pause)
            show(label="loop", mib=mib, pause=pause, alloc=median(times), low=round(min(times), 1),
                 high=round(max(times), 1), free=median(frees))


seconds, order = float(sys.argv[1]), sys.argv[2]
check(cuda.cuInit(0))
check(cuda.cuDeviceGet(ctypes.byref(device), 0))
for context in range(3):
    handle = ctypes.c_void_p()
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(handle), device))
    check(cuda.cuCtxSetCurrent(handle))
    time.sleep(seconds)
    if order == "half":
        half("a")
    if order == "doubling":
        doubling("a")
    if order == "grow":
        grow(20 * MIB, 60, "a")
    doubling("b")
    grow(20 * MIB, 60, "b")
    grow(2 * MIB, 60, "b")
    time.sleep(0.3)
    half("b")
    doubling("c")
    time.sleep(0.3)
    doubling("d")
    for mib, count in [(20, 60), (128, 20), (512, 10), (1024, 10), (8192, 5)]:
        grow(mib * MIB, count, "d")
    if context == 1:
        loops()
    check(cuda.cuDevicePrimaryCtxRelease_v2(device))
