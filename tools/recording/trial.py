#!/usr/bin/env python3
"""Programs that are hard for allocators: caches that grow, shapes that vary, several models one after another.

    trial.py --list                                         the names; --describe: with a description
    oomph rehearse -o FOLDER -- python3 trial.py NAME       its recording, without a GPU; SEED (11) in the environment
    oomph replay FOLDER/rank-0.pickle -s caching:expandable_segments:True -s oomph

The strategy `oomph` is compared with expandable segments on them. Values are not computed in a rehearsal, so shapes come from
Python's random numbers.
"""

import copy
import os
import random
import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

DEVICE = "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
WORDS = 32000
PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


class Block(nn.Module):
    """A block of a transformer; `latent` adds MLA's low rank of keys and values."""

    def __init__(self, width, heads, causal=True, dropout=0.0):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        batch, length, width = x.shape
        return self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)

    def finish(self, x, mixed):
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))

    def forward(self, x):
        q, k, v = self.split(x)
        return self.finish(x, F.scaled_dot_product_attention(q, k, v, is_causal=self.causal))

    def step(self, x, cache):
        """One more token; `cache` is None or a pair. Returns the output and the new pair."""
        q, k, v = self.split(x)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None and self.causal)
        return self.finish(x, mixed), (k, v)


class Gpt(nn.Module):
    def __init__(self, width, layers, heads, words=WORDS, causal=True, dropout=0.0):
        super().__init__()
        self.words = words
        self.tokens = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, heads, causal, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def features(self, tokens, recompute=False):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        return self.norm(x)

    def forward(self, tokens, recompute=False):
        return self.head(self.features(tokens, recompute))

    def step(self, tokens, caches):
        x, new = self.tokens(tokens), []
        for place, layer in enumerate(self.layers):
            x, cache = layer.step(x, caches[place] if caches else None)
            if caches:
                caches[place] = cache
            new.append(cache)
        return self.head(self.norm(x[:, -1:])), new


def on_gpu(kind, *arguments, **options):
    with torch.device(DEVICE):
        return kind(*arguments, **options)


def words(batch, length, count=WORDS):
    return torch.randint(0, count, (batch, length), device=DEVICE)


def noise(*shape, **options):
    return torch.randn(*shape, device=DEVICE, **options)


