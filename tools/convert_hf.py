#!/usr/bin/env python
"""Convert between Hugging Face folders and Megatron weights folders.

python tools/convert_hf.py import --source meta-llama/ --target megatron/
python tools/convert_hf.py export --source megatron/ --target hf/ --dtype bf16
torchrun --nproc-per-node 4 tools/convert_hf.py import --source HF --target MEGATRON --tp 2 --pp 2
"""

from __future__ import annotations

import argparse
import sys
import warnings

from mrlhf.errors import MrlhfError


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)
    for name, text in (("import", "Hugging Face to Megatron"), ("export", "Megatron to Hugging Face")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--source", required=True, help="folder to read")
        command.add_argument("--target", required=True, help="folder to write")
        command.add_argument("--tensor-model-parallel-size", "--tp", type=int, default=1)
        command.add_argument("--pipeline-model-parallel-size", "--pp", type=int, default=1)
        command.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], help="default: the source's")
        command.add_argument("--overwrite", action="store_true", help="replace an existing target")
    commands.choices["import"].add_argument(
        "--head", choices=["lm", "value"], help="default: what the source has; value on a language model is fresh"
    )
    commands.choices["export"].add_argument(
        "--max-shard-size", type=float, default=5.0, help="GiB of one safetensors file (default 5)"
    )
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one conversion; 2 on an error that the user can mend."""
    options = parser().parse_args(argv)
    # What Megatron-Core and torch say about their own internals at import and on saving tells the user nothing.
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    from mrlhf.checkpoint.convert import DTYPES, export_megatron, import_hf

    common = {
        "tensor_model_parallel_size": options.tensor_model_parallel_size,
        "pipeline_model_parallel_size": options.pipeline_model_parallel_size,
        "dtype": DTYPES[options.dtype] if options.dtype else None,
        "overwrite": options.overwrite,
    }
    try:
        if options.command == "import":
            import_hf(options.source, options.target, head=options.head, **common)
        else:
            size = int(options.max_shard_size * 1024**3)
            export_megatron(options.source, options.target, max_shard_size=size, **common)
    except MrlhfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
