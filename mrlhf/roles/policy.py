"""Models that give log-probs: the frozen reference, and what the actor shares with it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mrlhf.megatron.model import LogprobRequest
from mrlhf.roles.micro_batches import Cut
from mrlhf.roles.model import RoleModel, label_targets, pad_frame
from mrlhf.rollout.engine import RolloutEngine
from mrlhf.types import RolloutBatch


def logprob_request(temperature: float, *, with_entropy: bool = False) -> Callable[[RolloutBatch], LogprobRequest]:
    """Asks the head for the log-probs of a micro-batch's labels where ``gae_mask`` is True.

    Temperature 0, greedy choice, has log-probs at 1.
    """

    def request(batch: RolloutBatch) -> LogprobRequest:
        """What the head computes for a micro-batch."""
        assert batch.gae_mask is not None, "masks are set before any log-prob is asked for"
        return LogprobRequest(
            targets=label_targets(batch),
            wanted=pad_frame(batch.gae_mask),
            temperature=temperature or 1.0,
            with_entropy=with_entropy,
        )

    return request


class PolicyModel(RoleModel):
    """A language model as a role."""

    def logprobs(self, batch: RolloutBatch, cut: Cut, *, temperature: float) -> torch.Tensor:
        """``log p(label)`` where ``gae_mask`` is True, 0 elsewhere: ``[B, S-1]`` fp32 on every rank."""
        return self.inferred(batch, cut, logprob_request(temperature))

    def engine(self, slots: int, cache_bytes: int | None = None) -> RolloutEngine:
        """Generation on these weights, at most ``slots`` rows at once in at most ``cache_bytes`` of keys and values."""
        return RolloutEngine(
            self.chunks,
            self.groups,
            vocab_size=self.config.vocab_size,
            kv_heads=self.config.num_query_groups,
            head_dim=self.config.head_dim,
            max_length=self.config.max_position_embeddings,
            slots=slots,
            cache_bytes=cache_bytes,
        )
