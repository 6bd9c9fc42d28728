"""How long operations take after memory was given back to the driver, which clears it.

    clearing.py    prints one JSON line for each experiment; times are milliseconds, of seven turns

Blocks of 64 MiB are allocated, written and given back by `cuMemFree`, or by `cuMemUnmap` and `cuMemRelease`. After a pause, one
operation on memory that was allocated before is timed.
"""

import ctypes
import json
import time

MIB = 1 << 20
BLOCK, COPIED = 64 * MIB, 38 * MIB
TURNS = 7
cuda = ctypes.CDLL("libcuda.so.1")
Pointer, Size = ctypes.c_uint64, ctypes.c_size_t


class AllocationProperties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    _fields_ = [("location_type", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int)]


def check(code):
    if code:
        raise SystemExit(f"CUDA error {code}")


def new(function, *arguments):
    made = Pointer()
    check(function(ctypes.byref(made), *arguments))
    return made


def wait():
    check(cuda.cuCtxSynchronize())


def alloc():
    return new(cuda.cuMemAlloc_v2, Size(BLOCK))


def free(address):
    check(cuda.cuMemFree_v2(address))


def map_new():
    physical = new(cuda.cuMemCreate, Size(BLOCK), ctypes.byref(AllocationProperties(type=1, location_type=1)), Pointer(0))
    address = new(cuda.cuMemAddressReserve, Size(BLOCK), Size(0), Pointer(0), Pointer(0))
    check(cuda.cuMemMap(address, Size(BLOCK), Size(0), physical, Pointer(0)))
    check(cuda.cuMemSetAccess(address, Size(BLOCK), ctypes.byref(Access(1, 0, 3)), Size(1)))
    mapped[address.value] = physical
    return address


def unmap(address):
    check(cuda.cuMemUnmap(address, Size(BLOCK)))
    check(cuda.cuMemRelease(mapped.pop(address.value)))
    check(cuda.cuMemAddressFree(address, Size(BLOCK)))


def fill(address, size=BLOCK):
    check(cuda.cuMemsetD8Async(address, ctypes.c_ubyte(1), Size(size), None))


def pageable_in():
    check(cuda.cuMemcpyHtoD_v2(target, pageable, Size(COPIED)))


def pinned_in():
    check(cuda.cuMemcpyHtoDAsync_v2(target, pinned, Size(COPIED), None))
    wait()


def pinned_out():
    check(cuda.cuMemcpyDtoHAsync_v2(pinned, target, Size(COPIED), None))
    wait()


def kernel():
    fill(target, COPIED)
    wait()


def show(operation, gib, pause=0, take=alloc, give=free):
    times, frees = [], []
    for _ in range(TURNS):
        blocks = [take() for _ in range(gib * 16)]
        for block in blocks:
            fill(block)
        wait()
        time.sleep(0.1)
        begin = time.perf_counter()
        for block in blocks:
            give(block)
        given = time.perf_counter()
        while time.perf_counter() < given + pause / 1e3:
            pass
        before = time.perf_counter()
        operation()
        times.append(round(1e3 * (time.perf_counter() - before), 3))
        frees.append(round(1e3 * (given - begin), 3))
        time.sleep(0.1)
    row = {"operation": operation.__name__, "given_back_gib": gib, "by": give.__name__, "pause": pause}
    print(json.dumps({**row, "giving_back": sorted(frees)[TURNS // 2], "took": sorted(times)}), flush=True)


check(cuda.cuInit(0))
device, context, mapped = ctypes.c_int(), ctypes.c_void_p(), {}
check(cuda.cuDeviceGet(ctypes.byref(device), 0))
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
check(cuda.cuCtxSetCurrent(context))
pageable = ctypes.create_string_buffer(COPIED)
pinned = ctypes.c_void_p()
check(cuda.cuMemAllocHost_v2(ctypes.byref(pinned), Size(COPIED)))
target = alloc()
for timed in (pageable_in, pinned_in, pinned_out, kernel):
    for amount in (0, 1, 6):
        show(timed, amount)
for amount in (2, 4, 12, 24):
    show(pageable_in, amount)
for length in (5, 20, 100):
    show(pageable_in, 6, pause=length)
for amount in (1, 6, 24):
    show(pageable_in, amount, take=map_new, give=unmap)
