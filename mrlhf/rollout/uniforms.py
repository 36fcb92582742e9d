"""Random numbers of sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15


def _signed(word: int) -> int:
    word &= 2**64 - 1
    return word - 2**64 if word >= 2**63 else word


def _mix(word: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), a bijection of 64-bit words; int64 wraps around."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ _logical_shift(word, shift)) * _signed(factor)
    return word ^ _logical_shift(word, 31)


def _logical_shift(word: Tensor, bits: int) -> Tensor:
    return (word >> bits) & (2 ** (64 - bits) - 1)


def uniform_for(seed: int, step: int, sample_ids: Tensor, positions: Tensor) -> Tensor:
    """Random numbers that depend on these four numbers alone, not on layout, batch or call order.

    Counter-based: each number in turn is added to the state and the state is mixed by SplitMix64's bijection.

    Args:
        seed: the run's seed, any integer.
        step: rollout step.
        sample_ids: ``[N]`` integers, the global id of each sequence.
        positions: ``[N]`` integers, the position of the token to be drawn.

    Returns:
        ``[N]`` float64 in [0, 1), on the device of ``sample_ids``.
    """
    state = torch.tensor(_signed(seed + _GOLDEN), dtype=torch.int64, device=sample_ids.device)
    for word in (torch.tensor(_signed(step), device=state.device), sample_ids.long(), positions.long()):
        state = _mix(_mix(state) + word + _signed(_GOLDEN))
    return _logical_shift(_mix(state + _signed(_GOLDEN)), 11).double() * 2.0**-53
