"""The mathematics of PPO and of preferences: pure torch functions of tensors and numbers."""

from mrlhf.rl.advantages import gae
from mrlhf.rl.groups import Aggregation, Estimator, group_advantages, returns_to_go, sequence_row_weights
from mrlhf.rl.kl import KLKind, kl_estimate
from mrlhf.rl.losses import (
    LossTerms,
    ds_group_row_weights,
    entropy_loss,
    kl_loss,
    policy_loss,
    sampler_gap,
    truncated_weights,
    value_loss,
)
from mrlhf.rl.masked import masked_mean, masked_moments, masked_sum, whiten
from mrlhf.rl.preferences import (
    DPOKind,
    diverging_pairwise_loss,
    dpo_loss,
    lengths_before_padding,
    nll_loss,
    pairwise_loss,
    sequence_logprobs,
)
from mrlhf.rl.rewards import Semantics, response_masks, shape_rewards

__all__ = [
    "Aggregation",
    "Estimator",
    "DPOKind",
    "KLKind",
    "LossTerms",
    "Semantics",
    "diverging_pairwise_loss",
    "dpo_loss",
    "ds_group_row_weights",
    "entropy_loss",
    "gae",
    "group_advantages",
    "kl_estimate",
    "kl_loss",
    "lengths_before_padding",
    "masked_mean",
    "masked_moments",
    "masked_sum",
    "nll_loss",
    "pairwise_loss",
    "policy_loss",
    "response_masks",
    "returns_to_go",
    "sampler_gap",
    "sequence_row_weights",
    "sequence_logprobs",
    "shape_rewards",
    "truncated_weights",
    "value_loss",
    "whiten",
]
