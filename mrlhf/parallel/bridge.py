"""Tensors from one part of the world to the other, where two parts work at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.parallel.collectives import Group, group_device

Message = tuple[dict[str, Any], dict[str, Tensor]]
"""Small plain values, and tensors by name."""


class Bridge:
    """Two parts of the world: the actors' ranks, and the critics'.

    What goes over is the same on every rank of the part that it comes from, so that the first of them speaks for all:
    one broadcast to all ranks of the other part for each tensor, and one for the names and shapes.
    """

    def __init__(self, actors: Sequence[int], critics: Sequence[int], timeout: timedelta | None = None) -> None:
        """Make the two groups; all ranks of the world call this together.

        Args:
            actors: ranks of one part.
            critics: ranks of the other one.
            timeout: longest wait of a rank for the other part, so that of a whole phase.
        """
        self.actors, self.critics = list(actors), list(critics)
        self.on_actor_ranks = dist.get_rank() in self.actors
        self._to_critics: Group = dist.new_group(sorted([self.actors[0], *self.critics]), timeout=timeout)
        self._to_actors: Group = dist.new_group(sorted([self.critics[0], *self.actors]), timeout=timeout)

    def send(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Hand ``values`` (plain, and few) and ``tensors`` to the other part; every rank of this one calls this."""
        mine, group = (self.actors, self._to_critics) if self.on_actor_ranks else (self.critics, self._to_actors)
        if dist.get_rank() != mine[0]:
            return
        found = dict(tensors or {})
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()}
        dist.broadcast_object_list([(dict(values), shapes)], src=mine[0], group=group)
        for tensor in found.values():
            # gloo knows no bool.
            kind = torch.uint8 if tensor.dtype == torch.bool else tensor.dtype
            dist.broadcast(tensor.detach().to(group_device(group), kind).contiguous(), src=mine[0], group=group)

    def receive(self, device: torch.device) -> Message:
        """What the other part's `send` hands over, the tensors on ``device``; every rank of this one calls this."""
        theirs, group = (self.critics, self._to_actors) if self.on_actor_ranks else (self.actors, self._to_critics)
        header: list[Any] = [None]
        dist.broadcast_object_list(header, src=theirs[0], group=group)
        values, shapes = header[0]
        tensors = {}
        for name, (shape, dtype) in shapes.items():
            kind = torch.uint8 if dtype == torch.bool else dtype
            buffer = torch.empty(shape, dtype=kind, device=group_device(group))
            dist.broadcast(buffer, src=theirs[0], group=group)
            tensors[name] = buffer.to(device=device, dtype=dtype)
        return values, tensors
