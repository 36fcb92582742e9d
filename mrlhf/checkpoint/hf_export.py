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
    expt_tp: dist.ProcessGroup
    expt_dp: dist.ProcessGroup
    tp_ep: dist.ProcessGroup


class _Gatherer:
    """Brings single parameters to the writer: tensor rank 0 of the first pipeline stage of the first replica."""

    def __init__(self, groups: Groups, params: dict[str, torch.nn.Parameter]) -> None:
        self.tp, self.pp = groups.tp, groups.pp
        self.expert_tp, self.tp_ep = groups.expt_tp, groups.tp_ep
        self.params = params
        self.pp_rank = dist.get_rank(self.pp)
        self.is_first = dist.get_rank(_replicas(groups)) == 0
        # The ranks of a stage that hold all experts once; their first is the first of its first replica too.
        self.is_first_of_experts = dist.get_rank(groups.expt_dp) == 0
        self.is_writer = self.is_first and dist.get_rank(self.tp) == 0 and self.pp_rank == 0
        # The first stage that has a parameter sends it: a tied weight lives on the first and the last.
        self.owner: dict[str, int] = {}
        self.shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.holder: dict[str, int] = {}
        """Place in ``tp_ep`` of the first rank with an expert's parameter."""
        if not self.is_needed:
            return
        shapes = {name: (tuple(param.shape), param.dtype) for name, param in params.items()}
        for stage, found in enumerate(_gather_objects(shapes, self.pp)):
            for name, shape in found.items():
                self.owner.setdefault(name, stage)
                self.shapes.setdefault(name, shape)
        if self.is_first_of_experts and self.tp_ep.size() > self.expert_tp.size():
            for place, (owner, found) in enumerate(_gather_objects((self.owner, self.shapes), self.tp_ep)):
                for name in found:
                    self.owner.setdefault(name, owner[name])
                    self.shapes.setdefault(name, found[name])
                    self.holder.setdefault(name, place)

    @property
    def is_needed(self) -> bool:
        """Whether this rank has something that the others of its kind only have copies of."""
        return self.is_first or self.is_first_of_experts

    def takes_part(self, weight: Weight) -> bool:
        """Whether this rank's copy of a parameter is the one that is written."""
        return self.is_first if weight.expert is None else self.is_first_of_experts

    def fetch(self, weight: Weight, device: torch.device) -> list[torch.Tensor] | None:
        """The shards of ``weight`` from all tensor ranks, on the writer; None elsewhere."""
        if not self.takes_part(weight):
            return None
        owner = self.owner[weight.name]
        group = self.tp if weight.expert is None else self.tp_ep
        shards: list[torch.Tensor] | None = None
        if self.pp_rank == owner:
            shards = self._of_stage(weight, group, device)
        if owner == 0 or dist.get_rank(group) != 0:
            return shards if self.is_writer else None
        if self.pp_rank == owner:
            assert shards is not None
            for shard in shards:
                dist.send(shard, dst=dist.get_global_rank(self.pp, 0), group=self.pp)
        elif self.is_writer:
            shards = [self._empty(weight, device) for _ in range(self._count(weight))]
            for shard in shards:
                dist.recv(shard, src=dist.get_global_rank(self.pp, owner), group=self.pp)
            return shards
        return None

    def _of_stage(self, weight: Weight, group: dist.ProcessGroup, device: torch.device) -> list[torch.Tensor] | None:
        """Bring the shards to the first rank of ``group``; None on the others."""
        first = self.holder.get(weight.name, 0) if weight.expert is not None else 0
        me, shards = dist.get_rank(group), []
        for place in range(first, first + self._count(weight)):
            if me == place:
                shards.append(self.params[weight.name].detach().contiguous())
                if me != 0:
                    dist.send(shards[-1], dst=dist.get_global_rank(group, 0), group=group)
            elif me == 0:
                shards.append(self._empty(weight, device))
                dist.recv(shards[-1], src=dist.get_global_rank(group, place), group=group)
        return shards if me == 0 else None

    def _count(self, weight: Weight) -> int:
        if weight.kind == "replicated":
            return 1
        return dist.get_world_size(self.tp if weight.expert is None else self.expert_tp)

    def _empty(self, weight: Weight, device: torch.device) -> torch.Tensor:
        shape, dtype = self.shapes[weight.name]
        return torch.empty(shape, dtype=dtype, device=device)


def _gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


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
    gatherer = _Gatherer(groups, params)
    writes = gatherer.is_writer
    _agree(FolderWriter.problem(path_out, overwrite) if writes else None, groups, device)
    if gatherer.is_needed:
        folder = FolderWriter(path_out)
        _write(gatherer, chunks, model_config, folder, source_folder, head, dtype, max_shard_size, device)
        if writes:
            used = Path(tokenizer) if tokenizer is not None else None
            copy_companions(Path(source_folder), folder.folder, tokenizer=used, chat_template=chat_template)
            folder.commit()
    _agree(None, groups, device)


def _write(
    gatherer: _Gatherer,
    chunks: Sequence[Any],
    config: ModelConfig,
    folder: FolderWriter,
    source_folder: str | Path,
    head: str,
    dtype: torch.dtype | None,
    max_shard_size: int,
    device: torch.device,
) -> None:
    weights = whole_model(config, head, value_bias=OUTPUT_BIAS in gatherer.owner)
    check_stage(chunks, weights)
    if head == "lm" and config.tie_word_embeddings:
        del weights[OUTPUT_WEIGHT]
    absent = [n for n, weight in weights.items() if gatherer.takes_part(weight) and n not in gatherer.owner]
    if absent:
        raise CheckpointError(f"no pipeline stage has {', '.join(absent)}")
    shapes = {
        name: shape for weight in weights.values() for name, shape in zip(weight.sources, weight.shapes, strict=True)
    }
    out_dtype = dtype or next(iter(gatherer.params.values())).dtype
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
