#!/usr/bin/env python3
"""Programs whose shapes change from step to step. Settings of the strategy `oomph` are chosen on their recordings.

    oomph rehearse -o FOLDER -- python3 varied.py NAME

They differ from the programs of programs.py, on which no setting is chosen: other models, sizes and patterns of the same
kinds. Weights and data are random, with seed 3. A rehearsal takes seconds and needs no GPU, so recordings are not kept.
"""

import argparse
import os
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

DEVICE = "cuda"
VOCABULARY = 50304


class Layer(nn.Module):
    """A block of a GPT with biases and grouped keys and values."""

    def __init__(self, width, heads, groups):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * groups * self.size)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def keys_values(self, x):
        batch, length, _ = x.shape
        return self.kv(x).view(batch, length, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)

    def attend(self, x, keys, values, causal):
        batch, length, width = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, keys, values, is_causal=causal, enable_gqa=True)
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        normed = self.norm1(x)
        x = x + self.attend(normed, *self.keys_values(normed), causal=True)
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, width, layers, heads, groups):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width, heads, groups) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def train(model, optimizer, tokens, dtype=torch.bfloat16):
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def words(batch, length):
    return torch.randint(0, VOCABULARY, (batch, length), device=DEVICE)


def serve_concatenate():
    """A server whose keys and values of every request grow by concatenation."""
    model = Gpt(1536, 12, 12, 4).to(DEVICE, torch.bfloat16).eval()
    requests = []
    with torch.inference_mode():
        for _ in range(220):
            if len(requests) < 16 and random.random() < 0.3:
                length = random.randrange(100, 2000)
                x, cache = model.tokens(words(1, length)), []
                for layer in model.layers:
                    normed = layer.norm1(x)
                    keys, values = layer.keys_values(normed)
                    cache.append((keys, values))
                    x = x + layer.attend(normed, keys, values, True)
                    x = x + layer.mlp(layer.norm2(x))
                requests.append([cache, random.randrange(20, 200)])
            for request in requests:
                x = model.tokens(words(1, 1))
                for place, layer in enumerate(model.layers):
                    normed = layer.norm1(x)
                    keys, values = layer.keys_values(normed)
                    old_keys, old_values = request[0][place]
                    keys, values = torch.cat([old_keys, keys], 2), torch.cat([old_values, values], 2)
                    request[0][place] = (keys, values)
                    x = x + layer.attend(normed, keys, values, False)
                    x = x + layer.mlp(layer.norm2(x))
                model.head(model.norm(x)).argmax(-1)
                request[1] -= 1
            requests = [request for request in requests if request[1] > 0]


def serve_double():
    """A server whose caches double when they are full."""
    model = Gpt(1024, 16, 16, 16).to(DEVICE, torch.float16).eval()
    requests = []
    with torch.inference_mode():
        for _ in range(400):
            if len(requests) < 32 and random.random() < 0.5:
                length = random.randrange(16, 600)
                model(words(1, length))
                cache = [torch.empty(2, 16, length, 64, device=DEVICE, dtype=torch.float16) for _ in model.layers]
                requests.append([cache, length, random.randrange(50, 500)])
            for request in requests:
                request[1] += 1
                if request[1] > request[0][0].shape[2]:
                    request[0] = [torch.cat([old, torch.empty_like(old)], 2) for old in request[0]]
                request[2] -= 1
            requests = [request for request in requests if request[2] > 0]


def sharded(layers, width, heads, batches, recompute):
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000))
    dist.init_process_group("nccl", rank=0, world_size=1)
    model = Gpt(width, layers, heads, heads).to(DEVICE)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        if recompute:
            layer.forward = recomputed(layer.forward)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch, length in batches:
        train(model, optimizer, words(batch, length), None)
    dist.destroy_process_group()


def recomputed(forward):
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def shard():
    """Fully sharded, on one rank, steady shapes."""
    sharded(10, 1024, 16, [(6, 769)] * 12, False)


def shard_recompute():
    """Fully sharded, with checkpoints and two lengths."""
    sharded(14, 1280, 20, [(8, random.choice([513, 1025])) for _ in range(14)], True)


