#!/usr/bin/env python3
"""The programs of workloads/recorded/programs and of three recordings in workloads/recorded/pools, and some without a recording.

    python3 programs.py NAME OUT.pickle.xz
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python3 programs.py unet unet.exp.pickle.xz --steps 5

Weights and data are random, with seed 1. The history is recorded from before the first allocation, or from half of the
run on (--middle). Prints one JSON line: PyTorch's peaks, steps that were done, and whether memory ran out.
tools/torch-plugin/compare.py runs them under several allocators.
"""

import argparse
import json
import lzma
import os
import pickle
import random

import torch
import torch.nn.functional as F
from torch import nn

DEVICE = "cuda"
VOCABULARY = 32000


class Block(nn.Module):
    """A transformer block with RMS norms and a SwiGLU."""

    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LanguageModel(nn.Module):
    def __init__(self, width=768, layers=8, heads=12, hidden=2048):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train_step(model, optimizer, batch, length, amp=True):
    tokens = torch.randint(0, VOCABULARY, (batch, length), device=DEVICE)
    with torch.autocast("cuda", torch.bfloat16, enabled=amp):
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **options)


def swiglu(steps):
    """A Llama-like model in bf16 autocast; all steps are alike."""
    model = LanguageModel().to(DEVICE)
    optimizer = adamw(model)
    for _ in steps(15):
        train_step(model, optimizer, 8, 512)
    return model.parameters()


def swiglu_var(steps):
    """The same with batches and lengths that vary."""
    model = LanguageModel().to(DEVICE)
    optimizer = adamw(model)
    for _ in steps(40):
        train_step(model, optimizer, random.choice([4, 6, 8, 12]), random.randrange(128, 1024, 8))
    return model.parameters()


def compiled(steps):
    """Under torch.compile."""
    model = LanguageModel(layers=4).to(DEVICE)
    compiled_model = torch.compile(model)
    optimizer = adamw(model)
    for _ in steps(12):
        train_step(compiled_model, optimizer, 8, 512)
    return model.parameters()


def compiled_dynamic(steps):
    """Under torch.compile with dynamic shapes."""
    model = LanguageModel(layers=4).to(DEVICE)
    compiled_model = torch.compile(model, dynamic=True)
    optimizer = adamw(model)
    for _ in steps(25):
        train_step(compiled_model, optimizer, random.choice([4, 8]), random.randrange(128, 768, 64))
    return model.parameters()


def graphed(steps):
    """A whole step in a CUDA graph: its memory is in a private pool."""
    model = LanguageModel(layers=4).to(DEVICE)
    optimizer = adamw(model, capturable=True)
    tokens = torch.randint(0, VOCABULARY, (4, 512), device=DEVICE)

    def one_step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            one_step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_step()
    for step in steps(10):
        tokens.copy_(torch.randint(0, VOCABULARY, (4, 512), device=DEVICE))
        graph.replay()
        x = torch.randn(64 + step, 1 << 20, device=DEVICE)
        del x
    return model.parameters()


def mempool(steps):
    """Some tensors are in a pool of their own."""
    model = LanguageModel(layers=4).to(DEVICE)
    optimizer = adamw(model)
    pool, kept = torch.cuda.MemPool(), []
    for step in steps(12):
        train_step(model, optimizer, 8, 512)
        with torch.cuda.use_mem_pool(pool):
            kept.append(torch.empty((step + 1) << 20, device=DEVICE))
            x = torch.empty(3 << 20, device=DEVICE)
            del x
        if len(kept) > 4:
            kept.pop(0)
    return model.parameters()


def one_rank():
    """A process group of this process alone."""
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000))
    dist.init_process_group("nccl", rank=0, world_size=1)
    return dist


def fsdp(steps):
    """Fully sharded, on one rank, with bf16 parameters."""
    dist = one_rank()
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = LanguageModel(layers=6).to(DEVICE)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = adamw(model)
    for _ in steps(12):
        train_step(model, optimizer, 8, 512, amp=False)
    parameters = [parameter.to_local() for parameter in model.parameters()]
    dist.destroy_process_group()
    return parameters


def fsdp1(steps):
    """FullyShardedDataParallel, on one rank, with bf16 parameters: parameters pass between streams with record_stream."""
    dist = one_rank()
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(
        LanguageModel(layers=12).to(DEVICE),
        # What one rank gets whatever it asks for.
        sharding_strategy=ShardingStrategy.NO_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=precision,
        use_orig_params=True,
    )
    optimizer = adamw(model)
    for _ in steps(20):
        tokens = torch.randint(0, VOCABULARY, (8, 512), device=DEVICE)
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    parameters = [parameter.detach() for parameter in model.parameters()]
    dist.destroy_process_group()
    return parameters


def ddp(steps):
    """Replicated, on one rank: gradients are in buckets."""
    dist = one_rank()
    model = nn.parallel.DistributedDataParallel(LanguageModel(layers=6).to(DEVICE))
    optimizer = adamw(model)
    for _ in steps(12):
        train_step(model, optimizer, 8, 512)
    dist.destroy_process_group()
    return model.parameters()


