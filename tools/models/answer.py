"""Answers prompts with a model of transformers and prints its peaks of GPU memory.

The model is given by a Hugging Face config.json. Its weights are 16 bits wide
and not initialised, so the answers have no meaning. The cache of keys and
values is the one that grows with every token (DynamicCache). The last line of
the output is one JSON object.
"""

import argparse
import json
import pickle
from pathlib import Path

import torch
from train import build
from transformers import AutoConfig


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="a config.json, or its folder")
    parser.add_argument("--batch", type=int, default=2, help="prompts that are answered together")
    parser.add_argument("--prompt", type=int, default=128, help="tokens per prompt")
    parser.add_argument("--answer", type=int, default=16, help="tokens per answer")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write a memory snapshot")
    return parser.parse_args()


def main() -> None:
    """Loads the model, answers once, and prints the peaks."""
    options = arguments()
    if options.record:
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    config = AutoConfig.from_pretrained(options.config)
    model = build(config, torch.bfloat16).eval().to("cuda")
    prompts = torch.randint(config.vocab_size, (options.batch, options.prompt), device="cuda")
    model.generate(prompts, max_new_tokens=options.answer, do_sample=False)
    if options.record:
        options.record.write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))
    peaks = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }
    print(json.dumps(peaks))


main()
