"""Writes Megatron stages as a Hugging Face folder, gathering one parameter at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mrlhf.checkpoint.families import Weight
from mrlhf.checkpoint.hf_folder import FolderWriter, copy_companions, write_config
from mrlhf.checkpoint.names import OUTPUT_BIAS, OUTPUT_WEIGHT, all_parameters, check_stage, whole_model
from mrlhf.checkpoint.safetensors_io import SafetensorsWriter
from mrlhf.checkpoint.transforms import join_shards
from mrlhf.errors import CheckpointError
from mrlhf.model_config import ModelConfig

DEFAULT_SHARD_SIZE = 5 * 1024**3
"""Bytes of one safetensors file, transformers' customary 5 GB."""


class Groups(Protocol):
    """Process groups of the model (Megatron's ``ProcessGroupCollection`` has these attributes and more)."""

    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    dp: dist.ProcessGroup


class _Gatherer:
    """Brings single parameters to the writer: tensor rank 0 of the first pipeline stage of the first replica."""

    def __init__(self, groups: Groups, params: dict[str, torch.nn.Parameter]) -> None:
        self.tp, self.pp = groups.tp, groups.pp
        self.params = params
        self.tp_rank, self.pp_rank = dist.get_rank(self.tp), dist.get_rank(self.pp)
        self.is_writer = self.tp_rank == 0 and self.pp_rank == 0
        shapes = {name: (tuple(param.shape), param.dtype) for name, param in params.items()}
        by_stage: list[Any] = [None] * dist.get_world_size(self.pp)
        dist.all_gather_object(by_stage, shapes, group=self.pp)
        # The first stage that has a parameter sends it: a tied weight lives on the first and the last.
        self.owner: dict[str, int] = {}
        self.shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for stage, found in enumerate(by_stage):
            for name, shape in found.items():
                self.owner.setdefault(name, stage)
                self.shapes.setdefault(name, shape)

    def fetch(self, weight: Weight, device: torch.device) -> list[torch.Tensor] | None:
        """The shards of ``weight`` from all tensor ranks, on the writer; None elsewhere."""
        owner = self.owner[weight.name]
        shards: list[torch.Tensor] | None = None
        count = 1 if weight.kind == "replicated" else dist.get_world_size(self.tp)
        if self.pp_rank == owner:
            mine = self.params[weight.name].detach().contiguous()
            if count == 1:
                shards = [mine] if self.tp_rank == 0 else None
            else:
                shards = [torch.empty_like(mine) for _ in range(count)] if self.tp_rank == 0 else None
                dist.gather(mine, shards, dst=dist.get_global_rank(self.tp, 0), group=self.tp)
        if owner == 0 or self.tp_rank != 0:
            return shards if self.is_writer else None
        if self.pp_rank == owner:
            assert shards is not None
            for shard in shards:
                dist.send(shard, dst=dist.get_global_rank(self.pp, 0), group=self.pp)
        elif self.is_writer:
            shape, dtype = self.shapes[weight.name]
            shards = [torch.empty(shape, dtype=dtype, device=device) for _ in range(count)]
            for shard in shards:
                dist.recv(shard, src=dist.get_global_rank(self.pp, owner), group=self.pp)
            return shards
        return None


def _agree(problem: str | None, groups: Groups, device: torch.device) -> None:
    """Wait for all ranks of the model; raise on every one if the writer has a problem (others pass None)."""
    failed = torch.tensor([0 if problem is None else 1], device=device)
    for group in (groups.tp, groups.pp, _replicas(groups)):
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if int(failed) != 0:
        raise CheckpointError(problem or "the export failed on its writing rank, whose message says why")


def _replicas(groups: Groups) -> dist.ProcessGroup:
    """Ranks that hold the same shard: data parallel and, where it exists, context parallel."""
    group: dist.ProcessGroup = getattr(groups, "dp_cp", None) or groups.dp
    return group


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def export_hf(
    chunks: Sequence[Any],
    model_config: ModelConfig,
    path_out: str | Path,
    *,
    source_folder: str | Path,
    groups: Groups,
    head: str = "lm",
    dtype: torch.dtype | None = None,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
    tokenizer: str | Path | None = None,
    chat_template: str | None = None,
) -> None:
    """Write the model as a Hugging Face folder; all ranks of the model call this together.

    One parameter at a time is gathered to the first rank, which writes it at once. ``config.json`` is that of
    ``source_folder`` with the true vocabulary size, the architecture of ``head`` and the dtype written; generation
    configuration, tokenizer and chat template are copied. ``tokenizer`` (a folder or a SentencePiece file) takes the
    place of the source's, and ``chat_template`` (Jinja source) that of the tokenizer's. A value model becomes a
    one-label classifier (``score.weight``). ``dtype`` None keeps the parameters' own. The folder appears under its
    name when complete.

    Raises `CheckpointError` on every rank when the target exists (without ``overwrite``).
    """
    params = all_parameters(chunks)
    device = next(iter(params.values())).device
    first_replica = dist.get_rank(_replicas(groups)) == 0
    writes = first_replica and dist.get_rank(groups.tp) == 0 and dist.get_rank(groups.pp) == 0
    _agree(FolderWriter.problem(path_out, overwrite) if writes else None, groups, device)
    if first_replica:
        folder = FolderWriter(path_out)
        _write(params, chunks, model_config, folder, source_folder, groups, head, dtype, max_shard_size, device)
        if writes:
            used = Path(tokenizer) if tokenizer is not None else None
            copy_companions(Path(source_folder), folder.folder, tokenizer=used, chat_template=chat_template)
            folder.commit()
    _agree(None, groups, device)


def _write(
    params: dict[str, torch.nn.Parameter],
    chunks: Sequence[Any],
    config: ModelConfig,
    folder: FolderWriter,
    source_folder: str | Path,
    groups: Groups,
    head: str,
    dtype: torch.dtype | None,
    max_shard_size: int,
    device: torch.device,
) -> None:
    gatherer = _Gatherer(groups, params)
    weights = whole_model(config, head, value_bias=OUTPUT_BIAS in gatherer.owner)
    check_stage(chunks, weights)
    if head == "lm" and config.tie_word_embeddings:
        del weights[OUTPUT_WEIGHT]
    absent = [name for name in weights if name not in gatherer.owner]
    if absent:
        raise CheckpointError(f"no pipeline stage has {', '.join(absent)}")
    shapes = {
        name: shape for weight in weights.values() for name, shape in zip(weight.sources, weight.shapes, strict=True)
    }
    out_dtype = dtype or next(iter(params.values())).dtype
    writer = SafetensorsWriter(folder.begin(), shapes, out_dtype, max_shard_size) if gatherer.is_writer else None
    with writer or nullcontext():
        for weight in weights.values():
            shards = gatherer.fetch(weight, device)
            if writer is None or shards is None:
                continue
            for name, tensor in zip(weight.sources, join_shards(weight, shards, config), strict=True):
                writer.write(name, tensor)
    if gatherer.is_writer:
        write_config(Path(source_folder), folder.folder, config, head, dtype_name(out_dtype))