class UNet(nn.Module):
    WIDTHS = [64, 128, 256, 512]

    def __init__(self):
        super().__init__()
        widths = self.WIDTHS
        self.first = nn.Conv2d(3, 64, 3, padding=1)
        self.down = nn.ModuleList(self.pair(i, o) for i, o in zip([64] + widths, widths))
        self.up = nn.ModuleList(self.pair(o + i, i) for i, o in zip(widths[::-1][1:], widths[::-1]))
        self.last = nn.Conv2d(64, 3, 1)

    @staticmethod
    def pair(inputs, outputs):
        def one(i):
            return [nn.Conv2d(i, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU()]

        return nn.Sequential(*one(inputs), *one(outputs))

    def forward(self, x):
        x = self.first(x)
        kept = []
        for place, down in enumerate(self.down):
            x = down(x)
            kept.append(x)
            x = F.max_pool2d(x, 2) if place < 3 else x
        for place, up in enumerate(self.up):
            x = up(torch.cat([F.interpolate(x, scale_factor=2), kept[2 - place]], 1))
        return self.last(x)


def unet(steps):
    """Convolutions with batches and resolutions that vary."""
    model = UNet().to(DEVICE)
    optimizer = adamw(model)
    for _ in steps(30):
        size = random.choice([128, 160, 192, 256, 320])
        images = torch.randn(random.choice([4, 8]), 3, size, size, device=DEVICE)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.mse_loss(model(images), images)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.parameters()


def prefetch(steps):
    """Batches are copied on a side stream and handed over with record_stream."""
    model = LanguageModel(layers=4).to(DEVICE)
    optimizer = adamw(model)
    side = torch.cuda.Stream()
    for _ in steps(30):
        with torch.cuda.stream(side):
            shape = (8, random.choice([256, 512, 768]))
            tokens = torch.randint(0, VOCABULARY, shape).pin_memory().to(DEVICE, non_blocking=True)
            extra = torch.randn(64 << 10, 256).pin_memory().to(DEVICE, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        tokens.record_stream(torch.cuda.current_stream())
        extra.record_stream(torch.cuda.current_stream())
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()) + extra.sum() * 0
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.parameters()


def settings_change(steps):
    """max_split_size_mb:64 is set in the ninth step."""
    model = LanguageModel(layers=4).to(DEVICE)
    optimizer = adamw(model)
    # Its name changed in PyTorch 2.10.
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    set_settings = set_settings or torch.cuda.memory._set_allocator_settings
    for step in steps(24):
        if step == 8:
            torch.cuda.empty_cache()
            set_settings("max_split_size_mb:64")
        train_step(model, optimizer, random.choice([4, 8]), random.randrange(128, 1024, 8))
    return model.parameters()


def moe(steps):
    """Experts get the tokens that a router sends them: a different number in every step."""
    width, count = 768, 16
    router = nn.Linear(width, count).to(DEVICE)
    experts = nn.ModuleList(
        nn.Sequential(nn.Linear(width, 3072), nn.GELU(), nn.Linear(3072, width)) for _ in range(count)
    ).to(DEVICE)
    optimizer = torch.optim.AdamW([*router.parameters(), *experts.parameters()])
    for _ in steps(40):
        x = torch.randn(random.randrange(4096, 16384, 256), width, device=DEVICE)
        with torch.autocast("cuda", torch.bfloat16):
            shares = router(x).softmax(-1)
            weights, chosen = shares.topk(2)
            y = torch.zeros_like(x)
            for place, expert in enumerate(experts):
                token, rank = (chosen == place).nonzero(as_tuple=True)
                y = y.index_add(0, token, (expert(x[token]) * weights[token, rank, None]).float())
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return experts.parameters()


def serving(steps):
    """Prompts and growing caches: the keys and values of a request are copied to a longer tensor for every token."""
    model = LanguageModel(1024, 8, 16, 2816).to(DEVICE, torch.bfloat16).eval()
    requests = []

    def cache(length):
        return torch.empty(2, 1, 16, length, 64, device=DEVICE, dtype=torch.bfloat16)

    with torch.inference_mode():
        for _ in steps(300):
            if len(requests) < 24 and random.random() < 0.4:
                length = random.randrange(64, 1024)
                model(torch.randint(0, VOCABULARY, (1, length), device=DEVICE))
                end = length + random.randrange(32, 256)
                requests.append([length, end, [cache(length) for _ in model.blocks]])
            for request in requests:
                request[0] += 1
                request[2] = [torch.cat([old, cache(1)], 3) for old in request[2]]
            requests = [request for request in requests if request[0] < request[1]]
        return [model(torch.arange(64, device=DEVICE)[None])]


def generation(steps):
    """Batches of prompts, one token at a time: the keys and values of every layer grow by torch.cat in every step."""
    layers, heads, width = 16, 16, 1024
    projections = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(layers)).to(DEVICE, torch.bfloat16)
    caches, tokens_left = [], 0
    with torch.inference_mode():
        for _ in steps(400):
            if tokens_left == 0:
                batch, length = random.choice([8, 16, 32]), random.randrange(64, 512)
                shape = (batch, heads, length, width // heads)
                caches = [[torch.zeros(shape, device=DEVICE, dtype=torch.bfloat16) for _ in "kv"] for _ in range(layers)]
                x = torch.ones(batch, 1, width, device=DEVICE, dtype=torch.bfloat16)
                tokens_left = random.randrange(20, 120)
            for projection, cache in zip(projections, caches):
                q, k, v = projection(x).view(batch, 1, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
                cache[:] = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
                x = x + F.scaled_dot_product_attention(q, *cache).transpose(1, 2).reshape(batch, 1, width)
            tokens_left -= 1
        return [x]


def embeddings(steps):
    """Tables with sparse gradients and bags of many lengths."""
    tables = nn.ModuleList(nn.EmbeddingBag(1 << 19, 64, sparse=True) for _ in range(8)).to(DEVICE)
    top = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1)).to(DEVICE)
    optimizer = torch.optim.SGD([*tables.parameters(), *top.parameters()], lr=0.1)
    for _ in steps(80):
        features = []
        for table in tables:
            lengths = torch.randint(1, 40, (8192,), device=DEVICE)
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)[:-1]])
            rows = torch.randint(0, 1 << 19, (int(lengths.sum()),), device=DEVICE)
            features.append(table(rows, offsets))
        top(torch.cat(features, 1)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return top.parameters()


def graph_server(steps):
    """Graphs of ten batch sizes in one pool, and eager work between their replays."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(12)))
    model = model.to(DEVICE, torch.bfloat16).eval()
    graphs, pool = [], torch.cuda.graph_pool_handle()
    with torch.inference_mode():
        for size in (2048, 1024, 512, 256, 128, 64, 32, 16, 8, 1):
            batch = torch.zeros(size, 1024, device=DEVICE, dtype=torch.bfloat16)
            model(batch)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                answer = model(batch)
            graphs.append((graph, batch, answer))
        kept, total = [], torch.zeros((), device=DEVICE)
        for step in steps(200):
            graph, batch, answer = random.choice(graphs)
            batch.fill_(0.001 * step)
            graph.replay()
            # The graphs of a pool share memory: an answer lasts until the next replay.
            total += answer.sum(dtype=torch.float32)
            kept.append(torch.randn(random.randrange(1 << 18, 1 << 23), device=DEVICE))
            kept = kept[-20:]
        return [total]


def huggingface(config, batch, lengths, steps):
    """Trains a model of the transformers library with random weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config).to(DEVICE)
    optimizer = adamw(model)
    for _ in steps(20):
        tokens = torch.randint(0, config.vocab_size, (batch, random.choice(lengths)), device=DEVICE)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.parameters()


