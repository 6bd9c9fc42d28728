#!/usr/bin/env python3
"""Measures the workspaces that PyTorch requests for cuDNN's convolutions, on a GPU: a random sample of shapes, one CSV line each.

usage: tools/shadow/measure_convolutions.py SEED SECONDS OUT.csv
"""
import csv, os, random, sys, time, torch
import torch.nn.functional as F
seed, seconds, out = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
random.seed(seed); dev = "cuda"; t0 = time.time()
w = csv.writer(open(out, "w")); w.writerow("op,dims,n,c,k,size,kernel,stride,padding,dilation,groups,dtype,layout,tf32,requests,workspaces".split(","))
R = "requested_bytes.all.allocated"; A = "allocation.all.allocated"
def totals(): s = torch.cuda.memory_stats(); return s[R], s[A]
def measure(f, outputs):
    b = totals(); r = f(); e = totals()
    made = sum(t.numel() * t.element_size() for t in (r if isinstance(r, tuple) else (r,)) if t is not None)
    return e[1] - b[1], e[0] - b[0] - made
torch.zeros(1, device=dev)
while time.time() - t0 < seconds:
    dims = random.choices([1, 2, 3], [1, 10, 1])[0]; dt = random.choice([torch.bfloat16, torch.float16, torch.float32]); cl = dims > 1 and random.random() < .5
    n = random.choice([1, 2, 4, 8, 16, 32, 64]); ch = [3, 4, 16, 32, 64, 80, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 2048]; c = random.choice(ch); k = random.choice(ch)
    size = random.choice([7, 8, 14, 16, 28, 32, 56, 64, 80, 112, 128, 160, 192, 224, 256, 320]) if dims == 2 else random.choice([8, 16, 32]) if dims == 3 else random.choice([100, 500, 1500, 3000])
    ker = random.choices([1, 3, 5, 7], [3, 6, 1, 1])[0]; st = random.choices([1, 2, 4], [6, 3, 1])[0]; pad = random.choice([0, ker // 2, ker // 2]); dil = random.choices([1, 2], [12, 1])[0]; g = random.choices([1, 32, c], [14, 1, 1])[0]
    patch = random.random() < .05
    if patch: ker = st = random.choice([8, 14, 16, 32]); pad = 0; c = 3; size = 224; dims = 2; g = 1; dil = 1
    if c % g or k % g or size + 2 * pad < dil * (ker - 1) + 1: continue
    o = (size + 2 * pad - dil * (ker - 1) - 1) // st + 1
    if max(n * c * size ** dims, n * k * o ** dims) * 4 > 1 << 30 or n * k * o ** dims * c // g * ker ** dims > 4e12: continue
    try:
        x = torch.randn(n, c, *[size] * dims, device=dev).to(dt); y = torch.randn(k, c // g, *[ker] * dims, device=dev).to(dt)
        if cl: f = torch.channels_last if dims == 2 else torch.channels_last_3d; x = x.contiguous(memory_format=f); y = y.contiguous(memory_format=f)
        conv = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]; r = []
        gr = conv(x, y, None, st, pad, dil, g); gy = torch.randn_like(gr); del gr
        r.append(("forward", measure(lambda: conv(x, y, None, st, pad, dil, g), 1)))
        bw = lambda m: measure(lambda: torch.ops.aten.convolution_backward(gy, x, y, None, [st] * dims, [pad] * dims, [dil] * dims, False, [0] * dims, g, m), 1)
        r.append(("data", bw([True, False, False]))); r.append(("weight", bw([False, True, False])))
        for op, (req, ws) in r: w.writerow([op, dims, n, c, k, size, ker, st, pad, dil, g, str(dt)[6:], "nhwc" if cl else "nchw", int(torch.backends.cudnn.allow_tf32), req, ws])
        del x, y, gy
    except RuntimeError as e: torch.cuda.empty_cache(); continue
