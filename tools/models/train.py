"""Trains a model of transformers for a few steps and prints its peaks of GPU memory.

The model is given by a Hugging Face config.json. The class follows from its
model_type: causal language models, BERT (masked), T5 (sequence to sequence)
and ViT (image classification). Inputs are random. The weights are allocated
but not initialised, so a large model needs no host memory and no time; the
loss has no meaning. The last line of the output is one JSON object.
"""

import argparse
import json
import math
import pickle
import struct
import tempfile
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

CLASSES = {
    "bert": AutoModelForMaskedLM,
    "t5": AutoModelForSeq2SeqLM,
    "vit": AutoModelForImageClassification,
}

OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "adamw_fused": partial(torch.optim.AdamW, fused=True),
    "adamw_loop": partial(torch.optim.AdamW, foreach=False),
    "sgd": torch.optim.SGD,
    # Of bitsandbytes.
    "adam8bit": lambda *args, **options: bitsandbytes().AdamW8bit(*args, **options),
    "paged_adam8bit": lambda *args, **options: bitsandbytes().PagedAdamW8bit(*args, **options),
    "paged_adam": lambda *args, **options: bitsandbytes().PagedAdamW32bit(*args, **options),
}


def bitsandbytes() -> ModuleType:
    """The optimizers of bitsandbytes."""
    import bitsandbytes

    return bitsandbytes.optim


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="a config.json, or its folder")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--amp", action="store_true", help="autocast to bfloat16, with float32 weights")
    parser.add_argument("--ckpt", action="store_true", help="gradient checkpointing")
    parser.add_argument("--ckpt_selective", action="store_true", help="the same, but products and attention are kept")
    parser.add_argument("--liger", action="store_true", help="the kernels of liger-kernel")
    parser.add_argument("--compile", action="store_true", help="torch.compile with its defaults")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    parser.add_argument("--lora", type=int, metavar="R", help="train LoRA adapters of this rank (peft)")
    parser.add_argument("--qlora", type=int, metavar="R", help="the same on weights of 4 bits (bitsandbytes)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write a memory snapshot")
    return parser.parse_args()


def checkpoint_options(selective: bool) -> dict[str, object]:
    """Options of checkpoints. Selective ones keep the results of products and of attention."""
    options: dict[str, object] = {"use_reentrant": False}
    if selective:
        aten = torch.ops.aten
        kept = [
            aten.mm.default,
            aten.addmm.default,
            aten.bmm.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
        ]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
    return options


def build(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Makes the model on the CPU. Pages of its weights are never touched."""
    with no_init_weights():
        model = CLASSES.get(config.model_type, AutoModelForCausalLM).from_config(config, dtype=dtype)
    model.tie_weights()
    return model


def adapt(model: PreTrainedModel, rank: int) -> nn.Module:
    """Freezes the model and adds LoRA adapters to peft's default modules."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank))


def load_quantised(config: PreTrainedConfig) -> PreTrainedModel:
    """Loads the model with weights of 4 bits, from a file whose weights are a hole and take no space."""
    from transformers import BitsAndBytesConfig

    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    if config.tie_word_embeddings:
        # Published files have a tied head once.
        weights.pop("lm_head.weight")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in weights.items():
        begin, end = end, end + 2 * math.prod(weight.shape)
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    quantisation = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        with open(Path(folder) / "model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=quantisation, dtype=torch.bfloat16, device_map={"": 0}
        )


def prepare_quantised(model: PreTrainedModel, rank: int, checkpoints: bool) -> nn.Module:
    """Adds adapters to a model of 4 bits, as peft's documentation has it."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    model = prepare_model_for_kbit_training(model, checkpoints, {"use_reentrant": False})
    return get_peft_model(model, LoraConfig(r=rank))


def inputs(config: PreTrainedConfig, batch: int, context: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Makes the arguments of one forward pass."""
    if config.model_type == "vit":
        shape = (batch, config.num_channels, config.image_size, config.image_size)
        return {
            "pixel_values": torch.randn(shape, dtype=dtype).cuda(),
            "labels": torch.randint(config.num_labels, (batch,)).cuda(),
        }
    ids = torch.randint(config.vocab_size, (batch, context)).cuda()
    extra = {} if config.model_type == "bert" else {"use_cache": False}
    return {"input_ids": ids, "labels": ids} | extra


def main() -> None:
    """Trains, and prints what was measured."""
    args = arguments()
    dtype = torch.float32 if args.amp else getattr(torch, args.dtype)
    if args.record:
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=10_000_000)

    config = AutoConfig.from_pretrained(args.config)
    if args.liger:
        from liger_kernel.transformers import _apply_liger_kernel

        _apply_liger_kernel(config.model_type)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in build(config, dtype).parameters())
    if args.qlora:
        model = prepare_quantised(load_quantised(config), args.qlora, args.ckpt)
    elif args.lora:
        model = adapt(build(config, dtype), args.lora).cuda()
    else:
        model = build(config, dtype).cuda()
    model.train()
    if (args.ckpt or args.ckpt_selective) and not args.qlora:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoint_options(args.ckpt_selective))
    trained = [p for p in model.parameters() if p.requires_grad]
    if args.compile:
        model = torch.compile(model)
    optimizer = OPTIMIZERS[args.optimizer](trained, lr=1e-4)

    for _ in range(args.steps):
        batch = inputs(config, args.batch, args.context, dtype)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.amp):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    result = {
        "parameters": parameters,
        "trained": sum(p.numel() for p in trained),
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "allocations": None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if args.record:
        snapshot = torch.cuda.memory._snapshot()
        result["allocations"] = sum(e["action"] == "alloc" for e in snapshot["device_traces"][0])
        args.record.write_bytes(pickle.dumps(snapshot))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
