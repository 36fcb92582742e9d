"""Identities of the PPO functions over random shapes and masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrlhf import rl
from mrlhf.rl.advantages import discounted_suffix_sum

SETTINGS = settings(max_examples=40, deadline=None)
GARBAGE = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e300], dtype=torch.float64)


@st.composite
def rows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, torch.Generator]:
    """Prompt and response lengths, the width of the label frame, and a generator."""
    count = draw(st.integers(1, 4))
    limit = draw(st.sampled_from([3, 20, 150]))
    prompts = torch.tensor(draw(st.lists(st.integers(1, limit), min_size=count, max_size=count)))
    responses = torch.tensor(draw(st.lists(st.integers(0, limit), min_size=count, max_size=count)))
    width = int((prompts + responses).max()) + draw(st.integers(0, 5))
    return prompts, responses, width, torch.Generator().manual_seed(draw(st.integers(0, 2**31)))


def random_frame(rows: int, width: int, mask: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(rows, width, dtype=torch.float64, generator=generator)
    garbage = GARBAGE[torch.randint(len(GARBAGE), (rows, width), generator=generator)]
    return torch.where(mask, x, garbage)


def naive_gae(rewards, values, mask, gamma, lam, bootstrap):
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for b in range(rewards.shape[0]):
        following, advantage = float(bootstrap[b]), 0.0
        for t in reversed(torch.nonzero(mask[b]).flatten().tolist()):
            delta = float(rewards[b, t]) + gamma * following - float(values[b, t])
            advantage = delta + gamma * lam * advantage
            following = float(values[b, t])
            advantages[b, t], returns[b, t] = advantage, advantage + following
    return advantages, returns


@SETTINGS
@given(rows(), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.95, 1.0]), st.booleans(), st.booleans())
def test_gae_equals_the_loop(data, gamma, lam, with_bootstrap, deepspeed) -> None:
    prompts, responses, width, generator = data
    _, mask = rl.response_masks(
        prompts,
        responses,
        width=width,
        semantics="deepspeed_chat" if deepspeed else "standard",
        response_width=int(responses.max()) if deepspeed else None,
    )
    rewards, values = (random_frame(len(prompts), width, mask, generator) for _ in range(2))
    bootstrap = torch.randn(len(prompts), dtype=torch.float64, generator=generator) * with_bootstrap
    got = rl.gae(
        rewards, values, mask, gamma=gamma, gae_lambda=lam, bootstrap_values=bootstrap if with_bootstrap else None
    )
    expected = naive_gae(rewards, values, mask, gamma, lam, bootstrap)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == torch.float64
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("width", [0, 1, 2, 63, 64, 65, 128, 129, 4096, 4097, 5000])
@pytest.mark.parametrize("decay", [0.0, 0.95, 1.0])
def test_blocked_scan(width: int, decay: float) -> None:
    x = torch.randn(2, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width))
    expected, carry = torch.zeros_like(x), torch.zeros(2, dtype=torch.float64)
    for t in reversed(range(width)):
        carry = x[:, t] + decay * carry
        expected[:, t] = carry
    torch.testing.assert_close(discounted_suffix_sum(x, decay), expected, rtol=1e-11, atol=1e-11)


def test_low_precision_inputs_give_fp32_results() -> None:
    x = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 100, dtype=torch.bool)
    low = x.bfloat16()
    advantages, returns = rl.gae(low, low, mask, gamma=1, gae_lambda=0.95)
    expected, _ = rl.gae(low.double(), low.double(), mask, gamma=1, gae_lambda=0.95)
    assert advantages.dtype == returns.dtype == torch.float32
    torch.testing.assert_close(advantages.double(), expected, rtol=1e-6, atol=1e-6)


@SETTINGS
@given(rows())
def test_masks_have_the_length_of_the_response(data) -> None:
    prompts, responses, width, _ = data
    response_mask, gae_mask = rl.response_masks(prompts, responses, width=width, semantics="standard")
    assert torch.equal(response_mask.sum(1), responses)
    assert torch.equal(gae_mask, response_mask)
    full = int(responses.max())
    same, wider = rl.response_masks(prompts, responses, width=width, semantics="deepspeed_chat", response_width=full)
    assert torch.equal(same, response_mask)
    assert torch.equal(wider.sum(1), responses + (responses < full))
    for b in range(len(prompts)):
        first = int(prompts[b]) - 1
        assert wider[b, first : first + int(wider[b].sum())].all()


def terms_of(frames, mask, weights):
    a, b, c = frames
    yield lambda x: rl.policy_loss(x, b, c, mask, clip_eps=0.2, dual_clip=3.0, row_weights=weights), a
    yield lambda x: rl.value_loss(x, b, c, mask, value_clip=0.2, row_weights=weights), a
    yield lambda x: rl.entropy_loss(x, mask, row_weights=weights), a
    for kind in ("k1", "k2", "k3", "abs"):
        yield lambda x, kind=kind: rl.kl_loss(x, b, mask, kind=kind, row_weights=weights), a


@SETTINGS
@given(rows(), st.booleans())
def test_garbage_outside_the_mask_changes_nothing(data, weighted: bool) -> None:
    prompts, responses, width, generator = data
    mask, _ = rl.response_masks(prompts, responses, width=width, semantics="standard")
    dirty = [random_frame(len(prompts), width, mask, generator) for _ in range(3)]
    clean = [torch.where(mask, x, 0.0) for x in dirty]
    weights = rl.ds_group_row_weights(mask, 2, responses > 1) if weighted else None
    for (dirty_loss, x), (clean_loss, y) in zip(
        terms_of(dirty, mask, weights), terms_of(clean, mask, weights), strict=True
    ):
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
        got, expected = dirty_loss(x), clean_loss(y)
        assert torch.equal(got.loss_sum, expected.loss_sum)
        got.loss_sum.backward()
        expected.loss_sum.backward()
        assert torch.equal(x.grad, y.grad)
        assert not x.grad[~mask].any()
        for name, metric in got.metrics.items():
            assert torch.equal(metric.value, expected.metrics[name].value), name


@SETTINGS
@given(rows(), st.integers(1, 3))
def test_sums_add_up_over_micro_batches(data, size: int) -> None:
    prompts, responses, width, generator = data
    mask, _ = rl.response_masks(prompts, responses, width=width, semantics="standard")
    a, b, c = (random_frame(len(prompts), width, mask, generator) for _ in range(3))
    whole = rl.policy_loss(a, b, c, mask, clip_eps=0.2)
    parts = [
        rl.policy_loss(*(x[i : i + size] for x in (a, b, c, mask)), clip_eps=0.2) for i in range(0, len(prompts), size)
    ]
    torch.testing.assert_close(sum(p.loss_sum for p in parts), whole.loss_sum)
    assert sum(p.count for p in parts) == whole.count == responses.sum()
    for name, metric in whole.metrics.items():
        merged = parts[0].metrics[name]
        for part in parts[1:]:
            merged = merged.merge(part.metrics[name])
        torch.testing.assert_close(torch.as_tensor(merged.result()), torch.as_tensor(metric.result()), equal_nan=True)


@SETTINGS
@given(rows(), st.integers(1, 5))
def test_row_weights_give_the_mean_of_group_means(data, group_size: int) -> None:
    prompts, responses, width, generator = data
    mask, _ = rl.response_masks(prompts, responses, width=width, semantics="standard")
    x = random_frame(len(prompts), width, mask, generator)
    valid = responses > 1
    weights = rl.ds_group_row_weights(mask, group_size, valid)
    terms = rl.entropy_loss(x, mask, row_weights=weights)
    means = []
    for start in range(0, len(prompts), group_size):
        chosen = mask[start : start + group_size] & valid[start : start + group_size].unsqueeze(1)
        if chosen.any():
            means.append(x[start : start + group_size][chosen].mean())
    expected = torch.stack(means).mean() if means else torch.zeros((), dtype=torch.float64)
    torch.testing.assert_close(terms.loss_sum, expected)
    assert float(terms.count) == pytest.approx(1.0 if means else 0.0)


@settings(max_examples=10, deadline=None)
@given(rows())
def test_gradients_of_the_losses(data) -> None:
    prompts, responses, width, generator = data
    prompts, responses = prompts.clamp(max=3), responses.clamp(max=4)
    width = int((prompts + responses).max())
    mask, _ = rl.response_masks(prompts, responses, width=width, semantics="standard")
    frames = [torch.where(mask, random_frame(len(prompts), width, mask, generator), 0.0) for _ in range(3)]
    for loss, x in terms_of(frames, mask, None):
        assert torch.autograd.gradcheck(lambda x, loss=loss: loss(x).loss_sum, (x.clone().requires_grad_(),))
