"""The mathematics of PPO: pure torch functions of tensors and numbers."""

from mrlhf.rl.advantages import gae
from mrlhf.rl.kl import KLKind, kl_estimate
from mrlhf.rl.losses import (
    LossTerms,
    diverging_pairwise_loss,
    ds_group_row_weights,
    entropy_loss,
    kl_loss,
    pairwise_loss,
    policy_loss,
    value_loss,
)
from mrlhf.rl.masked import masked_mean, masked_moments, masked_sum, whiten
from mrlhf.rl.rewards import Semantics, response_masks, shape_rewards

__all__ = [
    "KLKind",
    "LossTerms",
    "Semantics",
    "diverging_pairwise_loss",
    "ds_group_row_weights",
    "entropy_loss",
    "gae",
    "kl_estimate",
    "kl_loss",
    "masked_mean",
    "masked_moments",
    "masked_sum",
    "pairwise_loss",
    "policy_loss",
    "response_masks",
    "shape_rewards",
    "value_loss",
    "whiten",
]
