"""The reference GPT of the transformer generator, trained with PyTorch's plan of tensor and sequence parallelism."""

import argparse
import contextlib
import os

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

SIZES = ("layers", "width", "heads", "vocab", "context", "batch", "steps")
CHOICES = {
    "norm": ("layer", "rms"),
    "activation": ("relu", "gelu", "gelu_tanh", "silu"),
    "gated": ("no", "yes"),
    "rotary": ("no", "yes"),
    "bias": ("yes", "no"),
    "attention": ("auto", "math", "flash", "efficient", "cudnn"),
    "dropout": ("no", "yes"),
    "causal": ("yes", "no"),
}
parser = argparse.ArgumentParser()
for size in SIZES:
    parser.add_argument(f"--{size}", type=int, required=True)
for size in ("ffn", "kv_heads"):
    parser.add_argument(f"--{size}", type=int, default=0)
for name, words in CHOICES.items():
    parser.add_argument(f"--{name}", choices=words, default=words[0])
parser.add_argument("--techniques", default="")
options = parser.parse_args()
techniques = set(filter(None, options.techniques.split(",")))

ranks = int(os.environ["WORLD_SIZE"])
ffn = options.ffn or 4 * options.width
kv_heads = options.kv_heads or options.heads
head_width = options.width // options.heads
has_bias = options.bias == "yes"
dropout = 0.1 if options.dropout == "yes" else 0.0
KERNELS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
ACTIVATIONS = {
    "relu": nn.ReLU(inplace="inplace" in techniques),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
activation = ACTIVATIONS[options.activation]


def norm() -> nn.Module:
    return nn.RMSNorm(options.width) if options.norm == "rms" else nn.LayerNorm(options.width, bias=has_bias)


def drop() -> nn.Module:
    return nn.Dropout(dropout) if dropout else nn.Identity()


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((-second, first), dim=-1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + rotate_half(x) * sin


def kernel() -> contextlib.AbstractContextManager:
    return sdpa_kernel(KERNELS[options.attention]) if options.attention in KERNELS else contextlib.nullcontext()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [heads * head_width for heads in (options.heads, kv_heads, kv_heads)]
        self.qkv = nn.Linear(options.width, sum(self.parts), bias=has_bias)
        self.out = nn.Linear(options.width, options.width, bias=has_bias)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, -1, head_width)
        # The heads of this rank.
        parts = [part // ranks for part in self.parts]
        q, k, v = [part.view(shape).transpose(1, 2) for part in self.qkv(x).split(parts, 2)]
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        settings = {"is_causal": options.causal == "yes", "dropout_p": dropout if self.training else 0.0}
        with kernel():
            mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=kv_heads != options.heads, **settings)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        if options.gated == "yes":
            self.gate = nn.Linear(options.width, ffn, bias=has_bias)
        self.up = nn.Linear(options.width, ffn, bias=has_bias)
        self.down = nn.Linear(ffn, options.width, bias=has_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if options.gated == "yes":
            return self.down(activation(self.gate(x)) * self.up(x))
        return self.down(activation(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = norm()
        self.attention = Attention()
        self.norm2 = norm()
        self.mlp = Mlp()
        self.drop = drop()

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x), rotation))
        return x + self.drop(self.mlp(self.norm2(x)))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(options.vocab, options.width)
        if options.rotary == "no":
            self.positions = nn.Embedding(options.context, options.width)
        self.drop = drop()
        self.blocks = nn.ModuleList([Block() for _ in range(options.layers)])
        self.norm = norm()
        self.head = nn.Linear(options.width, options.vocab, bias=False)
        if options.rotary == "yes":
            frequencies = 10000.0 ** (-torch.arange(0, head_width, 2) / head_width)
            angles = torch.outer(torch.arange(options.context), frequencies)
            angles = torch.cat((angles, angles), dim=-1)
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        if options.rotary == "yes":
            rotation = (self.cos[:length], self.sin[:length])
            x = self.drop(self.tokens(ids))
        else:
            rotation = None
            x = self.drop(self.tokens(ids) + self.positions(torch.arange(length, device=ids.device)))
        for block in self.blocks:
            x = checkpoint(block, x, rotation, use_reentrant=False) if "ckpt" in techniques else block(x, rotation)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), ids.view(-1))


def context() -> contextlib.AbstractContextManager:
    return torch.autocast("cuda", dtype=torch.bfloat16) if "amp" in techniques else contextlib.nullcontext()


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (ranks,))
block_plan = {
    "norm1": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
    "attention.qkv": ColwiseParallel(),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "norm2": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "mlp.gate": ColwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}
if options.gated == "no":
    del block_plan["mlp.gate"]
model_plan = {
    "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
if options.rotary == "yes":
    del model_plan["positions"]
model = Gpt().to("cuda", torch.bfloat16 if "bf16_model" in techniques else torch.float32)
parallelize_module(model, mesh, model_plan)
for block in model.blocks:
    parallelize_module(block, mesh, block_plan)
if "sgd" in techniques:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
else:
    update = {"fused": True} if "fused" in techniques else {}
    update = {"foreach": False} if "foreach_off" in techniques else update
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **update)
parts = 4 if "accum4" in techniques else 1
for step in range(options.steps):
    for part in range(parts):
        ids = torch.randint(0, options.vocab, (options.batch // parts, options.context)).to("cuda")
        with context():
            loss = model(ids)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none="zero_fill" not in techniques)
    if "empty_cache" in techniques:
        torch.cuda.empty_cache()
# Without this the exit races with the threads of the group.
torch.distributed.destroy_process_group()
