"""The reference GPT of the transformer generator, trained with FSDP2 on every block and on the model."""

import argparse
import contextlib
import os

import torch
import torch.distributed
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
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
        self.act = nn.ReLU()

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


def context() -> contextlib.AbstractContextManager:
    return torch.autocast("cuda", dtype=torch.bfloat16) if "amp" in techniques else contextlib.nullcontext()


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
model = Gpt()
if "bf16_model" in techniques:
    model.to(torch.bfloat16)
policy = MixedPrecisionPolicy()
if "bf16_master" in techniques:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
offload = CPUOffloadPolicy() if "offload_params" in techniques else OffloadPolicy()
for block in model.blocks:
    fully_shard(block, mp_policy=policy, offload_policy=offload)
fully_shard(model, mp_policy=policy, offload_policy=offload)
foreach = False if "foreach_off" in techniques else None
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=foreach)
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
