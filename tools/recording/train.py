#!/usr/bin/env python3
"""A typical script: trains a GPT-2 on texts of different lengths. docs/out-of-memory.md shows it from an OOM to a fix.

    python3 train.py --batch 64
    python3 train.py --batch 64 --keep-outputs     with a fault: the outputs of every step are kept for statistics

The texts are random tokens. The script does not depend on oomph: the recording lines are in a separate file (`--import`).
"""

import argparse
import importlib
import random
import sys

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--layers", type=int, default=24)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--heads", type=int, default=16)
parser.add_argument("--shortest", type=int, default=128)
parser.add_argument("--longest", type=int, default=1024)
parser.add_argument("--keep-outputs", action="store_true", help="the fault that fills memory step by step")
parser.add_argument("--import", dest="recording", help="a module to import first, such as the lines of `oomph record`")
options = parser.parse_args()

if options.recording:
    sys.path.insert(0, ".")
    importlib.import_module(options.recording)

import torch  # noqa: E402, the recording lines go before everything that uses PyTorch
from transformers import GPT2Config, GPT2LMHeadModel  # noqa: E402

torch.manual_seed(1)
random.seed(1)
config = GPT2Config(n_layer=options.layers, n_embd=options.width, n_head=options.heads, n_positions=options.longest)
model = GPT2LMHeadModel(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
kept = []

for step in range(options.steps):
    length = random.randint(options.shortest, options.longest)
    tokens = torch.randint(0, config.vocab_size, (options.batch, length), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = model(input_ids=tokens, labels=tokens)
    loss = output.loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if options.keep_outputs:
        kept.append(output.logits.detach())
    del output
    used = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.memory_reserved() / 2**30
    print(f"step {step:3} length {length:5} loss {loss.item():7.3f} peak {used[0]:6.1f} GiB reserved {used[1]:6.1f} GiB", flush=True)
