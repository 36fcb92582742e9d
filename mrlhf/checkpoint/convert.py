"""Between Hugging Face folders and Megatron weights folders; and loading either into a model.

A Megatron weights folder holds ``mrlhf_model.json`` (architecture and head), ``weights/`` (torch_dist, readable under
any parallel layout), and the source's ``config.json``, tokenizer, chat template and generation configuration.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from mrlhf.checkpoint.hf import HeadInit, has_value_bias, load_hf_weights, set_fresh_value_head
from mrlhf.checkpoint.hf_config import MEGATRON_FILE, model_config_to_dict, read_head, read_json, read_model_config
from mrlhf.checkpoint.hf_export import DEFAULT_SHARD_SIZE, dtype_name, export_hf
from mrlhf.checkpoint.hf_folder import FolderWriter, copy_companions, write_config
from mrlhf.checkpoint.names import add_value_bias
from mrlhf.checkpoint.sharded import load_sharded_weights, save_sharded_weights, stand_by
from mrlhf.checkpoint.transforms import TensorRanks
from mrlhf.errors import CheckpointError, ConfigError
from mrlhf.megatron import device
from mrlhf.megatron.groups import build_groups
from mrlhf.megatron.model import build_model
from mrlhf.model_config import ModelConfig
from mrlhf.parallel.launch import detect_launch, initialize, shutdown
from mrlhf.planner import ParallelSizes, check_sizes

WEIGHTS = "weights"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BY_NAME = {dtype_name(dtype): dtype for dtype in DTYPES.values()}


def is_megatron_folder(path: str | Path) -> bool:
    """Whether ``path`` is a Megatron weights folder written by `import_hf`."""
    return (Path(path) / MEGATRON_FILE).exists()


def load_weights(
    chunks: Sequence[Any],
    model_config: ModelConfig,
    path: str | Path,
    *,
    groups: ProcessGroupCollection,
    head: str = "lm",
    head_init: HeadInit = "auto",
    seed: int = 0,
) -> None:
    """Fill this rank's stages from a Hugging Face folder or a Megatron weights folder, whichever ``path`` is.

    All ranks of the world call this together. See `mrlhf.checkpoint.hf.load_hf_weights` for ``head_init`` and for
    the errors, which are the same for both kinds of folder.
    """
    if not is_megatron_folder(path):
        ranks = TensorRanks.of(groups)
        load_hf_weights(chunks, model_config, path, ranks=ranks, head=head, head_init=head_init, seed=seed)
        return
    stored = read_head(path)
    if head == "lm" and stored != "lm":
        raise CheckpointError(f"{path}: holds a value model, which has no language-model head")
    if head == "value" and head_init == "loaded" and stored != "value":
        raise CheckpointError(f"{path}: holds a language model, which has no value head; ask for a fresh head")
    with_head = head == "lm" or (stored == "value" and head_init != "fresh")
    if not with_head:
        set_fresh_value_head(chunks, model_config, seed)
    elif head == "value" and read_json(Path(path) / MEGATRON_FILE).get("value_bias"):
        add_value_bias(chunks)
    load_sharded_weights(
        chunks, Path(path) / WEIGHTS, groups=groups, vocab_size=model_config.vocab_size, with_head=with_head
    )


def stand_by_load(path: str | Path) -> None:
    """What a rank without a part of the model does while the others call `load_weights`."""
    if is_megatron_folder(path):
        stand_by(Path(path) / WEIGHTS)


def conversion_sizes(model: ModelConfig, tp: int, pp: int, world_size: int) -> ParallelSizes:
    """Sizes of a conversion, checked before any process group exists; there are no replicas to convert twice."""
    if world_size != tp * pp:
        raise ConfigError(
            f"conversion with TP {tp} x PP {pp} needs {tp * pp} processes, but {world_size} "
            f"{'was' if world_size == 1 else 'were'} started; use torchrun --nproc-per-node {tp * pp}, or sizes whose "
            f"product is {world_size} (a Megatron weights folder can be loaded under any layout afterwards)"
        )
    sizes = ParallelSizes(
        world_size=world_size,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        # Nothing is computed; but experts on several tensor ranks are built for it alone.
        sequence_parallel=model.num_experts is not None,
    )
    check_sizes(sizes, {"model": model})
    return sizes


@contextmanager
def world() -> Iterator[None]:
    """Use the process group that exists, else join the others as any command does (launcher, GPU, time limit)."""
    if dist.is_initialized():
        yield
        return
    device.install()
    initialize(detect_launch(os.environ))
    try:
        yield
    finally:
        shutdown()


def world_size() -> int:
    """Of the process group, or of the launcher where there is none yet."""
    return dist.get_world_size() if dist.is_initialized() else detect_launch(os.environ).world_size


def import_hf(
    source: str | Path,
    target: str | Path,
    *,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    head: Literal["lm", "value"] | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> None:
    """Turn a Hugging Face folder into a Megatron weights folder.

    Runs in one process, which then holds the model once, or under ``torchrun`` with TP x PP processes that hold their
    part of it. ``head`` is by default what the source has (``"value"`` on a language model makes a fresh head);
    ``dtype`` by default the source's. Raises `CheckpointError` or `ConfigError` before anything is written.
    """
    if is_megatron_folder(source):
        raise CheckpointError(f"{source}: is a Megatron weights folder already; import reads Hugging Face folders")
    config = read_model_config(source)
    kind = head or read_head(source)
    target_dtype = dtype or _BY_NAME[config.dtype]
    sizes = conversion_sizes(config, tensor_model_parallel_size, pipeline_model_parallel_size, world_size())
    problem = FolderWriter.problem(target, overwrite)
    if problem:
        raise CheckpointError(problem)
    with world():
        groups = build_groups(sizes)
        chunks = build_model(config, sizes, groups, head=cast(Any, kind), dtype=target_dtype, trainable=False)
        load_weights(chunks, config, source, groups=groups, head=kind)
        folder = FolderWriter(target)
        if dist.get_rank() == 0:
            (folder.begin() / WEIGHTS).mkdir()
        dist.barrier()
        save_sharded_weights(chunks, folder.folder / WEIGHTS, groups=groups)
        if dist.get_rank() == 0:
            name = dtype_name(target_dtype)
            description = {
                "format": 1,
                "head": kind,
                "value_bias": kind == "value" and has_value_bias(source),
                "model_config": model_config_to_dict(replace(config, dtype=cast(Any, name))),
            }
            write_config(Path(source), folder.folder, config, kind, name)
            copy_companions(Path(source), folder.folder)
            (folder.folder / MEGATRON_FILE).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
            folder.commit()
        dist.barrier()


def export_megatron(
    source: str | Path,
    target: str | Path,
    *,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    dtype: torch.dtype | None = None,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> None:
    """Turn a Megatron weights folder (or a Hugging Face one, say to change its dtype) into a Hugging Face folder.

    Processes and errors as in `import_hf`.
    """
    config = read_model_config(source)
    kind = read_head(source)
    sizes = conversion_sizes(config, tensor_model_parallel_size, pipeline_model_parallel_size, world_size())
    with world():
        groups = build_groups(sizes)
        chunks = build_model(config, sizes, groups, head=cast(Any, kind), dtype=_BY_NAME[config.dtype], trainable=False)
        load_weights(chunks, config, source, groups=groups, head=kind, head_init="loaded")
        export_hf(
            chunks,
            config,
            target,
            source_folder=source,
            groups=groups,
            head=kind,
            dtype=dtype,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
        )