def crops():
    """A convolutional net for crops of random sizes."""

    def stage(inputs, outputs):
        parts = []
        for place in range(3):
            stride = 2 if place == 0 else 1
            parts += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
            inputs = outputs
        return nn.Sequential(*parts)

    widths = [48, 96, 192, 384, 768]
    stages = nn.Sequential(*(stage(i, o) for i, o in zip([3] + widths, widths)))
    model = nn.Sequential(stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(768, 1000)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(40):
        batch, size = random.choice([16, 24, 32, 48]), random.randrange(160, 449, 32)
        images = torch.randn(batch, 3, size, size, device=DEVICE)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(images), torch.randint(0, 1000, (batch,), device=DEVICE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def denoise():
    """A net of residual blocks with skips and attention at the bottom; buckets of aspect ratios."""

    class Residual(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.norm1, self.norm2 = nn.GroupNorm(16, inputs), nn.GroupNorm(16, outputs)
            self.conv1, self.conv2 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
            self.skip = nn.Conv2d(inputs, outputs, 1)

        def forward(self, x):
            return self.skip(x) + self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            widths = [96, 192, 384]
            self.first, self.last = nn.Conv2d(4, 96, 3, padding=1), nn.Conv2d(96, 4, 3, padding=1)
            self.down = nn.ModuleList(Residual(i, o) for i, o in zip([96] + widths, widths))
            self.attention = nn.MultiheadAttention(384, 6, batch_first=True)
            self.up = nn.ModuleList(Residual(2 * o, i) for i, o in zip([96, 96, 192], [96, 192, 384]))

        def forward(self, x):
            x, kept = self.first(x), []
            for down in self.down:
                x = down(x)
                kept.append(x)
                x = F.avg_pool2d(x, 2)
            batch, width, height, breadth = x.shape
            flat = x.flatten(2).transpose(1, 2)
            x = (flat + self.attention(flat, flat, flat, need_weights=False)[0]).transpose(1, 2)
            x = x.reshape(batch, width, height, breadth)
            for up in reversed(self.up):
                x = up(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1))
            return self.last(x)

    model = Net().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(36):
        height, breadth = random.choice([(64, 64), (48, 80), (80, 48), (96, 96), (40, 104), (128, 128)])
        x = torch.randn(random.choice([8, 12, 16]), 4, height, breadth, device=DEVICE)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def translate():
    """An encoder and a decoder, fp16 with a scaler, lengths of both vary."""
    model = nn.Transformer(768, 12, 6, 6, 3072, batch_first=True).to(DEVICE)
    embedding, head = nn.Embedding(VOCABULARY, 768).to(DEVICE), nn.Linear(768, VOCABULARY).to(DEVICE)
    parameters = [*model.parameters(), *embedding.parameters(), *head.parameters()]
    optimizer, scaler = torch.optim.Adam(parameters), torch.amp.GradScaler()
    for _ in range(36):
        batch = random.choice([8, 16, 24])
        source, target = words(batch, random.randrange(20, 400)), words(batch, random.randrange(20, 300))
        with torch.autocast("cuda", torch.float16):
            logits = head(model(embedding(source), embedding(target)))
            loss = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def adapters():
    """A frozen bf16 model with trained adapters and checkpoints, lengths vary."""
    model = Gpt(1280, 12, 20, 5).to(DEVICE, torch.bfloat16).requires_grad_(False)
    adapter = nn.ModuleList(nn.Sequential(nn.Linear(1280, 32), nn.ReLU(), nn.Linear(32, 1280)) for _ in model.layers)
    adapter.to(DEVICE, torch.bfloat16)
    optimizer = torch.optim.AdamW(adapter.parameters())
    for _ in range(30):
        tokens = words(random.choice([1, 2, 3, 6]), random.randrange(200, 1800, 8))
        x = model.tokens(tokens).requires_grad_()
        for layer, small in zip(model.layers, adapter):
            x = checkpoint(lambda y, layer=layer, small=small: layer(y) + small(y), x, use_reentrant=False)
        logits = model.head(model.norm(x))
        F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def rollouts():
    """Rollouts of random length are collected, then trained on in small batches."""
    model = Gpt(768, 8, 12, 12).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(8):
        kept = []
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            for _ in range(10):
                tokens = words(4, random.randrange(64, 700))
                kept.append((tokens, model(tokens).float().logsumexp(-1)))
        random.shuffle(kept)
        for tokens, old in kept:
            with torch.autocast("cuda", torch.bfloat16):
                new = model(tokens).float().logsumexp(-1)
            (new - old).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def evaluate():
    """Training with a larger batch for evaluation every few steps."""
    model = Gpt(896, 10, 14, 7).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(30):
        train(model, optimizer, words(6, 512))
        if step % 5 == 4:
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                for _ in range(3):
                    model(words(20, random.randrange(300, 800)))


def copies():
    """Two side streams copy batches that vary, with record_stream."""
    model = Gpt(768, 6, 12, 12).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    sides = [torch.cuda.Stream(), torch.cuda.Stream()]
    for step in range(30):
        with torch.cuda.stream(sides[step % 2]):
            shape = (random.choice([4, 8]), random.randrange(129, 1025, 64))
            tokens = torch.randint(0, VOCABULARY, shape).pin_memory().to(DEVICE, non_blocking=True)
            images = torch.empty(random.randrange(10, 60) << 18).pin_memory().to(DEVICE, non_blocking=True)
        torch.cuda.current_stream().wait_stream(sides[step % 2])
        tokens.record_stream(torch.cuda.current_stream())
        images.record_stream(torch.cuda.current_stream())
        train(model, optimizer, tokens)
        del images


def ragged():
    """Tables with sparse gradients and sums over ragged groups."""
    tables = nn.ModuleList(nn.Embedding(400_000, 96, sparse=True) for _ in range(6)).to(DEVICE)
    top = nn.Sequential(nn.Linear(576, 2048), nn.ReLU(), nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 1)).to(DEVICE)
    optimizer = torch.optim.SGD([*tables.parameters(), *top.parameters()], lr=0.1)
    for _ in range(60):
        groups, features = 4096, []
        for table in tables:
            count = random.randrange(30_000, 160_000)
            rows, group = (torch.randint(0, most, (count,), device=DEVICE) for most in (400_000, groups))
            features.append(torch.zeros(groups, 96, device=DEVICE).index_add(0, group, table(rows)))
        top(torch.cat(features, 1)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def experts():
    """Experts with a capacity, in blocks with attention."""
    width, count = 640, 8
    attention = nn.ModuleList(Layer(width, 10, 10) for _ in range(4)).to(DEVICE)
    experts = nn.ModuleList(
        nn.ModuleList(nn.Sequential(nn.Linear(width, 2560), nn.SiLU(), nn.Linear(2560, width)) for _ in range(count))
        for _ in range(4)
    ).to(DEVICE)
    optimizer = torch.optim.AdamW([*attention.parameters(), *experts.parameters()])
    for _ in range(30):
        x = torch.randn(random.choice([4, 8, 12]), random.randrange(256, 1025, 32), width, device=DEVICE)
        with torch.autocast("cuda", torch.bfloat16):
            for layer, choices in zip(attention, experts):
                x = layer(x)
                flat = x.flatten(0, 1)
                rest = [random.random() for _ in choices]
                sizes = [int(len(flat) * share / sum(rest)) for share in rest]
                sizes[-1] += len(flat) - sum(sizes)
                x = x + torch.cat([expert(part) for expert, part in zip(choices, flat.split(sizes))]).view_as(x)
            loss = x.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


PROGRAMS = [
    adapters, copies, crops, denoise, evaluate, experts, ragged, rollouts, serve_concatenate, serve_double, shard,
    shard_recompute, translate,
]

if __name__ == "__main__":
    by_name = {program.__name__: program for program in PROGRAMS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=by_name)
    torch.manual_seed(3)
    random.seed(3)
    by_name[parser.parse_args().name]()