def language_loss(model, tokens, recompute=False, dtype=BF16):
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        logits = model(tokens[:, :-1], recompute)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def update(optimizer, loss=None):
    if loss is not None:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def conv(i, o, stride=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


# ---- the seven that were named


@program
def shrinking_batch():
    """Training where the batch shrinks every few steps."""
    model = on_gpu(Gpt, 1024, 10, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(48):
        update(optimizer, language_loss(model, words(17 - step // 3, 769)))


class Mla(nn.Module):
    """Latent attention: what is cached is one vector of 512 (and one of 64 for the rotary part) for each token."""

    def __init__(self, width, heads, one_size, temporaries):
        super().__init__()
        self.heads, self.one_size, self.temporaries = heads, one_size, temporaries
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q = nn.Linear(width, heads * 192, bias=False)
        self.latent, self.rotary = nn.Linear(width, 512, bias=False), nn.Linear(width, 64, bias=False)
        self.expand = nn.Linear(512, heads * 256, bias=False)
        self.absorb, self.release = nn.Linear(128, 512, bias=False), nn.Linear(512, 128, bias=False)
        self.out = nn.Linear(heads * 128, width, bias=False)
        self.up, self.down = nn.Linear(width, 3 * width, bias=False), nn.Linear(3 * width, width, bias=False)

    def forward(self, x, cache):
        batch, length, width = x.shape
        normed = self.norm1(x)
        latent, rotary = self.latent(normed), self.rotary(normed)
        if self.one_size:
            both = torch.cat([latent, rotary], 2)
            cache = (both if cache is None else torch.cat([cache[0], both], 1),)
            latent, rotary = cache[0].split([512, 64], 2)
        else:
            cache = (latent, rotary) if cache is None else (torch.cat([cache[0], latent], 1), torch.cat([cache[1], rotary], 1))
            latent, rotary = cache
        q = self.q(normed).view(batch, length, self.heads, 192).transpose(1, 2)
        if self.temporaries:
            total = latent.shape[1]
            k, v = self.expand(latent).view(batch, total, self.heads, 256).transpose(1, 2).split([128, 128], 3)
            k = torch.cat([k, rotary.unsqueeze(1).expand(-1, self.heads, -1, -1)], 3)
            mixed = F.scaled_dot_product_attention(q, k, F.pad(v, (0, 64)))[..., :128]
        else:
            content = self.absorb(q[..., :128]).reshape(batch, -1, 512)
            scores = content @ latent.transpose(1, 2) + q[..., 128:].reshape(batch, -1, 64) @ rotary.transpose(1, 2)
            mixed = self.release(scores.softmax(-1) @ latent).view(batch, self.heads, length, 128)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.silu(self.up(self.norm2(x)))), cache


def decode_mla(one_size, temporaries, batch=24, layers=24, prompt=1200, steps=120):
    with torch.device(DEVICE):
        model = nn.ModuleList(Mla(1024, 8, one_size, temporaries) for _ in range(layers)).to(BF16)
        tokens, head = nn.Embedding(WORDS, 1024, dtype=BF16), nn.Linear(1024, WORDS, dtype=BF16)
    with torch.inference_mode():
        caches = [None] * layers
        for step in range(steps):
            # The prompt goes through in four parts, as with chunked prefill.
            x = tokens(words(batch, prompt // 4 if step < 4 else 1))
            for place, layer in enumerate(model):
                x, caches[place] = layer(x, caches[place])
            head(x[:, -1]).argmax(-1)


program_of = {
    "kv_mla": ("Decoding with latent KV caches that grow by torch.cat, many layers.", (False, True)),
    "mla_no_temp": ("kv_mla without expanded keys and values.", (False, False)),
    "mla_one_size": ("kv_mla with one cache tensor per layer, all of one size.", (True, True)),
}
for name, (text, flags) in program_of.items():
    function = partial(decode_mla, *flags)
    function.__doc__ = text
    PROGRAMS[name] = function


@program
def kv_cat_batches():
    """KV caches by torch.cat, several batches one after another."""
    model = on_gpu(Gpt, 1536, 16, 12).to(BF16).eval()
    with torch.inference_mode():
        for batch, prompt, more in [(8, 700, 50), (16, 400, 50), (4, 1500, 40), (12, 900, 40), (20, 300, 60), (8, 700, 50)]:
            logits, caches = model.step(words(batch, prompt), None)
            for _ in range(more):
                logits, caches = model.step(logits.argmax(-1), caches)
            del caches, logits


@program
def gan():
    """Two models and two optimizers, alternating."""

    def generator():
        parts, widths = [], [1024, 512, 256, 128, 64]
        for i, o in zip(widths, widths[1:]):
            parts += [nn.ConvTranspose2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]
        first = nn.Sequential(nn.ConvTranspose2d(128, 1024, 4, 1, 0, bias=False), nn.BatchNorm2d(1024), nn.ReLU(inplace=True))
        return nn.Sequential(first, *parts, nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh())

    def discriminator():
        parts, widths = [], [3, 64, 128, 256, 512, 1024]
        for i, o in zip(widths, widths[1:]):
            parts += [nn.Conv2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.2, inplace=True)]
        return nn.Sequential(*parts, nn.Conv2d(1024, 1, 4))

    g, d = on_gpu(generator), on_gpu(discriminator)
    of_g, of_d = (torch.optim.Adam(m.parameters(), 2e-4, (0.5, 0.999)) for m in (g, d))
    for step in range(40):
        batch = 128 if step % 8 < 7 else 80
        real = noise(batch, 3, 128, 128)
        fake = g(noise(batch, 128, 1, 1))
        of_d.zero_grad()
        F.binary_cross_entropy_with_logits(d(real), torch.ones(batch, 1, 1, 1, device=DEVICE)).backward()
        F.binary_cross_entropy_with_logits(d(fake.detach()), torch.zeros(batch, 1, 1, 1, device=DEVICE)).backward()
        of_d.step()
        of_g.zero_grad()
        F.binary_cross_entropy_with_logits(d(fake), torch.ones(batch, 1, 1, 1, device=DEVICE)).backward()
        of_g.step()


@program
def beam_search():
    """Growing caches that are reordered by index_select."""
    model = on_gpu(Gpt, 1024, 16, 16).to(FP16).eval()
    with torch.inference_mode():
        for batch, beams, prompt, more in [(8, 5, 200, 60), (4, 8, 500, 50), (12, 4, 120, 60)]:
            logits, caches = model.step(words(batch, prompt).repeat_interleave(beams, 0), None)
            scores = torch.zeros(batch * beams, 1, device=DEVICE)
            for _ in range(more):
                total = (logits[:, -1].float().log_softmax(-1) + scores).view(batch, -1)
                best = total.topk(beams, 1)
                scores = best.values.view(-1, 1)
                order = torch.randint(0, batch * beams, (batch * beams,), device=DEVICE)
                caches = [(k.index_select(0, order), v.index_select(0, order)) for k, v in caches]
                logits, caches = model.step(best.indices.view(-1, 1) % WORDS, caches)
            del caches, logits


# ---- others: training of language models


class Lora(nn.Module):
    def __init__(self, inner, rank):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a = nn.Parameter(torch.zeros(rank, inner.in_features, device=DEVICE, dtype=BF16))
        self.b = nn.Parameter(torch.zeros(inner.out_features, rank, device=DEVICE, dtype=BF16))

    def forward(self, x):
        return self.inner(x) + (x @ self.a.T) @ self.b.T


@program
def lora():
    """LoRA fine-tuning of a frozen bf16 model, varied lengths and paddings."""
    model = on_gpu(Gpt, 1536, 20, 12).to(BF16).requires_grad_(False)
    for layer in model.layers:
        for name in ("qkv", "out", "up", "down"):
            setattr(layer, name, Lora(getattr(layer, name), 16))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for _ in range(40):
        update(optimizer, language_loss(model, words(4, random.randrange(60, 1100)), dtype=None))


def lengths_in_order(lengths):
    model = on_gpu(Gpt, 896, 10, 14)
    optimizer = torch.optim.AdamW(model.parameters())
    for length in lengths:
        update(optimizer, language_loss(model, words(10, length)))


@program
def curriculum():
    """Lengths grow step by step."""
    lengths_in_order([128 + 20 * step for step in range(50)])


@program
def decreasing():
    """Lengths shrink step by step."""
    lengths_in_order([1128 - 20 * step for step in range(50)])


@program
def sorted_batches():
    """Three epochs of batches sorted by length, the longest first."""
    data = sorted((random.randrange(40, 1000) for _ in range(16)), reverse=True)
    lengths_in_order(data * 3)


@program
def token_budget():
    """Batches of about equal token counts: short lengths have large batches."""
    model = on_gpu(Gpt, 1024, 10, 16, dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(40):
        length = int(40 * 25 ** random.random())
        update(optimizer, language_loss(model, words(8000 // length, length + 1)))


@program
def accumulation():
    """Gradient accumulation over micro-batches of varied sizes."""
    model = on_gpu(Gpt, 1024, 12, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(16):
        for _ in range(random.choice([2, 3, 4])):
            (language_loss(model, words(random.choice([1, 2, 4, 6]), random.randrange(200, 1025))) / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update(optimizer)


@program
def checkpoint_varied():
    """Checkpointed layers, varied lengths, fused head in chunks."""
    model = on_gpu(Gpt, 1280, 14, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(30):
        tokens = words(random.choice([2, 4, 8]), random.randrange(300, 1500))
        with torch.autocast("cuda", BF16):
            x = model.features(tokens[:, :-1], True).flatten(0, 1)
            targets = tokens[:, 1:].flatten()
            part = lambda a, b: F.cross_entropy(model.head(a).float(), b, reduction="sum")
            loss = sum(checkpoint(part, a, b, use_reentrant=False) for a, b in zip(x.split(2048), targets.split(2048)))
        update(optimizer, loss)


@program
def offload():
    """Inputs of layers are kept in host memory, on a side stream."""
    model = on_gpu(Gpt, 768, 10, 12)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(15):
        tokens = words(4, random.randrange(128, 700))
        with torch.autograd.graph.save_on_cpu():
            with torch.autocast("cuda", BF16):
                x = model.features(tokens[:, :-1])
        with torch.autocast("cuda", BF16):
            loss = F.cross_entropy(model.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())
        update(optimizer, loss)


@program
def unfreezing():
    """Layers are unfrozen one after another, with a new optimizer each time."""
    model = on_gpu(Gpt, 1024, 14, 16).requires_grad_(False)
    model.head.requires_grad_(True)
    for stage in range(8):
        for layer in model.layers[len(model.layers) - 2 * stage :]:
            layer.requires_grad_(True)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        for _ in range(5):
            update(optimizer, language_loss(model, words(8, random.choice([257, 385, 513]))))


@program
def ema():
    """Averaged weights, and evaluation with them."""
    model = on_gpu(Gpt, 896, 12, 14)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(30):
        update(optimizer, language_loss(model, words(8, random.randrange(200, 600))))
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.01)
        if step % 6 == 5:
            with torch.no_grad():
                for _ in range(2):
                    language_loss(average, words(20, random.randrange(200, 600)))


@program
def sam():
    """Sharpness-aware minimization: two passes for each step, and copies of all weights."""
    model = on_gpu(Gpt, 896, 10, 14)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    for _ in range(24):
        tokens = words(random.choice([6, 8, 10]), random.choice([257, 513]))
        language_loss(model, tokens).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            steps = [p.grad * (0.05 / (norm + 1e-12)) for p in parameters]
            for p, e in zip(parameters, steps):
                p.add_(e)
        optimizer.zero_grad()
        language_loss(model, tokens).backward()
        with torch.no_grad():
            for p, e in zip(parameters, steps):
                p.sub_(e)
        del steps
        update(optimizer)


@program
def distillation():
    """A large teacher and a small student, varied lengths."""
    teacher, student = on_gpu(Gpt, 1536, 16, 12).to(BF16).eval(), on_gpu(Gpt, 768, 8, 12)
    optimizer = torch.optim.AdamW(student.parameters())
    for _ in range(30):
        tokens = words(random.choice([4, 6]), random.randrange(100, 700))
        with torch.no_grad():
            target = F.softmax(teacher(tokens).float() / 2, -1)
        with torch.autocast("cuda", BF16):
            logits = student(tokens)
        update(optimizer, F.kl_div(F.log_softmax(logits.float() / 2, -1), target, reduction="batchmean"))
        del target, logits


@program
def preference():
    """DPO: chosen and rejected answers of varied lengths, a policy and a reference."""
    policy, reference = on_gpu(Gpt, 1024, 12, 16), on_gpu(Gpt, 1024, 12, 16).to(BF16).eval()
    optimizer = torch.optim.AdamW(policy.parameters())

    def likelihood(model, tokens):
        return model(tokens[:, :-1]).float().log_softmax(-1).gather(2, tokens[:, 1:, None]).sum((1, 2))

    for _ in range(24):
        pairs = [words(3, random.randrange(100, 800)) for _ in range(2)]
        with torch.no_grad():
            old = [likelihood(reference, tokens) for tokens in pairs]
        with torch.autocast("cuda", BF16):
            new = [likelihood(policy, tokens) for tokens in pairs]
        update(optimizer, -F.logsigmoid((new[0] - old[0]) - (new[1] - old[1])).mean())
        del new, old


@program
def multi_task():
    """A shared body; each batch has another task with a head of its own."""
    with torch.device(DEVICE):
        body = Gpt(1024, 10, 16, 100)
        heads = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, n)) for n in (2, 5000, 50000, 300, 12000))
    optimizer = torch.optim.AdamW([*body.parameters(), *heads.parameters()])
    for _ in range(45):
        task = random.randrange(5)
        tokens = words([32, 12, 6, 20, 10][task], random.randrange(64, 500), 100)
        with torch.autocast("cuda", BF16):
            x = body.features(tokens)
            logits = heads[task](x.mean(1) if task == 0 else x)
        update(optimizer, logits.float().logsumexp(-1).mean())


@program
def gradient_penalty():
    """A critic with a penalty of its gradient (double backward)."""
    with torch.device(DEVICE):
        widths = [3, 64, 128, 256, 512]
        parts = [nn.Sequential(nn.Conv2d(i, o, 5, 2, 2), nn.LeakyReLU(0.2)) for i, o in zip(widths, widths[1:])]
        critic = nn.Sequential(*parts, nn.Flatten(), nn.Linear(512 * 64, 1))
        maker = nn.Sequential(nn.Linear(128, 512 * 64), nn.Unflatten(1, (512, 8, 8)), *(
            nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(i, o, 3, padding=1), nn.ReLU()) for i, o in zip(widths[:0:-1], [256, 128, 64, 64])
        ), nn.Conv2d(64, 3, 3, padding=1))
    of_c, of_m = torch.optim.Adam(critic.parameters()), torch.optim.Adam(maker.parameters())
    for step in range(40):
        batch = random.choice([48, 64])
        real = noise(batch, 3, 128, 128)
        with torch.no_grad():
            fake = maker(noise(batch, 128))
        mixed = torch.lerp(real, fake, 0.5).requires_grad_()
        slope = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)[0]
        update(of_c, critic(fake).mean() - critic(real).mean() + 10 * (slope.flatten(1).norm(2, 1) - 1).square().mean())
        del slope, mixed, fake
        if step % 5 == 4:
            update(of_m, -critic(maker(noise(batch, 128))).mean())


# ---- sound, images, graphs


@program
def speech():
    """A convolutional front, a transformer and CTC-like loss; random durations."""
    with torch.device(DEVICE):
        front = nn.Sequential(nn.Conv1d(80, 512, 3, 2, 1), nn.GELU(), nn.Conv1d(512, 768, 3, 2, 1), nn.GELU())
        body = nn.ModuleList(Block(768, 12, False, 0.1) for _ in range(12))
        head = nn.Linear(768, 5000)
    optimizer = torch.optim.AdamW([*front.parameters(), *body.parameters(), *head.parameters()])
    for _ in range(40):
        batch, frames = random.choice([8, 12, 16]), random.randrange(300, 2400)
        with torch.autocast("cuda", BF16):
            x = front(noise(batch, 80, frames)).transpose(1, 2)
            for layer in body:
                x = layer(x)
            loss = head(x).float().log_softmax(-1)[..., 0].mean()
        update(optimizer, loss)


@program
def detection():
    """A pyramid of features, varied image sizes, and varied counts of boxes with crops and pairwise overlaps."""
    with torch.device(DEVICE):
        stages = nn.ModuleList(nn.Sequential(conv(i, o, 2), conv(o, o), conv(o, o)) for i, o in [(3, 64), (64, 128), (128, 256), (256, 512)])
        lateral = nn.ModuleList(nn.Conv2d(c, 128, 1) for c in (128, 256, 512))
        box = nn.Sequential(nn.Linear(128 * 49, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 85))
    optimizer = torch.optim.SGD([*stages.parameters(), *lateral.parameters(), *box.parameters()], 0.01, momentum=0.9)
    for _ in range(36):
        height, width = random.randrange(480, 900, 32), random.randrange(480, 1300, 32)
        with torch.autocast("cuda", FP16):
            x, levels = noise(4, 3, height, width), []
            for place, stage in enumerate(stages):
                x = stage(x)
                if place:
                    levels.append(lateral[place - 1](x))
            loss = 0
            for image in range(4):
                anchors, truth = random.randrange(2000, 20000), random.randrange(1, 80)
                a, b = torch.rand(anchors, 4, device=DEVICE), torch.rand(truth, 4, device=DEVICE)
                corner = torch.max(a[:, None, :2], b[:, :2])
                size = (torch.min(a[:, None, 2:], b[:, 2:]) - corner).clamp(min=0)
                size.prod(2).max(1)
                crops = []
                for level in levels:
                    count = random.randrange(20, 200)
                    grid = torch.rand(count, 7, 7, 2, device=DEVICE) * 2 - 1
                    crops.append(F.grid_sample(level[image : image + 1].float().expand(count, -1, -1, -1)[:, :, ::2, ::2], grid))
                loss = loss + box(torch.cat(crops).flatten(1)).float().logsumexp(-1).sum()
        update(optimizer, loss)
        del x, levels, crops, a, b, corner, size, loss


@program
def graph_net():
    """Graphs with varied numbers of nodes and edges."""
    with torch.device(DEVICE):
        edge = nn.ModuleList(nn.Sequential(nn.Linear(512, 256), nn.SiLU(), nn.Linear(256, 256)) for _ in range(6))
        node = nn.ModuleList(nn.Sequential(nn.Linear(512, 256), nn.SiLU(), nn.Linear(256, 256)) for _ in range(6))
    optimizer = torch.optim.Adam([*edge.parameters(), *node.parameters()])
    for _ in range(50):
        nodes = random.randrange(5_000, 60_000)
        edges = nodes * random.randrange(4, 12)
        source, target = (torch.randint(0, nodes, (edges,), device=DEVICE) for _ in range(2))
        x = noise(nodes, 256)
        for of_edge, of_node in zip(edge, node):
            message = of_edge(torch.cat([x[source], x[target]], 1))
            x = x + of_node(torch.cat([x, torch.zeros_like(x).index_add(0, target, message)], 1))
        update(optimizer, x.square().mean())


class Residual(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, i), nn.GroupNorm(32, o)
        self.conv1, self.conv2, self.skip = nn.Conv2d(i, o, 3, padding=1), nn.Conv2d(o, o, 3, padding=1), nn.Conv2d(i, o, 1)

    def forward(self, x):
        return self.skip(x) + self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))


class Unet(nn.Module):
    def __init__(self, widths=(192, 384, 768), channels=4):
        super().__init__()
        w = list(widths)
        self.first, self.last = nn.Conv2d(channels, w[0], 3, padding=1), nn.Conv2d(w[0], channels, 3, padding=1)
        self.down = nn.ModuleList(nn.ModuleList([Residual(i, o), Residual(o, o)]) for i, o in zip([w[0]] + w, w))
        self.middle = Block(w[-1], w[-1] // 64, False)
        self.up = nn.ModuleList(nn.ModuleList([Residual(2 * o, o), Residual(o, i)]) for i, o in zip([w[0]] + w, w))

    def forward(self, x):
        x, kept = self.first(x), []
        for place, (a, b) in enumerate(self.down):
            x = b(a(x))
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        shape = x.shape
        x = self.middle(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(shape)
        for a, b in reversed(self.up):
            skip = kept.pop()
            x = b(a(torch.cat([F.interpolate(x, skip.shape[2:]), skip], 1)))
        return self.last(x)


@program
def diffusion_sampling():
    """A U-Net with classifier-free guidance, several jobs of varied sizes, then a decoder for the image."""
    unet = on_gpu(Unet, (256, 512, 1024)).to(FP16).eval()
    with torch.device(DEVICE):
        decoder = nn.Sequential(nn.Conv2d(4, 256, 3, padding=1), *(
            nn.Sequential(Residual(i, o), nn.Upsample(scale_factor=2), nn.Conv2d(o, o, 3, padding=1)) for i, o in [(256, 256), (256, 128), (128, 64)]
        ), nn.Conv2d(64, 3, 3, padding=1)).to(FP16).eval()
    images = []
    with torch.inference_mode():
        for batch, height, width in [(1, 64, 64), (4, 64, 64), (2, 96, 64), (1, 128, 128), (4, 64, 96), (2, 128, 96), (8, 64, 64), (1, 64, 64), (2, 112, 112)]:
            x = noise(batch, 4, height, width, dtype=FP16)
            for _ in range(10):
                a, b = unet(torch.cat([x, x])).chunk(2)
                x = x - 0.1 * (b + 7.5 * (a - b))
            images.append(decoder(x).float())
            if len(images) > 4:
                images.pop(0)


@program
def tiling():
    """A VAE decodes large images by overlapping tiles that are blended."""
    with torch.device(DEVICE):
        decoder = nn.Sequential(nn.Conv2d(16, 384, 3, padding=1), *(
            nn.Sequential(Residual(i, o), nn.Upsample(scale_factor=2), nn.Conv2d(o, o, 3, padding=1)) for i, o in [(384, 384), (384, 192), (192, 96)]
        ), nn.Conv2d(96, 3, 3, padding=1)).to(BF16).eval()
    with torch.inference_mode():
        for _ in range(8):
            height, width = random.randrange(128, 400, 8), random.randrange(128, 400, 8)
            latent, rows = noise(1, 16, height, width, dtype=BF16), []
            for top in range(0, height, 48):
                row = []
                for left in range(0, width, 48):
                    tile = decoder(latent[:, :, top : top + 64, left : left + 64])
                    if row:
                        cover = min(128, row[-1].shape[3], tile.shape[3])
                        tile[..., :cover] = (tile[..., :cover] + row[-1][..., -cover:]) / 2
                    row.append(tile)
                rows.append(torch.cat([tile[:, :, :384, :384] for tile in row], 3))
            torch.cat(rows, 2).clamp(-1, 1).float()
            del rows, row, tile


@program
def segmentation_3d():
    """A 3-D net, random patches; whole volumes by a sliding window every few steps."""

    def double(i, o):
        return nn.Sequential(nn.Conv3d(i, o, 3, padding=1), nn.InstanceNorm3d(o), nn.LeakyReLU(), nn.Conv3d(o, o, 3, padding=1), nn.InstanceNorm3d(o), nn.LeakyReLU())

    with torch.device(DEVICE):
        down = nn.ModuleList([double(1, 32), double(32, 64), double(64, 128)])
        up = nn.ModuleList([double(96, 32), double(192, 64)])
        last = nn.Conv3d(32, 4, 1)

    def forward(x):
        a = down[0](x)
        b = down[1](F.max_pool3d(a, 2))
        c = down[2](F.max_pool3d(b, 2))
        b = up[1](torch.cat([F.interpolate(c, b.shape[2:]), b], 1))
        return last(up[0](torch.cat([F.interpolate(b, a.shape[2:]), a], 1)))

    optimizer = torch.optim.AdamW([*down.parameters(), *up.parameters(), *last.parameters()])
    for step in range(32):
        size = [random.randrange(64, 129, 16) for _ in range(3)]
        with torch.autocast("cuda", FP16):
            loss = forward(noise(2, 1, *size)).float().logsumexp(1).mean()
        update(optimizer, loss)
        if step % 8 == 7:
            with torch.no_grad(), torch.autocast("cuda", FP16):
                whole = noise(1, 1, 192, 256, 256)
                out = torch.zeros(1, 4, 192, 256, 256, device=DEVICE)
                for z in range(0, 192, 96):
                    for y in range(0, 256, 128):
                        out[:, :, z : z + 96, y : y + 128, :128] += forward(whole[:, :, z : z + 96, y : y + 128, :128])
                del whole, out


@program
def video():
    """Inference over a video by sliding windows; features of the last windows are kept."""
    with torch.device(DEVICE):
        net = nn.Sequential(*(nn.Sequential(nn.Conv3d(i, o, 3, (1, 2, 2), 1), nn.BatchNorm3d(o), nn.ReLU(True), nn.Conv3d(o, o, 3, 1, 1), nn.ReLU(True)) for i, o in [(3, 64), (64, 128), (128, 256)])).to(FP16).eval()
        mixer = nn.ModuleList(Block(256, 8, False) for _ in range(4)).to(FP16).eval()
    with torch.inference_mode():
        for height, width in [(224, 224), (256, 320), (192, 256), (320, 320)]:
            memory = []
            for _ in range(14):
                memory.append(net(noise(1, 3, 16, height, width, dtype=FP16)).flatten(2).transpose(1, 2))
                if len(memory) > 8:
                    memory.pop(0)
                x = torch.cat(memory, 1)
                for layer in mixer:
                    x = layer(x)
            del x


@program
def contrastive():
    """Large batches with cached embeddings (GradCache): first without gradients, then part by part."""
    with torch.device(DEVICE):
        text, image = Gpt(768, 8, 12, 30000, False), nn.Sequential(nn.Conv2d(3, 768, 16, 16), nn.Flatten(2))
        body = nn.ModuleList(Block(768, 12, False) for _ in range(8))
    tower = nn.Sequential(*body)
    see = lambda pixels: tower(image(pixels).transpose(1, 2)).mean(1)
    read = lambda tokens: text.features(tokens).mean(1)
    optimizer = torch.optim.AdamW([*text.parameters(), *image.parameters(), *body.parameters()])
    for _ in range(10):
        count = random.choice([4, 6, 8])
        parts = [(noise(64, 3, 224, 224), words(64, random.randrange(16, 77), 30000)) for _ in range(count)]
        with torch.autocast("cuda", BF16):
            with torch.no_grad():
                kept = [(see(a), read(b)) for a, b in parts]
            left = torch.cat([a for a, _ in kept]).float().requires_grad_()
            right = torch.cat([b for _, b in kept]).float().requires_grad_()
            F.cross_entropy(left @ right.T, torch.arange(64 * count, device=DEVICE)).backward()
            for (a, b), x, y in zip(parts, left.grad.split(64), right.grad.split(64)):
                torch.autograd.backward([see(a), read(b)], [x.to(BF16), y.to(BF16)])
        update(optimizer)
        del parts, kept, left, right


@program
def knn_bank():
    """A bank of features that grows, and nearest neighbours of each batch in it."""
    with torch.device(DEVICE):
        net = nn.Sequential(conv(3, 64, 2), conv(64, 128, 2), conv(128, 256, 2), conv(256, 512, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    bank = torch.empty(0, 512, device=DEVICE)
    with torch.inference_mode():
        for _ in range(60):
            features = net(noise(random.choice([96, 128]), 3, 224, 224))
            bank = torch.cat([bank, features, noise(6000, 512)])
            torch.cdist(features, bank).topk(20, largest=False)


@program
def recurrent():
    """An LSTM with packed sequences of varied lengths."""
    with torch.device(DEVICE):
        tokens, lstm, head = nn.Embedding(WORDS, 768), nn.LSTM(768, 1024, 3, batch_first=True, dropout=0.2), nn.Linear(1024, WORDS)
    optimizer = torch.optim.Adam([*tokens.parameters(), *lstm.parameters(), *head.parameters()])
    for _ in range(40):
        batch = random.choice([16, 24, 32])
        lengths = sorted((random.randrange(5, 160) for _ in range(batch)), reverse=True)
        x = nn.utils.rnn.pack_padded_sequence(tokens(words(batch, lengths[0])), torch.tensor(lengths), batch_first=True)
        out, _ = lstm(x)
        update(optimizer, F.cross_entropy(head(out.data), torch.randint(0, WORDS, (sum(lengths),), device=DEVICE)))


@program
def cells():
    """A loop over LSTM cells with attention over all earlier states (many small tensors), varied lengths."""
    with torch.device(DEVICE):
        tokens, cell, head, attend = nn.Embedding(WORDS, 512), nn.LSTMCell(1024, 1024), nn.Linear(1024, 8000), nn.Linear(1024, 512)
    optimizer = torch.optim.Adam([*tokens.parameters(), *cell.parameters(), *head.parameters(), *attend.parameters()])
    for _ in range(24):
        batch = 64
        h = c = torch.zeros(batch, 1024, device=DEVICE)
        context, states, loss = torch.zeros(batch, 512, device=DEVICE), [], 0
        for _ in range(random.randrange(15, 60)):
            h, c = cell(torch.cat([tokens(words(batch, 1)[:, 0]), context], 1), (h, c))
            states.append(attend(h))
            memory = torch.stack(states, 1)
            context = (torch.softmax((memory * states[-1][:, None]).sum(2), 1)[..., None] * memory).sum(1)
            loss = loss + head(h).logsumexp(1).mean()
        update(optimizer, loss)


@program
def per_sample():
    """Gradients of each sample with vmap, clipped and summed, varied batches."""
    from torch.func import functional_call, grad, vmap

    with torch.device(DEVICE):
        model = nn.Sequential(
            nn.Conv2d(3, 64, 3, 2, 1), nn.GroupNorm(8, 64), nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1), nn.GroupNorm(8, 128), nn.ReLU(),
            nn.Conv2d(128, 256, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 100),
        )
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    one = lambda p, x, y: F.cross_entropy(functional_call(model, p, (x[None],)), y[None])
    for _ in range(24):
        batch = random.choice([32, 48, 64, 96])
        grads = vmap(grad(one), (None, 0, 0))(parameters, noise(batch, 3, 64, 64), torch.randint(0, 100, (batch,), device=DEVICE))
        norms = torch.stack([g.flatten(1).norm(2, 1) for g in grads.values()]).norm(2, 0)
        factor = (1 / (norms + 1e-6)).clamp(max=1)
        for name, g in grads.items():
            parameters[name] = parameters[name] - 0.1 * torch.einsum("i,i...->...", factor, g)
        del grads


@program
def routing():
    """A mixture of experts; tokens go to experts by index, shares are random."""
    width = 768
    with torch.device(DEVICE):
        layers = nn.ModuleList(Block(width, 12) for _ in range(6))
        experts = nn.ModuleList(nn.ModuleList(nn.Sequential(nn.Linear(width, 2048), nn.SiLU(), nn.Linear(2048, width)) for _ in range(12)) for _ in range(6))
    optimizer = torch.optim.AdamW([*layers.parameters(), *experts.parameters()])
    for _ in range(25):
        x = noise(8, 512, width)
        with torch.autocast("cuda", BF16):
            for layer, choices in zip(layers, experts):
                x = layer(x)
                flat = x.flatten(0, 1)
                out = torch.zeros_like(flat)
                for expert in choices:
                    count = int(len(flat) * 2 / 12 * random.choice([0.2, 0.5, 1, 1, 1.5, 3]))
                    index = torch.randint(0, len(flat), (count,), device=DEVICE)
                    out = out.index_add(0, index, expert(flat[index]).to(out.dtype))
                x = x + out.view_as(x)
            loss = x.float().square().mean()
        update(optimizer, loss)


# ---- reinforcement learning


def atari(outputs):
    return nn.Sequential(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, outputs))


@program
def ppo():
    """Rollouts into a list, stacked, then several epochs of shuffled parts."""
    model = on_gpu(atari, 19)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(8):
        seen, values = [], []
        with torch.no_grad():
            for _ in range(64):
                frame = torch.randint(0, 256, (128, 4, 84, 84), device=DEVICE, dtype=torch.uint8)
                seen.append(frame)
                values.append(model(frame.float() / 255))
        frames, old = torch.cat(seen), torch.cat(values)
        del seen, values
        for _ in range(3):
            order = torch.randperm(len(frames), device=DEVICE)
            for part in order.split(2048):
                out = model(frames[part].float() / 255)
                update(optimizer, (out - old[part]).square().mean())
        del frames, old, order, part, out


@program
def replay_buffer():
    """A buffer of tensors that fills up, then the oldest ones go; batches are stacked from it."""
    model = on_gpu(atari, 18)
    target = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters())
    buffer = []
    for _ in range(60):
        for _ in range(30):
            buffer.append(torch.randint(0, 256, (random.choice([8, 16, 24]), 4, 84, 84), device=DEVICE, dtype=torch.uint8))
        while len(buffer) > 1000:
            buffer.pop(random.randrange(200))
        for _ in range(2):
            x = torch.cat(random.sample(buffer, 30)).float() / 255
            with torch.no_grad():
                y = target(x).max(1).values
            update(optimizer, (model(x).mean(1) - y).square().mean())


@program
def rlhf():
    """Generation with a growing cache, scores of three models, then training, varied lengths."""
    actor, critic, reference = on_gpu(Gpt, 768, 10, 12), on_gpu(Gpt, 768, 6, 12, 64), on_gpu(Gpt, 768, 10, 12).to(BF16).eval()
    critic.tokens = on_gpu(nn.Embedding, WORDS, 768)
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (actor, critic)]
    for _ in range(6):
        prompt = words(16, random.randrange(50, 400))
        pieces = [prompt]
        with torch.no_grad(), torch.autocast("cuda", BF16):
            logits, caches = actor.step(prompt, None)
            for _ in range(random.randrange(10, 40)):
                pieces.append(logits.argmax(-1))
                logits, caches = actor.step(pieces[-1], caches)
            del caches, logits
            tokens = torch.cat(pieces, 1)
            old, base = actor(tokens).float().logsumexp(-1), reference(tokens).float().logsumexp(-1)
            value = critic(tokens).float().mean(-1)
        for _ in range(2):
            for rows in torch.arange(16, device=DEVICE).split(4):
                with torch.autocast("cuda", BF16):
                    loss = (actor(tokens[rows]).float().logsumexp(-1) - old[rows] + base[rows] - value[rows]).square().mean()
                    of_critic = (critic(tokens[rows]).float().mean(-1) - value[rows]).square().mean()
                update(optimizers[0], loss)
                update(optimizers[1], of_critic)
        del old, base, value, tokens, loss, of_critic


# ---- serving, loading


@program
def speculative():
    """A small model proposes tokens, a large one checks them; both caches are cut back."""
    small, large = on_gpu(Gpt, 768, 6, 12).to(BF16).eval(), on_gpu(Gpt, 2048, 18, 16).to(BF16).eval()
    cut = lambda caches, length: [(k[:, :, :length].contiguous(), v[:, :, :length].contiguous()) for k, v in caches]
    with torch.inference_mode():
        for prompt in (300, 900, 500):
            tokens = words(12, prompt)
            _, a = small.step(tokens, None)
            _, b = large.step(tokens, None)
            length = prompt
            for _ in range(16):
                token = words(12, 1)
                for _ in range(5):
                    logits, a = small.step(token, a)
                    token = logits.argmax(-1)
                _, b = large.step(words(12, 5), b)
                length += random.randrange(1, 6)
                a, b = cut(a, length), cut(b, length)
            del a, b


@program
def server():
    """Continuous batching: one cache for all requests, padded; requests join and leave, prompts are random."""
    model = on_gpu(Gpt, 1536, 14, 12).to(BF16).eval()
    caches, left = None, []
    with torch.inference_mode():
        for _ in range(110):
            if len(left) < 20 and (random.random() < 0.35 or not left):
                _, new = model.step(words(1, random.randrange(30, 1200)), None)
                if caches is None:
                    caches = new
                else:
                    for place, pair in enumerate(new):
                        length = max(pair[0].shape[2], caches[place][0].shape[2])
                        pad = lambda t: F.pad(t, (0, 0, length - t.shape[2], 0))
                        caches[place] = tuple(torch.cat([pad(x), pad(y)]) for x, y in zip(caches[place], pair))
                del new
                left.append(random.randrange(5, 60))
            _, caches = model.step(words(len(left), 1), caches)
            left = [count - 1 for count in left]
            stay = [place for place, count in enumerate(left) if count > 0]
            if len(stay) < len(left):
                left = [left[place] for place in stay]
                index = torch.tensor(stay, device=DEVICE, dtype=torch.long)
                caches = [(k[index], v[index]) for k, v in caches] if stay else None


@program
def paged():
    """Caches in fixed blocks on demand, beside prompts of random length."""
    model = on_gpu(Gpt, 1536, 14, 12).to(BF16).eval()
    requests = []
    with torch.inference_mode():
        for _ in range(150):
            if len(requests) < 40 and random.random() < 0.6:
                length = random.randrange(30, 2500)
                model.features(words(1, length))
                requests.append([[torch.empty(14, 2, 12, 256, 128, device=DEVICE, dtype=BF16) for _ in range(length // 256 + 1)], length, random.randrange(10, 120)])
            for request in requests:
                request[1] += 4
                if request[1] > 256 * len(request[0]):
                    request[0].append(torch.empty(14, 2, 12, 256, 128, device=DEVICE, dtype=BF16))
                request[2] -= 1
            if requests:
                model.features(words(len(requests), 1))
            requests = [request for request in requests if request[2] > 0]


@program
def embeddings_server():
    """An encoder for batches of random sizes and lengths; results are kept in a cache that drops random ones."""
    model = on_gpu(Gpt, 1024, 16, 16, WORDS, False).to(FP16).eval()
    kept = {}
    with torch.inference_mode():
        for step in range(150):
            kept[step] = model.features(words(random.choice([1, 2, 4, 8, 16, 32]), random.randrange(8, 512)))
            while len(kept) > 40:
                del kept[random.choice(list(kept))]


@program
def folds():
    """Training of several models one after another, each with another size, averaged predictions are kept."""
    kept = []
    for fold, (width, layers) in enumerate([(768, 10), (1024, 8), (640, 14), (896, 10), (1152, 8)]):
        model = on_gpu(Gpt, width, layers, width // 64)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(8):
            update(optimizer, language_loss(model, words(8, random.randrange(200, 600))))
        with torch.no_grad(), torch.autocast("cuda", BF16):
            kept.append(torch.cat([model(words(16, 128))[:, -1] for _ in range(4)]))
        del model, optimizer


@program
def swap():
    """Models are loaded, used and deleted in turn, without empty_cache."""
    with torch.inference_mode():
        for width, layers, heads in [(2048, 16, 16), (1280, 24, 20), (3072, 10, 24), (1024, 12, 16), (2560, 14, 20), (2048, 16, 16), (1280, 24, 20)]:
            model = on_gpu(lambda: Gpt(width, layers, heads).to(BF16)).eval()
            for _ in range(6):
                logits, caches = model.step(words(random.choice([1, 2, 4]), random.randrange(100, 1500)), None)
                for _ in range(4):
                    logits, caches = model.step(logits.argmax(-1), caches)
            del model, logits, caches


@program
def shards():
    """A checkpoint in shards: each comes as fp32 to the GPU and is copied into the model's bf16; then inference."""
    with torch.device("meta"):
        model = Gpt(2048, 20, 16)
    names = list(model.state_dict())
    size = len(names) // 6 + 1
    for at in range(0, len(names), size):
        shard = {name: torch.empty(model.state_dict()[name].shape, device=DEVICE) for name in names[at : at + size]}
        model.load_state_dict({name: t.to(BF16) for name, t in shard.items()}, strict=False, assign=True)
        del shard
    with torch.inference_mode():
        for _ in range(25):
            model(words(random.choice([1, 2, 4]), random.randrange(100, 1500)))


@program
def quantize():
    """fp32 layers are made int8 with scales one by one; inference dequantizes each weight."""
    model = on_gpu(Gpt, 2048, 14, 16)

    class Int8(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.scale = (linear.weight.abs().amax(1, keepdim=True) / 127).to(FP16)
            self.weight = (linear.weight / self.scale).round().clamp(-128, 127).to(torch.int8)
            self.bias = None if linear.bias is None else linear.bias.detach().to(FP16)

        def forward(self, x):
            return F.linear(x, self.weight.to(FP16) * self.scale, self.bias)

    with torch.no_grad():
        for layer in model.layers:
            for name in ("qkv", "out", "up", "down"):
                setattr(layer, name, Int8(getattr(layer, name)))
            layer.to(FP16)
        model.head = Int8(model.head)
        model.to(FP16)
        for _ in range(6):
            logits, caches = model.step(words(random.choice([1, 4, 8]), random.randrange(100, 1200)), None)
            for _ in range(10):
                logits, caches = model.step(logits.argmax(-1), caches)
            del caches, logits


@program
def layer_stream():
    """Layers of a model too large come to the GPU one by one on a side stream, two at a time."""
    with torch.device(DEVICE):
        block = Block(3072, 24).to(BF16).eval()
    side = torch.cuda.Stream()
    shapes = {name: p.shape for name, p in block.named_parameters()}
    with torch.inference_mode():
        for _ in range(6):
            x = noise(2, random.randrange(100, 1500), 3072, dtype=BF16)
            weights = None
            for _ in range(16):
                with torch.cuda.stream(side):
                    new = {name: torch.zeros(shape, device=DEVICE, dtype=BF16) for name, shape in shapes.items()}
                torch.cuda.current_stream().wait_stream(side)
                for t in new.values():
                    t.record_stream(torch.cuda.current_stream())
                x = torch.func.functional_call(block, new, (x,))
                weights = new
            del weights, new


@program
def prefetch():
    """A loader that copies the next batch on a side stream with record_stream, varied sizes."""
    with torch.device(DEVICE):
        net = nn.Sequential(conv(3, 64, 2), conv(64, 128), conv(128, 256, 2), conv(256, 512, 2), conv(512, 512, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    side = torch.cuda.Stream()

    def load():
        size = random.randrange(128, 289, 32)
        with torch.cuda.stream(side):
            return torch.empty(random.choice([32, 48]), 3, size, size).pin_memory().to(DEVICE, non_blocking=True).to(memory_format=torch.channels_last)

    following = load()
    for _ in range(40):
        torch.cuda.current_stream().wait_stream(side)
        images = following
        images.record_stream(torch.cuda.current_stream())
        following = load()
        with torch.autocast("cuda", FP16):
            loss = net(images).float().logsumexp(1).mean()
        update(optimizer, loss)


@program
def two_streams():
    """Two models for inference, each on its own stream, varied sizes."""
    models = [on_gpu(Gpt, 1024, 12, 16).to(BF16).eval() for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in models]
    with torch.inference_mode():
        for step in range(80):
            place = random.randrange(2) if step % 20 < 15 else 0
            with torch.cuda.stream(streams[place]):
                models[place](words(random.choice([2, 4, 8, 16]), random.randrange(50, 600)))


def one_rank():
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000))
    dist.init_process_group("nccl", rank=0, world_size=1)
    return dist


@program
def fsdp2():
    """FSDP2 on one rank, varied lengths, evaluation with larger batches between."""
    dist = one_rank()
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = on_gpu(Gpt, 1280, 12, 20)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(24):
        update(optimizer, language_loss(model, words(6, random.randrange(200, 800)), dtype=None))
        if step % 8 == 7:
            with torch.no_grad():
                language_loss(model, words(16, 700), dtype=None)
    dist.destroy_process_group()


@program
def ddp():
    """DistributedDataParallel on one rank, varied lengths."""
    dist = one_rank()
    model = nn.parallel.DistributedDataParallel(on_gpu(Gpt, 1024, 12, 16), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(24):
        update(optimizer, language_loss(model, words(6, random.randrange(200, 800))))
    dist.destroy_process_group()


# ---- training with values that stay


@program
def kept_losses():
    """A leak: outputs of some steps stay alive, in small and large tensors."""
    model = on_gpu(Gpt, 896, 10, 14)
    optimizer = torch.optim.AdamW(model.parameters())
    kept = []
    for step in range(36):
        tokens = words(8, random.randrange(150, 500))
        with torch.autocast("cuda", BF16):
            features = model.features(tokens)
            loss = model.head(features).float().logsumexp(-1).mean()
        update(optimizer, loss)
        kept.append((loss, features.detach()[:, : random.randrange(10, 150)].clone()))


@program
def progressive():
    """Images grow (32 to 256) and batches shrink in stages, as in progressive training."""
    with torch.device(DEVICE):
        net = nn.Sequential(conv(3, 64), conv(64, 96, 2), conv(96, 192, 2), conv(192, 384, 2), conv(384, 768, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(768, 100))
    optimizer = torch.optim.AdamW(net.parameters())
    for size, batch in [(32, 512), (64, 256), (96, 192), (128, 128), (160, 96), (192, 64), (224, 48), (256, 40)]:
        for step in range(6):
            with torch.autocast("cuda", BF16):
                loss = net(noise(batch if step < 5 else batch // 3, 3, size, size)).float().logsumexp(1).mean()
            update(optimizer, loss)


@program
def diffusion_training():
    """A diffusion U-Net with buckets of aspect ratios, averaged weights and samples between."""
    model = on_gpu(Unet, (128, 256, 512))
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(28):
        height, width = random.choice([(64, 64), (48, 80), (80, 48), (56, 72), (96, 96), (40, 104)])
        with torch.autocast("cuda", BF16):
            x = noise(random.choice([8, 16]), 4, height, width)
            loss = F.mse_loss(model(x).float(), x)
        update(optimizer, loss)
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.001)
        if step % 9 == 8:
            with torch.no_grad(), torch.autocast("cuda", BF16):
                y = noise(8, 4, 64, 64)
                for _ in range(4):
                    y = y - 0.1 * average(torch.cat([y, y])).chunk(2)[0]


@program
def sequence_packing():
    """fp32 attention with explicit masks and scores (no fused kernel), packed sequences of varied total length."""
    with torch.device(DEVICE):
        tokens, head = nn.Embedding(WORDS, 512), nn.Linear(512, WORDS)
        layers = nn.ModuleList(nn.ModuleDict(dict(q=nn.Linear(512, 512), k=nn.Linear(512, 512), v=nn.Linear(512, 512), o=nn.Linear(512, 512), n=nn.LayerNorm(512))) for _ in range(6))
    optimizer = torch.optim.AdamW([*tokens.parameters(), *head.parameters(), *layers.parameters()])
    for _ in range(36):
        length = random.randrange(300, 1500)
        x = tokens(words(2, length))
        mask = torch.ones(length, length, device=DEVICE, dtype=torch.bool).tril()
        for m in layers:
            n = m["n"](x)
            q, k, v = (m[c](n).view(2, length, 8, 64).transpose(1, 2) for c in "qkv")
            scores = (q @ k.transpose(2, 3) / 8).masked_fill(~mask, -1e9)
            x = x + m["o"]((F.dropout(scores.softmax(-1), 0.1) @ v).transpose(1, 2).reshape(2, length, 512))
        update(optimizer, F.cross_entropy(head(x).flatten(0, 1), words(2, length).flatten()))
        del x, n, q, k, v, scores


@program
def lbfgs():
    """L-BFGS with a history of directions of all weights."""
    with torch.device(DEVICE):
        model = nn.Sequential(nn.Linear(2048, 4096), nn.Tanh(), nn.Linear(4096, 4096), nn.Tanh(), nn.Linear(4096, 1000))
    parameters, history, old = list(model.parameters()), [], None
    for step in range(40):
        loss = model(noise(random.choice([2000, 4000, 8000]), 2048)).logsumexp(1).mean()
        flat = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        with torch.no_grad():
            if old is not None:
                history.append((flat - old, flat * 0.1))
            if len(history) > 20:
                history.pop(0)
            direction = flat.neg()
            for y, s in reversed(history):
                direction = direction.add(y, alpha=-0.1)
            for y, s in history:
                direction = direction.add(s, alpha=0.1)
            at = 0
            for p in parameters:
                p.add_(direction[at : at + p.numel()].view_as(p), alpha=0.01)
                at += p.numel()
        old = flat


# ---- more of the kinds that were hard


@program
def mla_many_layers():
    """kv_mla with 61 layers and a small batch, two conversations of growing prompts."""
    with torch.inference_mode():
        decode_mla(False, True, 4, 61, 2400, 50)
        decode_mla(False, True, 6, 61, 1600, 50)


@program
def mla_batches():
    """kv_mla for several batches one after another, one tensor per layer."""
    for batch, prompt in [(16, 800), (32, 600), (8, 2000), (24, 1000)]:
        decode_mla(True, True, batch, 16, prompt, 40)


@program
def gan_growing():
    """A GAN whose images grow in stages; a fresh layer and fresh optimizers in each."""

    def up(i, o):
        return nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(i, o, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(o, o, 3, padding=1), nn.LeakyReLU(0.2))

    def down(i, o):
        return nn.Sequential(nn.Conv2d(i, i, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(i, o, 3, padding=1), nn.LeakyReLU(0.2), nn.AvgPool2d(2))

    widths = [512, 384, 256, 128, 64]
    g = on_gpu(nn.ModuleList, [on_gpu(nn.Sequential, on_gpu(nn.Linear, 256, 512 * 16), nn.Unflatten(1, (512, 4, 4)))])
    d = on_gpu(nn.ModuleList, [on_gpu(nn.Sequential, nn.Flatten(), on_gpu(nn.Linear, 512 * 16, 1))])
    for stage in range(1, 5):
        with torch.device(DEVICE):
            g.append(up(widths[stage - 1], widths[stage]))
            d.insert(0, down(widths[stage], widths[stage - 1]))
            rgb, unrgb = nn.Conv2d(widths[stage], 3, 1), nn.Conv2d(3, widths[stage], 1)
        of_g = torch.optim.Adam([*g.parameters(), *rgb.parameters()])
        of_d = torch.optim.Adam([*d.parameters(), *unrgb.parameters()])
        make, judge = nn.Sequential(*g, rgb), nn.Sequential(unrgb, *d)
        batch, size = 512 >> stage, 4 << stage
        for _ in range(10):
            fake = make(noise(batch, 256))
            update(of_d, F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(noise(batch, 3, size, size))).mean())
            of_g.zero_grad()
            update(of_g, F.softplus(-judge(fake)).mean())


@program
def gan_translate():
    """CycleGAN: two makers, two judges, a pool of old images; image sizes vary."""

    class Res(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.InstanceNorm2d(c), nn.ReLU(True), nn.Conv2d(c, c, 3, padding=1), nn.InstanceNorm2d(c))

        def forward(self, x):
            return x + self.body(x)

    def maker():
        return nn.Sequential(
            nn.Conv2d(3, 64, 7, padding=3), nn.ReLU(True), nn.Conv2d(64, 128, 3, 2, 1), nn.InstanceNorm2d(128), nn.ReLU(True),
            nn.Conv2d(128, 256, 3, 2, 1), nn.ReLU(True), *(Res(256) for _ in range(6)), nn.ConvTranspose2d(256, 128, 4, 2, 1), nn.ReLU(True),
            nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.ReLU(True), nn.Conv2d(64, 3, 7, padding=3), nn.Tanh(),
        )

    def judge():
        return nn.Sequential(*(nn.Sequential(nn.Conv2d(i, o, 4, 2, 1), nn.LeakyReLU(0.2)) for i, o in [(3, 64), (64, 128), (128, 256), (256, 512)]), nn.Conv2d(512, 1, 4))

    ab, ba, a, b = on_gpu(maker), on_gpu(maker), on_gpu(judge), on_gpu(judge)
    of_m, of_j = torch.optim.Adam([*ab.parameters(), *ba.parameters()]), torch.optim.Adam([*a.parameters(), *b.parameters()])
    pool = []
    for _ in range(24):
        size = random.choice([192, 256, 256, 320])
        x, y = noise(2, 3, size, size), noise(2, 3, size, size)
        to_b, to_a = ab(x), ba(y)
        loss = (ba(to_b) - x).abs().mean() + (ab(to_a) - y).abs().mean() + (a(to_a) - 1).square().mean() + (b(to_b) - 1).square().mean()
        update(of_m, 10 * loss)
        pool.append((to_a.detach(), to_b.detach()))
        if len(pool) > 12:
            pool.pop(random.randrange(12))
        old_a, old_b = random.choice(pool)
        of_j.zero_grad()
        update(of_j, (a(x) - 1).square().mean() + a(old_a).square().mean() + (b(y) - 1).square().mean() + b(old_b).square().mean())


@program
def kv_quantized():
    """KV caches of int8 with scales by torch.cat; keys and values are dequantized for each layer."""
    model = on_gpu(Gpt, 1536, 18, 12).to(FP16).eval()
    with torch.inference_mode():
        for batch, prompt, more in [(16, 800, 50), (8, 1600, 40), (24, 500, 50)]:
            caches = [None] * 18
            for step in range(more):
                x = model.tokens(words(batch, prompt if step == 0 else 1))
                for place, layer in enumerate(model.layers):
                    q, *new = layer.split(x)
                    new = [(t.mul(20).to(torch.int8), t.abs().amax(3, keepdim=True)) for t in new]
                    if caches[place] is not None:
                        new = [tuple(torch.cat([m, n], 2) for m, n in zip(*pair)) for pair in zip(caches[place], new)]
                    caches[place] = new
                    k, v = (t.to(FP16) * s for t, s in new)
                    x = layer.finish(x, F.scaled_dot_product_attention(q, k, v, is_causal=step == 0))
                model.head(model.norm(x[:, -1:]))
            del caches, q, k, v, new, x


@program
def shrinking_sequence():
    """Batches shrink from step to step as samples end (early exits), with large logits."""
    model = on_gpu(Gpt, 768, 8, 12, 64000)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        for batch in [24, 22, 19, 17, 14, 12, 9, 7, 5, 3, 2, 1]:
            update(optimizer, language_loss(model, words(batch, 385)))


if __name__ == "__main__":
    if sys.argv[1] == "--list":
        print(*PROGRAMS, sep="\n")
    elif sys.argv[1] == "--describe":
        for name, function in PROGRAMS.items():
            print(f"{name}\t{function.__doc__}")
    else:
        seed = int(os.environ.get("SEED", "11"))
        torch.manual_seed(seed)
        random.seed(seed)
        PROGRAMS[sys.argv[1]]()
