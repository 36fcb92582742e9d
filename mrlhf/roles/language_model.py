"""Language modelling on rows with marked tokens: the loss of supervised fine-tuning and of PTX."""

from __future__ import annotations

import torch

from mrlhf.megatron.model import LogprobRequest
from mrlhf.rl import masked_sum
from mrlhf.roles.model import in_label_frame, label_targets, pad_frame
from mrlhf.types import Metric, RolloutBatch


def learned_request(batch: RolloutBatch) -> LogprobRequest:
    """Asks the head for the log-probs of the learned tokens of a micro-batch."""
    assert batch.response_mask is not None
    return LogprobRequest(targets=label_targets(batch), wanted=pad_frame(batch.response_mask))


def nll_loss(batch: RolloutBatch, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Metric]]:
    """``-log p`` summed over the learned tokens of a micro-batch; ``output`` is ``[b, S]`` fp32."""
    return learned_nll(in_label_frame(output), batch)


def learned_nll(logprobs: torch.Tensor, batch: RolloutBatch) -> tuple[torch.Tensor, dict[str, Metric]]:
    """``-log p`` summed over the learned tokens of rows, from log-probs in the label frame ``[b, S-1]``."""
    assert batch.response_mask is not None
    loss = -masked_sum(logprobs, batch.response_mask)
    count = batch.response_mask.sum()
    return loss, {"loss": Metric("mean", loss.detach().double(), count.double())}
