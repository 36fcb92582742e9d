"""What a save would write, from the description of the state alone: nothing is written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica

from mrlhf.checkpoint.training_state import Average, SavedModel, gathered, sharded_state


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
