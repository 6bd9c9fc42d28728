#!/usr/bin/env python3
"""Measures the spaces of cuDNN's recurrent networks, on a GPU: a random sample of networks, two CSV lines each.

usage: tools/shadow/measure_recurrent.py SEED NETWORKS OUT.csv

Each line has the arguments of cudnnSetRNNDescriptor_v8 and cudnnSetRNNDataDescriptor, the sum of the lengths of all
sequences (`vectors`), the mode (0 inference, 1 training), and the answers of cudnnGetRNNTempSpaceSizes (work, reserve)
and cudnnGetRNNWeightSpaceSize (weights). cuDNN refuses some networks; they are counted and left out. Nothing is computed,
so 60,000 networks take some seconds. The rules in crates/shadow/core/cudnn/recurrent/sizes.rs come from such answers.
"""
import csv
import ctypes
import random
import sys
from ctypes import byref, c_double, c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Dict, List, Optional, Tuple

import torch

COLUMNS = (
    "algo cell bias dir dtype prec math input hidden proj layers dropout flags layout steps batch vectors "
    "mode work reserve weights"
).split()
SIZES = [1, 3, 8, 16, 20, 32, 48, 64, 100, 128, 200, 256, 300, 384, 512, 640, 768, 1000, 1024, 2048]
RELU, TANH, LSTM, GRU = range(4)
STANDARD, PERSIST_STATIC, PERSIST_DYNAMIC, SMALL_HIDDEN = range(4)
FLOAT, DOUBLE, HALF, BFLOAT16 = 0, 1, 2, 9
DROPOUTS = (0.0, 0.2)


def loaded_cudnn() -> ctypes.CDLL:
    """The cuDNN that PyTorch uses: its first recurrent layer loads it."""
    torch.nn.LSTM(8, 8).cuda()(torch.zeros(2, 2, 8, device="cuda"))
    with open("/proc/self/maps") as maps:
        return ctypes.CDLL(next(line.split()[-1] for line in maps if "libcudnn.so" in line))


def draw() -> Tuple[Dict[str, int], float, List[int]]:
    """A network, its dropout, and the lengths of its sequences. Where PyTorch's rules allow a persistent algorithm
    (sequences that are not packed, no projection), it is often taken; batches and lengths lie close to the bounds at
    which cuDNN changes its chunks."""
    n = random.randrange
    dtype = random.choice([FLOAT, FLOAT, FLOAT, HALF, HALF, BFLOAT16, BFLOAT16, DOUBLE])
    cell = random.choice([RELU, TANH, LSTM, LSTM, LSTM, GRU, GRU])
    hidden = random.choice([random.choice(SIZES), n(1, 400), n(1, 1500)])
    proj = max(1, hidden // n(2, 5)) if cell == LSTM and n(9) == 0 else hidden
    steps = random.choice([n(1, 40), n(85, 140), n(1, 700)])
    batch = random.choice([n(1, 25), n(80, 110), n(1, 300), random.choice([1, 8, 16, 32, 64, 128, 256, 512])])
    packed = n(4) == 0
    algo = STANDARD
    if proj == hidden and not packed:
        wanted = random.choice([SMALL_HIDDEN, SMALL_HIDDEN, PERSIST_STATIC, random.choice([STANDARD, PERSIST_DYNAMIC])])
        small = hidden <= (384 if cell in (RELU, TANH) else 192) and dtype != DOUBLE
        if wanted != SMALL_HIDDEN or small:
            algo = wanted
    lengths = [steps] * batch
    if packed:
        lengths = [steps] + sorted((n(1, steps + 1) for _ in range(batch - 1)), reverse=True)
    network = dict(
        algo=algo,
        cell=cell,
        bias=random.choice([0, 2, 2]),
        dir=n(2),
        dtype=dtype,
        prec=DOUBLE if dtype == DOUBLE else FLOAT,
        math={FLOAT: random.choice([0, 3]), DOUBLE: 0}.get(dtype, 1),
        input=random.choice([random.choice(SIZES), n(1, 1500)]),
        hidden=hidden,
        proj=proj,
        layers=random.choice([1, 1, 2, 2, 3, 4, 6]),
        flags=0 if packed else 1,
        layout=1 if packed else 0,
        steps=steps,
        batch=batch,
        vectors=sum(lengths),
    )
    return network, random.choice([DROPOUTS[0], *DROPOUTS]), lengths


class Cudnn:
    """One descriptor of each kind, set anew for each network."""

    def __init__(self) -> None:
        self.library = loaded_cudnn()
        self.handle, self.network, self.data = c_void_p(), c_void_p(), c_void_p()
        self.check(self.library.cudnnCreate(byref(self.handle)))
        self.check(self.library.cudnnCreateRNNDescriptor(byref(self.network)))
        self.check(self.library.cudnnCreateRNNDataDescriptor(byref(self.data)))
        size = c_size_t()
        self.check(self.library.cudnnDropoutGetStatesSize(self.handle, byref(size)))
        self.states = torch.empty(size.value, dtype=torch.uint8, device="cuda")
        self.dropouts = {probability: self.dropout(probability, size) for probability in DROPOUTS}

    @staticmethod
    def check(status: int) -> None:
        if status:
            raise RuntimeError(f"cuDNN answers {status}")

    def dropout(self, probability: float, size: c_size_t) -> c_void_p:
        descriptor = c_void_p()
        self.check(self.library.cudnnCreateDropoutDescriptor(byref(descriptor)))
        states, seed = c_void_p(self.states.data_ptr()), c_ulonglong(1)
        self.check(
            self.library.cudnnSetDropoutDescriptor(descriptor, self.handle, c_float(probability), states, size, seed)
        )
        return descriptor

    def ask(self, r: Dict[str, int], dropout: float, lengths: List[int]) -> Optional[List[List[int]]]:
        """Mode, work, reserve and weights for each mode, or None where cuDNN refuses the network."""
        library, input_mode, padding = self.library, 0, c_double(0)
        work, reserve, weights = c_size_t(), c_size_t(), c_size_t()
        answers = []
        try:
            first = [r[name] for name in "algo cell bias dir".split()]
            second = [r[name] for name in "dtype prec math input hidden proj layers".split()]
            flags = c_uint(r["flags"])
            self.check(
                library.cudnnSetRNNDescriptor_v8(
                    self.network, *first, input_mode, *second, self.dropouts[dropout], flags
                )
            )
            shape = [r[name] for name in "dtype layout steps batch input".split()]
            array = (c_int * len(lengths))(*lengths)
            self.check(library.cudnnSetRNNDataDescriptor(self.data, *shape, array, byref(padding)))
            self.check(library.cudnnGetRNNWeightSpaceSize(self.handle, self.network, byref(weights)))
            for mode in (0, 1):
                self.check(
                    library.cudnnGetRNNTempSpaceSizes(
                        self.handle, self.network, mode, self.data, byref(work), byref(reserve)
                    )
                )
                answers.append([mode, work.value, reserve.value, weights.value])
        except RuntimeError:
            return None
        return answers


def main(seed: int, networks: int, path: str) -> None:
    random.seed(seed)
    cudnn = Cudnn()
    refused = 0
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(COLUMNS)
        for _ in range(networks):
            network, dropout, lengths = draw()
            answers = cudnn.ask(network, dropout, lengths)
            refused += answers is None
            for answer in answers or []:
                out.writerow([{**network, "dropout": dropout}[name] for name in COLUMNS[:17]] + answer)
    print(f"{networks} networks, {refused} refused")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