def gpt2(steps):
    """GPT-2 of the transformers library, steady shapes."""
    from transformers import GPT2Config

    return huggingface(GPT2Config(), 8, [1024], steps)


def llama(steps):
    """A small Llama of the transformers library, lengths vary."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16}
    return huggingface(LlamaConfig(num_key_value_heads=4, vocab_size=VOCABULARY, **sizes), 4, range(256, 2048, 64), steps)


PROGRAMS = [
    compiled, compiled_dynamic, ddp, embeddings, fsdp, fsdp1, generation, gpt2, graph_server, graphed, llama, mempool, moe,
    prefetch, serving, settings_change, swiglu, swiglu_var, unet,
]


def main():
    by_name = {program.__name__: program for program in PROGRAMS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=by_name)
    parser.add_argument("out", help="the file of the recording")
    parser.add_argument("--cap", type=float, help="the share of the device that the process may use")
    parser.add_argument("--middle", action="store_true", help="record from half of the run on")
    parser.add_argument("--entries", type=int, default=400000, help="how many entries the history keeps")
    parser.add_argument("--stacks", default="python", choices=["python", "all"])
    parser.add_argument("--steps", type=int, default=0, help="how many steps, instead of the program's own number")
    options = parser.parse_args()
    done = 0

    def record():
        torch.cuda.memory._record_memory_history(stacks=options.stacks, max_entries=options.entries)

    def steps(count):
        nonlocal done
        count = options.steps or count
        for step in range(count):
            if options.middle and step == count // 2:
                torch.cuda.synchronize()
                record()
            yield step
            done += 1

    torch.manual_seed(1)
    random.seed(1)
    if options.cap:
        torch.cuda.set_per_process_memory_fraction(options.cap)
    if not options.middle:
        record()
    ran_out = False
    try:
        by_name[options.name](steps)
    except torch.OutOfMemoryError:
        ran_out = True
    torch.cuda.synchronize()
    stats, snapshot = torch.cuda.memory_stats(), torch.cuda.memory._snapshot()
    with lzma.open(options.out, "wb", preset=1) as file:
        pickle.dump(snapshot, file)
    facts = {
        "program": options.name,
        "settings": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "memory_fraction": options.cap,
        "steps": done,
        "ended_in_oom": ran_out,
        "peak_allocated": stats["allocated_bytes.all.peak"],
        "peak_reserved": stats["reserved_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
        "entries": sum(map(len, snapshot["device_traces"])),
    }
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
