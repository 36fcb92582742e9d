"""What a save would write, from the description of the state alone: nothing is written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica

from mrlhf.checkpoint import optimizer_state
from mrlhf.checkpoint.training_state import Average, SavedModel, gathered, sharded_state
from mrlhf.parallel.collectives import all_gather_objects


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of the checkpoint, as far as one rank is concerned.

    Attributes:
        name: in the checkpoint.
        global_shape: of the whole.
        local_shape: of this rank's part.
        dtype: of the elements.
        written: bytes that this rank writes; 0 where another one has the same part.
    """

    name: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    written: int


def planned_tensors(
    models: Mapping[str, SavedModel], averages: Mapping[str, Average], *, optimizer: bool
) -> list[SavedTensor]:
    """The tensors that `mrlhf.checkpoint.training_state.save_state` would be given on this rank, by name.

    All ranks of the world call this together: a distributed optimizer's states are put together first.
    """
    state = sharded_state(models, averages, optimizer=gathered if optimizer else None)
    return sorted((_planned(item) for item in _tensors(state)), key=lambda each: each.name)


def _tensors(state: Any) -> Iterator[ShardedTensor]:
    if isinstance(state, ShardedTensorFactory):
        # Such as the two halves of a gated layer, which are stored apart.
        yield from _tensors(state.build())
    elif isinstance(state, ShardedTensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)


def _planned(item: ShardedTensor) -> SavedTensor:
    size = math.prod(item.local_shape) * item.dtype.itemsize
    return SavedTensor(
        name=item.key,
        global_shape=tuple(item.global_shape),
        local_shape=tuple(item.local_shape),
        dtype=str(item.dtype).removeprefix("torch."),
        written=size if is_main_replica(item.replica_id) else 0,
    )


def state_bytes(models: Mapping[str, SavedModel], averages: Mapping[str, Average], *, optimizer: bool = True) -> int:
    """About what `save_state` will write, for the first save of a run; all ranks of the world call this together.

    Small tensors that tensor ranks hold in common (norms) count on each of them.
    """
    own = 0
    for model in models.values():
        kinds = len(optimizer_state.kinds(model.trainable)) if optimizer else 0
        parameters = [p for p, writes in _parameters(model) if writes]
        own += sum(p.numel() * (p.element_size() + 4 * kinds) for p in parameters)
    for average in averages.values():
        # Its tensors are those of the parameters, in their order.
        for (_, writes), tensor in zip(_parameters(models[average.model]), average.tensors.values(), strict=True):
            own += tensor.numel() * tensor.element_size() if writes else 0
    return sum(all_gather_objects(own))


def _parameters(model: SavedModel) -> list[tuple[torch.nn.Parameter, bool]]:
    """Parameters of this rank, and whether it is the first one with the same: experts have replicas of their own."""
    groups = model.trainable.groups
    first = {True: not (groups.dp.rank() or groups.cp.rank()), False: not groups.expt_dp.rank()}
    found = [p for chunk in model.trainable.modules for p in chunk.parameters()]
    return [(parameter, first[bool(getattr(parameter, "allreduce", True))]) for parameter in found]
