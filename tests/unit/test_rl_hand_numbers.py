"""The PPO functions against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from mrlhf import rl

inf, nan = float("inf"), float("nan")


def tensor(*x: float) -> torch.Tensor:
    return torch.tensor([x], dtype=torch.float64)


def masks(prompt: int, response: int, width: int, semantics: str = "standard", full: int | None = None):
    return rl.response_masks(
        torch.tensor([prompt]), torch.tensor([response]), width=width, semantics=semantics, response_width=full
    )


def test_a1_the_score_is_on_eos() -> None:
    # prompt of one token, response [11, 12, EOS], two pads: label positions 0..4
    response_mask, gae_mask = masks(1, 3, 5)
    zero = torch.zeros(1, 5, dtype=torch.float64)
    rewards, kl = rl.shape_rewards(torch.tensor([1.0]), zero, zero, gae_mask, kl_coef=0.1, score_clip=5)
    assert rewards.tolist() == [[0, 0, 1, 0, 0]]
    assert rl.masked_sum(rewards, response_mask) == 1
    advantages, returns = rl.gae(rewards, tensor(0.2, 0.3, 0.4, nan, inf), gae_mask, gamma=1, gae_lambda=0.95)
    assert advantages[0].tolist() == pytest.approx([0.7365, 0.67, 0.6, 0, 0])
    assert returns[0].tolist() == pytest.approx([0.9365, 0.97, 1.0, 0, 0])


def test_a2_eos_stays_in_the_mask_where_it_is_the_pad_id() -> None:
    # tokens [p, p, a, b, 2, 2, 2, 2]: labels from position 1 on are the response
    response_mask, gae_mask = masks(2, 3, 7)
    assert response_mask[0, 1:6].tolist() == [True, True, True, False, False]
    zero = torch.zeros(1, 7, dtype=torch.float64)
    rewards, _ = rl.shape_rewards(torch.tensor([1.0]), zero, zero, gae_mask, kl_coef=0.1, score_clip=5)
    advantages, _ = rl.gae(rewards, zero, gae_mask, gamma=1, gae_lambda=0.95)
    assert int((advantages != 0).sum()) == int(response_mask.sum()) == 3


def test_a4_shaping_leaves_the_kl_alone() -> None:
    logprobs, reference = tensor(-1.0, -1.0), tensor(-1.2, -1.4)
    mask = torch.ones(1, 2, dtype=torch.bool)
    for _ in range(2):
        rewards, kl = rl.shape_rewards(torch.tensor([1.0]), logprobs, reference, mask, kl_coef=0.1, score_clip=5)
        assert rewards[0].tolist() == pytest.approx([-0.02, 0.96])
        assert kl[0].tolist() == pytest.approx([0.2, 0.4])
        assert float(rl.masked_mean(kl, mask)) == pytest.approx(0.3)
    assert logprobs.tolist() == [[-1.0, -1.0]]


def losses_of(x: torch.Tensor, mask: torch.Tensor) -> list[rl.LossTerms]:
    zero = torch.zeros_like(x)
    return [
        rl.policy_loss(x, zero, zero - 1, mask, clip_eps=0.2, dual_clip=3),
        rl.value_loss(x, zero, zero, mask, value_clip=0.2),
        rl.value_loss(x, zero, zero, mask, value_clip=None),
        rl.entropy_loss(x, mask),
        rl.kl_loss(x, zero, mask, kind="k3"),
    ]


@pytest.mark.parametrize("content", [(1.5, -2.0), (nan, inf)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a5_an_empty_mask_gives_zero_and_zero_gradients(content: tuple[float, float], dtype: torch.dtype) -> None:
    mask = torch.zeros(1, 2, dtype=torch.bool)
    for which in range(5):
        x = torch.tensor([content], dtype=dtype, requires_grad=True)
        terms = losses_of(x, mask)[which]
        assert terms.loss_sum == 0
        assert terms.count == 0
        terms.loss_sum.backward()
        assert x.grad.tolist() == [[0.0, 0.0]]
        assert all(math.isnan(metric.result()) for metric in terms.metrics.values())
    x = torch.tensor([content], dtype=dtype, requires_grad=True)
    mean = rl.masked_mean(x, mask)
    mean.backward()
    assert mean == 0
    assert x.grad.tolist() == [[0.0, 0.0]]
    assert [float(m) for m in rl.masked_moments(x, mask)] == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("advantage", "loss"), [(0.0, 0.0), (1.0, -1.2), (-1.0, math.exp(20))])
def test_a7_a_huge_log_ratio_is_bounded(dtype: torch.dtype, advantage: float, loss: float) -> None:
    assert math.exp(20) == pytest.approx(4.8517e8, rel=1e-4)
    x = torch.tensor([[200.0]], dtype=dtype, requires_grad=True)
    zero = torch.zeros_like(x)
    terms = rl.policy_loss(x, zero, zero + advantage, torch.ones(1, 1, dtype=torch.bool), clip_eps=0.2)
    assert terms.loss_sum.item() == pytest.approx(loss, rel=1e-6)
    terms.loss_sum.backward()
    assert torch.isfinite(x.grad).all()
    assert float(terms.metrics["ratio_max"].result()) == pytest.approx(math.exp(20), rel=1e-6)


@pytest.mark.parametrize("which", range(5))
def test_a7_nan_inside_the_mask_surfaces(which: int) -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    terms = losses_of(tensor(0.1, nan), mask)[which]
    assert terms.loss_sum.isnan()
    assert all(math.isnan(m.result()) for n, m in terms.metrics.items() if not n.endswith(("fraction", "return_mean")))


@pytest.mark.parametrize("field", ["scores", "logprobs", "reference", "values", "bootstrap"])
def test_nan_in_any_input_of_gae_surfaces_in_its_row_only(field: str) -> None:
    good = torch.zeros(2, 3, dtype=torch.float64)
    mask = torch.ones(2, 3, dtype=torch.bool)
    inputs = {n: good.clone() for n in ("logprobs", "reference", "values")}
    inputs |= {n: torch.zeros(2, dtype=torch.float64) for n in ("scores", "bootstrap")}
    inputs[field][1, ...] = nan
    rewards, _ = rl.shape_rewards(
        inputs["scores"], inputs["logprobs"], inputs["reference"], mask, kl_coef=0.1, score_clip=5
    )
    advantages, _ = rl.gae(
        rewards, inputs["values"], mask, gamma=1, gae_lambda=0.9, bootstrap_values=inputs["bootstrap"]
    )
    assert advantages[1].isnan().any()
    assert advantages[0].tolist() == [0, 0, 0]


def test_a8_whitening() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 10.0, nan])
    mask = torch.tensor([True, True, True, True, False])
    count, mean, m2 = rl.masked_moments(x, mask)
    assert (float(count), float(mean), float(m2 / count)) == (4.0, 4.0, 12.5)
    white = rl.whiten(x, mask, mean, m2 / count)
    assert white.tolist() == pytest.approx([-0.8485, -0.5657, -0.2828, 1.6971, 0], abs=5e-5)
    kept = rl.whiten(x, mask, mean, m2 / count, shift_mean=False)
    assert kept.tolist() == pytest.approx([3.1515, 3.4343, 3.7172, 5.6971, 0], abs=5e-5)


def test_a9_the_loss_does_not_depend_on_the_micro_batch_split() -> None:
    logprobs = torch.zeros(2, 3, dtype=torch.float64)
    advantages = torch.tensor([[1.0, nan, nan], [-1.0, -1.0, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False, False], [True, True, True]])
    for split in ([slice(0, 2)], [slice(0, 1), slice(1, 2)]):
        parts = [
            rl.policy_loss(logprobs[s], logprobs[s], advantages[s], mask[s], clip_eps=0.2, dual_clip=3) for s in split
        ]
        assert float(sum(p.loss_sum for p in parts) / sum(p.count for p in parts)) == 0.5


def test_a13_the_mask_covers_the_response_and_follows_the_rows() -> None:
    # attention [0,1,1,1,1,0] left-padded with response width 3 is: prompt 2 tokens, response 2 of 3 slots
    response_mask, _ = masks(2, 2, 4)
    assert response_mask[0, 1:4].tolist() == [True, True, False]
    prompts, responses = torch.tensor([2, 1, 3]), torch.tensor([2, 3, 1])
    order = torch.tensor([2, 0, 1])
    straight, _ = rl.response_masks(prompts, responses, width=5, semantics="standard")
    moved, _ = rl.response_masks(prompts[order], responses[order], width=5, semantics="standard")
    assert torch.equal(straight[order], moved)


def test_deepspeed_chat_has_one_slot_more_unless_full() -> None:
    response_mask, gae_mask = rl.response_masks(
        torch.tensor([2, 2, 1]), torch.tensor([2, 3, 0]), width=5, semantics="deepspeed_chat", response_width=3
    )
    assert response_mask.int().tolist() == [[0, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0]]
    assert gae_mask.int().tolist() == [[0, 1, 1, 1, 0], [0, 1, 1, 1, 0], [1, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": 2, "response": 2, "width": 4, "semantics": "chat"}, "standard, deepspeed_chat"),
        ({"prompt": 2, "response": 2, "width": 4, "semantics": "deepspeed_chat"}, "needs response_width"),
        (
            {"prompt": 2, "response": 4, "width": 9, "semantics": "deepspeed_chat", "full": 3},
            "4 tokens, response_width is 3",
        ),
        ({"prompt": 2, "response": 4, "width": 4}, "needs 5 label positions"),
        ({"prompt": 0, "response": 4, "width": 9}, "at least 1 needed"),
    ],
)
def test_response_masks_refuses(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        masks(**arguments)


def test_kl_estimates() -> None:
    logprobs, reference = tensor(-1.0, -2.0), tensor(-1.5, -1.0)
    assert rl.kl_estimate(logprobs, reference, "k1")[0].tolist() == [0.5, -1.0]
    assert rl.kl_estimate(logprobs, reference, "k2")[0].tolist() == [0.125, 0.5]
    assert rl.kl_estimate(logprobs, reference, "k3")[0].tolist() == pytest.approx(
        [math.exp(-0.5) - 1 + 0.5, math.exp(1) - 1 - 1]
    )
    assert rl.kl_estimate(logprobs, reference, "abs")[0].tolist() == [0.5, 1.0]
    with pytest.raises(ValueError, match="k1, k2, k3, abs"):
        rl.kl_estimate(logprobs, reference, "k4")  # type: ignore[arg-type]


def test_k3_is_finite_where_the_exponent_would_overflow() -> None:
    x = torch.tensor([[-500.0, 500.0]], requires_grad=True)
    kl = rl.kl_estimate(x, torch.zeros_like(x), "k3")
    kl.sum().backward()
    assert kl[0].tolist() == pytest.approx([math.exp(20) - 21, 499.0], rel=1e-6)
    assert x.grad.tolist() == [[0.0, 1.0]]


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    x = torch.log(torch.tensor([[5.0, 5.0, 2.0]], dtype=torch.float64)).requires_grad_()
    zero = torch.zeros_like(x)
    mask = torch.ones(1, 3, dtype=torch.bool)
    terms = rl.policy_loss(x, zero, tensor(-1, 1, -1), mask, clip_eps=0.2, dual_clip=3)
    assert terms.loss_sum.item() == pytest.approx(3 - 1.2 + 2)
    assert terms.metrics["dual_clip_fraction"].result() == pytest.approx(1 / 3)
    terms.loss_sum.backward()
    assert x.grad[0].tolist() == pytest.approx([0, 0, 2])
    with pytest.raises(ValueError, match="above 1"):
        rl.policy_loss(x, zero, zero, mask, clip_eps=0.2, dual_clip=1.0)


def test_policy_metrics() -> None:
    ratio = torch.tensor([[1.5, 0.5, 1.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]])
    terms = rl.policy_loss(ratio.log(), torch.zeros_like(ratio), tensor(1, 1, 1, nan), mask, clip_eps=0.2)
    got = {name: metric.result() for name, metric in terms.metrics.items()}
    k1 = -(math.log(1.5) + math.log(0.5)) / 3
    # ratio 0.5 with A > 0 is not decided by the clipped branch
    assert got == pytest.approx(
        {
            "ratio_mean": 1.0,
            "ratio_max": 1.5,
            "ratio_min": 0.5,
            "clip_fraction": 1 / 3,
            "approx_kl_k1": k1,
            "approx_kl_k3": k1,
        }
    )


def test_value_loss_and_metrics() -> None:
    values = torch.tensor([[1.0, 1.0, nan]], dtype=torch.float64)
    old, returns = tensor(0.0, 0.9, nan), tensor(2.0, 2.0, nan)
    mask = torch.tensor([[True, True, False]])
    terms = rl.value_loss(values, old, returns, mask, value_clip=0.2)
    assert terms.loss_sum.item() == pytest.approx(0.5 * (1.8**2 + 1.0**2))
    assert terms.metrics["value_clip_fraction"].result() == 0.5
    assert terms.metrics["value_error"].result() == 1.0
    assert terms.metrics["return_mean"].result() == 2.0
    unclipped = rl.value_loss(values, old, returns, mask, value_clip=None)
    assert float(unclipped.loss_sum) == 1.0


def test_scores_are_clipped_and_bootstrap_enters() -> None:
    zero = torch.zeros(1, 2, dtype=torch.float64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    for score, clip, expected in ((9.0, 5, 5.0), (-9.0, 5, -5.0), (9.0, None, 9.0)):
        rewards, _ = rl.shape_rewards(torch.tensor([score]), zero, zero, mask, kl_coef=0.1, score_clip=clip)
        assert rewards.tolist() == [[0.0, expected]]
    advantages, returns = rl.gae(
        zero, tensor(1, 2), mask, gamma=0.5, gae_lambda=0.5, bootstrap_values=torch.tensor([4.0])
    )
    # delta = [0 + .5 * 2 - 1, 0 + .5 * 4 - 2] = [0, 0]
    assert advantages.tolist() == [[0.0, 0.0]]
    assert returns.tolist() == [[1.0, 2.0]]


def test_ds_group_row_weights_by_hand() -> None:
    tokens = torch.tensor([1, 3, 2, 2, 5])
    mask = torch.arange(6) < tokens.unsqueeze(1)
    valid = torch.tensor([True, True, True, True, True])
    expected = [1 / 12, 1 / 12, 1 / 12, 1 / 12, 1 / 15]
    for given in (mask, tokens):
        assert rl.ds_group_row_weights(given, 2, valid).tolist() == pytest.approx(expected)
        assert rl.ds_group_row_weights(given, 2).tolist() == pytest.approx(expected)
    # the second group has no valid row: DeepSpeed-Chat never sees it
    valid = torch.tensor([False, True, False, False, True])
    assert rl.ds_group_row_weights(mask, 2, valid).tolist() == pytest.approx([0, 1 / 6, 0, 0, 1 / 10])
    assert rl.ds_group_row_weights(mask, 2, torch.zeros(5, dtype=torch.bool)).tolist() == [0] * 5
    with pytest.raises(ValueError, match="at least 1"):
        rl.ds_group_row_weights(mask, 0)


def test_a_row_of_weight_zero_is_not_read() -> None:
    x = torch.tensor([[1.0, 3.0], [nan, inf]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 2, dtype=torch.bool)
    weights = rl.ds_group_row_weights(mask, 2, torch.tensor([True, False]))
    zero = torch.zeros(2, 2, dtype=torch.float64)
    for terms, expected in (
        (rl.entropy_loss(x, mask, row_weights=weights), 2.0),
        (rl.value_loss(x, zero, zero, mask, value_clip=None, row_weights=weights), 2.5),
        (rl.kl_loss(x, zero, mask, kind="k1", row_weights=weights), 2.0),
        (rl.policy_loss(x, x.detach(), zero - 1, mask, clip_eps=0.2, row_weights=weights), 1.0),
    ):
        x.grad = None
        assert terms.loss_sum.item() == pytest.approx(expected)
        assert float(terms.count) == pytest.approx(1.0)
        terms.loss_sum.backward()
        assert x.grad[1].tolist() == [0.0, 0.0]
        assert all(math.isfinite(m.result()) for m in terms.metrics.values())


def test_pairwise_loss() -> None:
    chosen, rejected = torch.tensor([2.0, 0.0]), torch.tensor([1.0, 1.0])
    terms = rl.pairwise_loss(chosen, rejected)
    assert terms.loss_sum.item() == pytest.approx(math.log1p(math.exp(-1)) + math.log1p(math.exp(1)))
    assert terms.count == 2
    assert terms.metrics["accuracy"].result() == 0.5
    assert terms.metrics["score_margin"].result() == 0.0
    shifted = rl.pairwise_loss(chosen, rejected, margin=torch.tensor([1.0, 0.0]))
    assert float(shifted.loss_sum) == pytest.approx(math.log(2) + math.log1p(math.exp(1)))


def test_diverging_pairwise_loss() -> None:
    # row 0: differ from 1 on, ends 3 and 4 -> span 1..3; row 1: identical -> its last token; row 2: prefix of the other
    chosen_tokens = torch.tensor([[5, 6, 7, 0, 0], [5, 6, 0, 0, 0], [5, 6, 0, 0, 0]])
    rejected_tokens = torch.tensor([[5, 8, 7, 9, 0], [5, 6, 0, 0, 0], [5, 6, 7, 0, 0]])
    chosen = torch.tensor([[nan, 1, 2, 3, nan], [nan, 4, nan, nan, nan], [nan, 1, 2, nan, nan]], dtype=torch.float64)
    rejected = torch.tensor([[nan, 1, 1, 1, inf], [nan, 4, nan, nan, nan], [nan, 1, 5, nan, nan]], dtype=torch.float64)
    chosen.requires_grad_()
    terms = rl.diverging_pairwise_loss(
        chosen, rejected, chosen_tokens, rejected_tokens, torch.tensor([3, 2, 2]), torch.tensor([4, 2, 3])
    )

    def soft(d: float) -> float:
        return math.log1p(math.exp(-d))

    expected = (soft(0) + soft(1) + soft(2)) / 3 + soft(0) + soft(-3)
    assert terms.loss_sum.item() == pytest.approx(expected)
    assert terms.count == 3
    terms.loss_sum.backward()
    assert torch.isfinite(chosen.grad).all()
    assert terms.metrics["chosen_score"].result() == pytest.approx((2 + 4 + 1) / 3)
    assert terms.metrics["rejected_score"].result() == pytest.approx((1 + 4 + 5) / 3)
    assert terms.metrics["accuracy"].result() == pytest.approx(1 / 3)


def test_truncated_weights_by_hand():
    old = torch.tensor([[0.0, -1.0, -2.0, math.nan]])
    rollout = torch.tensor([[0.0, -1.0 - math.log(1.5), -2.0 - math.log(3.0), math.nan]])
    mask = torch.tensor([[True, True, True, False]])
    weights = rl.truncated_weights(old, rollout, mask, 2.0)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1.5, 2.0, 0.0]]))
    # A sampler that was far too sure of a token: its weight is small, not cut.
    torch.testing.assert_close(rl.truncated_weights(old, rollout + math.log(4.0), mask, 2.0)[0, 0], torch.tensor(0.25))


def test_importance_weights_are_factors_of_the_loss_and_not_of_the_count():
    logprobs = torch.tensor([[-1.0, -2.0, math.nan]], requires_grad=True)
    old, advantages = torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[1.0, -3.0, math.nan]])
    mask, weights = torch.tensor([[True, True, False]]), torch.tensor([[2.0, 0.5, math.nan]])
    terms = rl.policy_loss(logprobs, old, advantages, mask, clip_eps=0.2, importance_weights=weights)
    assert terms.loss_sum.item() == pytest.approx(2.0 * -1.0 + 0.5 * 3.0)
    assert float(terms.count) == 2
    assert terms.metrics["importance_weight_mean"].result() == pytest.approx(1.25)
    terms.loss_sum.backward()
    # d(-A w r)/d logprob = -A w at r = 1
    assert logprobs.grad.tolist() == [[-2.0, 1.5, 0.0]]
