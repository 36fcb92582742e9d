"""A running average of a model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mrlhf.roles.model import RoleModel


class WeightAverage:
    """``average = decay * average + (1 - decay) * weights`` in fp32, of this rank's shards.

    DeepSpeed-Chat's ``moving_average`` (its decay is 0.992). The average starts as the weights themselves. Under bf16
    and fp16 the weights that go in are the model's, rounded, as there.
    """

    def __init__(self, model: RoleModel, decay: float) -> None:
        """Copy the weights of ``model``."""
        self.model = model
        self.decay = decay
        self.shards = {name: p.detach().float().clone() for name, p in self._parameters()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights as they are now."""
        for name, parameter in self._parameters():
            self.shards[name].lerp_(parameter.detach().float(), 1.0 - self.decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model has the average's weights inside, and its own again afterwards."""
        own = {name: parameter.data for name, parameter in self._parameters()}
        try:
            for name, parameter in self._parameters():
                # Exchanged, not copied: optimizer and gradient buffers keep hold of the model's own storage.
                parameter.data = self.shards[name].to(parameter.dtype)
            yield
        finally:
            for name, parameter in self._parameters():
                parameter.data = own[name]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's shards by name."""
        return dict(self.shards)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from saved shards of the same layout."""
        for name, shard in self.shards.items():
            shard.copy_(state[name])

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for index, chunk in enumerate(self.model.chunks):
            for name, parameter in chunk.named_parameters():
                yield f"{index}.{name}", parameter
