"""The reference GPT of the transformer generator, trained for a few steps with some techniques."""

import argparse
import contextlib

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

SIZES = ("layers", "width", "heads", "vocab", "context", "batch", "steps")
parser = argparse.ArgumentParser()
for size in SIZES:
    parser.add_argument(f"--{size}", type=int, required=True)
parser.add_argument("--techniques", default="")
options = parser.parse_args()
techniques = set(filter(None, options.techniques.split(",")))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(options.width, 3 * options.width)
        self.out = nn.Linear(options.width, options.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, options.heads, width // options.heads)
        q, k, v = [part.view(shape).transpose(1, 2) for part in self.qkv(x).split(width, 2)]
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(options.width)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(options.width)
        self.up = nn.Linear(options.width, 4 * options.width)
        self.down = nn.Linear(4 * options.width, options.width)
        self.act = nn.ReLU(inplace="inplace" in techniques)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(options.vocab, options.width)
        self.positions = nn.Embedding(options.context, options.width)
        self.blocks = nn.ModuleList([Block() for _ in range(options.layers)])
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, options.vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if "ckpt" in techniques else block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), ids.view(-1))


def context() -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    if "amp" in techniques:
        stack.enter_context(torch.autocast("cuda", dtype=torch.bfloat16))
    if "offload" in techniques:
        stack.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=True))
    return stack


model = Gpt().to("cuda")
kind = torch.optim.SGD if "sgd" in techniques else torch.optim.AdamW
optimizer = kind(model.parameters(), lr=1e-4)
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
