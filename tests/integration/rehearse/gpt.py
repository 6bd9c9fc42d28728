"""The reference GPT of the transformer generator, trained for a few steps with some settings and techniques."""

import argparse
import contextlib
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

SIZES = ("layers", "width", "heads", "vocab", "context", "batch", "steps")
CHOICES = {
    "norm": ("layer", "rms"),
    "activation": ("relu", "gelu", "gelu_tanh", "silu"),
    "gated": ("no", "yes"),
    "rotary": ("no", "yes"),
    "tied": ("no", "yes"),
    "bias": ("yes", "no"),
    "attention": ("auto", "math", "flash", "efficient", "cudnn"),
    "dropout": ("no", "yes"),
    "causal": ("yes", "no"),
}
parser = argparse.ArgumentParser()
for size in SIZES:
    parser.add_argument(f"--{size}", type=int, required=True)
for size in ("ffn", "kv_heads", "vocab_multiple"):
    parser.add_argument(f"--{size}", type=int, default=0)
for name, words in CHOICES.items():
    parser.add_argument(f"--{name}", choices=words, default=words[0])
parser.add_argument("--techniques", default="")
options = parser.parse_args()
techniques = set(filter(None, options.techniques.split(",")))

ffn = options.ffn or 4 * options.width
kv_heads = options.kv_heads or options.heads
head_width = options.width // options.heads
vocab = options.vocab
if options.vocab_multiple:
    vocab = -(-vocab // options.vocab_multiple) * options.vocab_multiple
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
# What a selective checkpoint keeps.
aten = torch.ops.aten
KEPT = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]
checkpoint_options = {"use_reentrant": False}
if "ckpt_selective" in techniques:
    checkpoint_options["context_fn"] = partial(create_selective_checkpoint_contexts, KEPT)


def norm() -> nn.Module:
    if options.norm == "rms":
        return nn.RMSNorm(options.width)
    return nn.LayerNorm(options.width, bias=has_bias)


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
        batch, length, width = x.shape
        shape = (batch, length, -1, head_width)
        q, k, v = [part.view(shape).transpose(1, 2) for part in self.qkv(x).split(self.parts, 2)]
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        settings = {"is_causal": options.causal == "yes", "dropout_p": dropout if self.training else 0.0}
        with kernel():
            mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=kv_heads != options.heads, **settings)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = norm()
        self.attention = Attention()
        self.norm2 = norm()
        if options.gated == "yes":
            self.gate = nn.Linear(options.width, ffn, bias=has_bias)
        self.up = nn.Linear(options.width, ffn, bias=has_bias)
        self.down = nn.Linear(ffn, options.width, bias=has_bias)
        self.drop = drop()

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(activation(self.gate(x)) * self.up(x))

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x), rotation))
        if options.gated == "yes":
            return x + self.drop(self.mlp(self.norm2(x)))
        return x + self.drop(self.down(activation(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, options.width)
        if options.rotary == "no":
            self.positions = nn.Embedding(options.context, options.width)
        self.drop = drop()
        self.blocks = nn.ModuleList([Block() for _ in range(options.layers)])
        self.norm = norm()
        self.head = nn.Linear(options.width, vocab, bias=False)
        if options.tied == "yes":
            self.head.weight = self.tokens.weight
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
            if techniques & {"ckpt", "ckpt_selective"}:
                x = checkpoint(block, x, rotation, **checkpoint_options)
            else:
                x = block(x, rotation)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), ids.view(-1))


def context() -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    if techniques & {"amp", "fp16"}:
        stack.enter_context(torch.autocast("cuda", dtype=torch.float16 if "fp16" in techniques else torch.bfloat16))
    if "offload" in techniques:
        stack.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=True))
    return stack


def add_to_main_gradient(weight: torch.Tensor) -> None:
    weight.main_grad.add_(weight.grad.float())
    weight.grad = None


def give_gradients() -> None:
    """Sets the gradients that the optimizer reads, where they are not those of backward."""
    for weight, updated in zip(model.parameters(), updated_weights):
        if "fp32_grads" in techniques:
            updated.grad = weight.main_grad.to(updated.dtype)
        elif updated is not weight:
            updated.grad = weight.grad.float()


def forget_gradients() -> None:
    optimizer.zero_grad(set_to_none="zero_fill" not in techniques)
    if has_master:
        model.zero_grad(set_to_none="zero_fill" not in techniques)
    if "fp32_grads" in techniques:
        for weight in model.parameters():
            weight.main_grad.zero_()


is_half = bool(techniques & {"bf16_model", "bf16_master"})
has_master = "bf16_master" in techniques
model = Gpt().to("cuda", torch.bfloat16 if is_half else torch.float32)
if "fp32_grads" in techniques:
    for weight in model.parameters():
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        weight.register_post_accumulate_grad_hook(add_to_main_gradient)
updated_weights = list(model.parameters())
if has_master:
    updated_weights = [weight.detach().float() for weight in model.parameters()]
kind = torch.optim.SGD if "sgd" in techniques else torch.optim.AdamW
loops = {"fused": {"fused": True}, "foreach_off": {"foreach": False}}
optimizer = kind(updated_weights, lr=1e-4, **next((loops[word] for word in loops if word in techniques), {}))
scaler = torch.amp.GradScaler("cuda", enabled="fp16" in techniques)
parts = 4 if "accum4" in techniques else 1
for step in range(options.steps):
    for part in range(parts):
        ids = torch.randint(0, options.vocab, (options.batch // parts, options.context)).to("cuda")
        with context():
            loss = model(ids)
        scaler.scale(loss).backward()
    give_gradients()
    scaler.step(optimizer)
    scaler.update()
    if has_master:
        with torch.no_grad():
            for weight, updated in zip(model.parameters(), updated_weights):
                weight.copy_(updated)
    forget_gradients()
    if "empty_cache" in techniques:
        torch.cuda.empty_cache()
