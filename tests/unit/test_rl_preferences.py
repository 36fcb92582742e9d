"""Losses on preference pairs against numbers by hand, autograd and identities."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrlhf import rl

# h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected) = 2 and -4; with beta 0.5: 1 and -2.
POLICY_CHOSEN, POLICY_REJECTED = torch.tensor([-3.0, -8.0]), torch.tensor([-6.0, -2.0])
REF_CHOSEN, REF_REJECTED = torch.tensor([-4.0, -6.0]), torch.tensor([-5.0, -4.0])
BY_HAND = {  # softplus(-1) = 0.3132617, softplus(2) = 2.1269280, softplus(1) = 1.3132617, softplus(-2) = 0.1269280
    "sigmoid": ({}, 0.3132617 + 2.1269280),
    "smoothed": ({"label_smoothing": 0.1}, 0.9 * 2.4401897 + 0.1 * 1.4401897),
    "margin": ({"margin": torch.tensor([1.0, -2.0])}, 2 * math.log(2)),
    "hinge": ({"kind": "hinge"}, 0.0 + 3.0),
    "hinge with a margin": ({"kind": "hinge", "margin": 1.0}, 1.0 + 4.0),
    "ipo": ({"kind": "ipo"}, (2 - 1) ** 2 + (-4 - 1) ** 2),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_dpo_by_hand(name: str) -> None:
    options, expected = BY_HAND[name]
    terms = rl.dpo_loss(POLICY_CHOSEN, POLICY_REJECTED, REF_CHOSEN, REF_REJECTED, beta=0.5, **options)
    assert terms.loss_sum.item() == pytest.approx(expected, rel=1e-6)
    assert terms.count.item() == 2
    results = {metric: value.result() for metric, value in terms.metrics.items()}
    assert results == pytest.approx(
        {
            "accuracy": 0.5,
            "chosen_reward": (0.5 - 1.0) / 2,
            "rejected_reward": (-0.5 + 1.0) / 2,
            "reward_margin": (1.0 - 2.0) / 2,
            "chosen_logprob": -5.5,
            "rejected_logprob": -4.0,
        }
    )


def test_dpo_of_the_reference_itself_is_log_2_and_its_gradient_half_of_beta() -> None:
    chosen, rejected = (x.clone().requires_grad_() for x in (POLICY_CHOSEN, POLICY_REJECTED))
    terms = rl.dpo_loss(chosen, rejected, POLICY_CHOSEN, POLICY_REJECTED, beta=0.3)
    assert terms.loss_sum.item() == pytest.approx(2 * math.log(2), rel=1e-7)
    # No difference is no success.
    assert terms.metrics["accuracy"].result() == 0
    terms.loss_sum.backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.tolist() == pytest.approx([-0.15, -0.15])
    assert rejected.grad.tolist() == pytest.approx([0.15, 0.15])


@pytest.mark.parametrize("options", [options for options, _ in BY_HAND.values()])
def test_dpo_gradients_are_those_of_the_formula_and_the_reference_gets_none(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(2, generator=generator, dtype=torch.float64) for _ in range(4)]
    policy = [v.clone().requires_grad_() for v in values[:2]]
    reference = [v.clone().requires_grad_() for v in values[2:]]
    assert torch.autograd.gradcheck(
        lambda c, r: rl.dpo_loss(c, r, *values[2:], beta=0.7, **options).loss_sum, tuple(policy)
    )
    rl.dpo_loss(*policy, *reference, beta=0.7, **options).loss_sum.backward()
    assert all(r.grad is None for r in reference)


@given(st.lists(st.floats(-50, 50), min_size=4, max_size=4), st.floats(0.01, 2), st.floats(0, 0.49))
def test_dpo_is_symmetric_and_depends_on_ratios_alone(numbers: list[float], beta: float, smoothing: float) -> None:
    pc, pr, rc, rr = torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)
    options: dict[str, Any] = {"beta": beta, "label_smoothing": smoothing}
    loss = rl.dpo_loss(pc, pr, rc, rr, **options).loss_sum
    # Swapping the pair turns h into -h: the smoothed loss with e becomes that with 1 - e, and their sum is e-free.
    swapped = rl.dpo_loss(pr, pc, rr, rc, **options).loss_sum
    plain = rl.dpo_loss(pc, pr, rc, rr, beta=beta).loss_sum + rl.dpo_loss(pr, pc, rr, rc, beta=beta).loss_sum
    assert (loss + swapped).item() == pytest.approx(plain.item(), rel=1e-9, abs=1e-9)
    shifted = rl.dpo_loss(pc + 3, pr - 1, rc + 3, rr - 1, **options).loss_sum
    assert shifted.item() == pytest.approx(loss.item(), rel=1e-9, abs=1e-9)


def test_dpo_far_off_is_finite() -> None:
    far = torch.tensor([1e4, -1e4], requires_grad=True)
    terms = rl.dpo_loss(far, -far, torch.zeros(2), torch.zeros(2), beta=1.0)
    terms.loss_sum.backward()
    assert terms.loss_sum.item() == pytest.approx(2e4)
    assert far.grad is not None
    assert far.grad.tolist() == [0.0, -2.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "beta must be above 0"),
        ({"beta": 0.1, "label_smoothing": 0.5}, "label_smoothing must be in"),
        ({"beta": 0.1, "label_smoothing": 0.1, "kind": "ipo"}, "sigmoid loss only"),
        ({"beta": 0.1, "margin": 1.0, "kind": "ipo"}, "no meaning with the ipo loss"),
        ({"beta": 0.1, "kind": "log"}, "kind must be"),
    ],
)
def test_dpo_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rl.dpo_loss(POLICY_CHOSEN, POLICY_REJECTED, REF_CHOSEN, REF_REJECTED, **options)


def test_sequence_logprobs_sum_or_mean_of_the_response() -> None:
    logprobs = torch.tensor([[torch.nan, -1.0, -3.0, torch.inf], [-2.0, torch.nan, 5.0, 5.0], [1.0, 1.0, 1.0, 1.0]])
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    assert rl.sequence_logprobs(logprobs, mask).tolist() == [-4.0, -2.0, 0.0]
    assert rl.sequence_logprobs(logprobs, mask, average=True).tolist() == [-2.0, -2.0, 0.0]
    leaf = torch.full((1, 4), -1.0, requires_grad=True)
    rl.sequence_logprobs(leaf, mask[:1], average=True).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [[0.0, 0.5, 0.5, 0.0]]


def test_nll_of_the_chosen_responses() -> None:
    terms = rl.nll_loss(torch.tensor([-1.5, -0.5]))
    assert (terms.loss_sum.item(), terms.count.item(), terms.metrics["chosen_nll"].result()) == (2.0, 2.0, 1.0)


def test_centring_by_hand() -> None:
    chosen, rejected = torch.tensor([2.0, -1.0], requires_grad=True), torch.tensor([1.0, 1.0], requires_grad=True)
    plain = rl.pairwise_loss(chosen, rejected)
    centred = rl.pairwise_loss(chosen, rejected, centering_coef=0.01)
    # (2 + 1)^2 + (-1 + 1)^2 = 9
    assert (centred.loss_sum - plain.loss_sum).item() == pytest.approx(0.09)
    gradients = torch.autograd.grad(centred.loss_sum - plain.loss_sum, (chosen, rejected))
    assert [g.tolist() for g in gradients] == [pytest.approx([0.06, 0.0]), pytest.approx([0.06, 0.0])]
    assert centred.metrics["score_margin"].result() == plain.metrics["score_margin"].result() == -0.5


@pytest.mark.parametrize(
    ("row", "length", "at_beginning", "expected"),
    [
        ([5, 6, 7, 0, 0], 3, 0, 3),  # the pad id nowhere but in the padding
        ([5, 6, 0, 0, 0], 3, 0, 2),  # the end token is the pad id: the row ends before it
        ([0, 5, 6, 0, 0], 4, 1, 3),  # OPT: the row begins with it
        ([0, 5, 6, 7, 8], 5, 1, 5),  # OPT, no padding at all
        ([5, 6, 7, 0, 0], 3, 1, 3),  # told of a padding at the beginning that is not there
        ([0, 0, 0, 0, 0], 2, 0, 1),  # at least one token
    ],
)
def test_ends_of_rows_as_deepspeed_chat_finds_them(
    row: list[int], length: int, at_beginning: int, expected: int
) -> None:
    found = rl.lengths_before_padding(
        torch.tensor([row]), torch.tensor([length]), pad_id=0, padding_at_beginning=at_beginning
    )
    assert found.tolist() == [expected]
