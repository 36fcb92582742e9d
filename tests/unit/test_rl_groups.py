"""Advantages without a critic, and the means of a loss, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrlhf import rl


def t(*x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def test_grpo_divides_by_the_groups_sample_deviation() -> None:
    # Group 7: 1, 2, 3, mean 2, deviation 1. Group 9: 0 and 4, mean 2, deviation sqrt(8). In any order.
    returns, groups = t(1, 0, 2, 3, 4), torch.tensor([7, 9, 7, 7, 9])
    root = math.sqrt(8)
    advantages = rl.group_advantages(returns, groups, "grpo")
    assert advantages.tolist() == pytest.approx([-1, -2 / root, 0, 1, 2 / root], abs=2e-6)
    plain = rl.group_advantages(returns, groups, "grpo", normalize_std=False)
    assert plain.tolist() == pytest.approx([-1, -2, 0, 1, 2], abs=1e-12)


def test_rloo_takes_the_mean_of_the_others_off() -> None:
    returns, groups = t(1, 0, 2, 6, 4), torch.tensor([7, 9, 7, 7, 9])
    advantages = rl.group_advantages(returns, groups, "rloo")
    assert advantages.tolist() == pytest.approx([1 - 4, 0 - 4, 2 - 3.5, 6 - 1.5, 4 - 0], abs=1e-12)


def test_equal_returns_teach_nothing() -> None:
    # 0.1 three times does not add up to 0.3 exactly.
    for kind in ("grpo", "rloo"):
        advantages = rl.group_advantages(torch.tensor([0.1, 0.1, 0.1]), torch.tensor([5, 5, 5]), kind)
        assert advantages.abs().max() < 1e-8
        assert advantages.dtype == torch.float32


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"group\(s\) \[4\] have only one"):
        rl.group_advantages(t(1, 2, 3), torch.tensor([3, 4, 3]), "rloo")
    with pytest.raises(ValueError, match="estimator must be one of grpo, rloo"):
        rl.group_advantages(t(1, 2), torch.tensor([3, 3]), "gae")  # type: ignore[arg-type]
    assert rl.group_advantages(t(), torch.tensor([], dtype=torch.int64), "grpo").shape == (0,)


@given(st.lists(st.floats(-10, 10), min_size=4, max_size=4), st.permutations(range(4)))
def test_groups_do_not_depend_on_the_order_of_rows_or_on_what_is_added_to_all(
    returns: list[float], order: list[int]
) -> None:
    groups = torch.tensor([0, 0, 1, 1])
    for kind in ("grpo", "rloo"):
        plain = rl.group_advantages(t(*returns), groups, kind)
        moved = rl.group_advantages(t(*returns)[list(order)], groups[list(order)], kind)
        torch.testing.assert_close(moved, plain[list(order)], rtol=1e-9, atol=1e-9)
        raised = rl.group_advantages(t(*returns) + 3, groups, kind, normalize_std=False)
        expected = rl.group_advantages(t(*returns), groups, kind, normalize_std=False)
        torch.testing.assert_close(raised, expected, rtol=1e-9, atol=1e-9)
        # Advantages of a group add up to nothing, but for the rounding of a mean of numbers up to 10 (1.8e-15). Returns
        # that differ by as little are divided by the 1e-6 of `STD_EPS`, which makes 1.8e-9 of it.
        for group in (slice(0, 2), slice(2, 4)):
            assert expected[group].sum().abs() < 3e-14
            assert plain[group].sum().abs() < 1e-8


def test_returns_to_go() -> None:
    rewards = torch.tensor([[9.0, -0.1, -0.2, 1.0, math.nan]], dtype=torch.float64)
    mask = torch.tensor([[False, True, True, True, False]])
    assert rl.returns_to_go(rewards, mask, gamma=1.0)[0].tolist() == pytest.approx([0, 0.7, 0.8, 1.0, 0])
    half = [0, -0.1 + 0.5 * (-0.2 + 0.5), -0.2 + 0.5, 1.0, 0]
    assert rl.returns_to_go(rewards, mask, gamma=0.5)[0].tolist() == pytest.approx(half)


def test_sequence_weights() -> None:
    mask = torch.tensor([[True, False, False], [True, True, True], [False, False, False]])
    weights, rows = rl.sequence_row_weights(mask)
    assert weights.tolist() == pytest.approx([1, 1 / 3, 0])
    assert rows == 2
