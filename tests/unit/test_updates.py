"""Minibatches, their denominators, and what each coefficient adds to the loss."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrlhf.roles.actor import PolicyLossSettings, actor_loss
from mrlhf.roles.critic import critic_loss
from mrlhf.roles.micro_batches import by_rows
from mrlhf.trainer.experience import add_masks
from mrlhf.trainer.updates import UpdateSettings, _ratio_error, minibatch_rows, prepare_minibatch
from mrlhf.types import Metric, RolloutBatch, merge_metrics

PLAIN = PolicyLossSettings()


def _batch(lengths: list[int], advantages: list[float], semantics: str = "standard") -> RolloutBatch:
    """Rows of one prompt token each; ratio 1 where the head says 0."""
    batch = RolloutBatch.from_sequences([[9]] * len(lengths), [[5] * n for n in lengths], pad_id=0)
    batch = add_masks(batch, semantics, max(lengths))  # type: ignore[arg-type]
    zeros = torch.zeros(batch.size, batch.width - 1)
    return batch.replace(
        old_logprobs=zeros,
        ref_logprobs=zeros - 0.5,
        values=zeros,
        advantages=torch.tensor(advantages)[:, None].expand_as(zeros).contiguous(),
        returns=torch.tensor(advantages)[:, None].expand_as(zeros).contiguous(),
    )


def test_the_ratio_of_a_policy_that_has_not_moved_is_1() -> None:
    """The gradient is that of the clipped loss with the log-probs as old ones: the policy gradient."""
    batch = _batch([3, 1], [2.0, -1.0])
    frame = torch.randn(batch.size, batch.width, generator=torch.Generator().manual_seed(0))
    gradients = []
    for rows in (
        batch.replace(old_logprobs=frame[:, :-1], rollout_logprobs=frame[:, :-1] - 0.3),
        batch.replace(old_logprobs=None, rollout_logprobs=frame[:, :-1] - 0.3),
    ):
        output = frame.clone().requires_grad_()
        settings = PolicyLossSettings(on_policy=rows.old_logprobs is None, importance_cap=1.2)
        total, metrics = actor_loss(settings)(rows, output)
        total.backward()
        gradients.append(output.grad)
    assert torch.equal(gradients[0], gradients[1])
    # exp(.3) is over the cap.
    assert gradients[1][0].tolist() == pytest.approx([-2.4, -2.4, -2.4, 0, 0])  # type: ignore[index]
    assert gradients[1][1].tolist() == pytest.approx([1.2, 0, 0, 0, 0])  # type: ignore[index]
    found = {name: metric.result() for name, metric in metrics.items()}
    assert [found[f"ratio_{name}"] for name in ("mean", "min", "max")] == [1, 1, 1]
    assert found["approx_kl_k3"] == 0
    assert found["importance_weight_mean"] == pytest.approx(1.2)
    assert found["rollout_logprob_gap_mean"] == pytest.approx(0.3, rel=1e-5)
    assert found["rollout_logprob_gap_max"] == pytest.approx(0.3, rel=1e-5)
    assert found["rollout_logprob_gap_share"] == 1
    # Nothing to compare with, nothing said about it.
    plain = actor_loss(PolicyLossSettings(on_policy=True))(batch.replace(old_logprobs=None), frame)[1]
    assert not [name for name in plain if "gap" in name]


def _orders(count: int, size: int, **changes: int | bool) -> list[list[int]]:
    settings = {"shuffle": True, "seed": 3, "iteration": 2, "epoch": 0, **changes}
    return list(minibatch_rows(count, size, **settings))  # type: ignore[arg-type]


def test_minibatches_are_reproducible() -> None:
    first = _orders(64, 8)
    assert first == _orders(64, 8)
    assert [len(rows) for rows in first] == [8] * 8
    assert sorted(itertools.chain(*first)) == list(range(64))
    others = [_orders(64, 8, **{key: 9}) for key in ("seed", "iteration", "epoch")]
    assert all(a != b for a, b in itertools.combinations([first, *others], 2))


def test_the_order_of_rows_does_not_depend_on_the_minibatch_size_or_other_random_numbers() -> None:
    torch.manual_seed(1)
    coarse = list(itertools.chain(*_orders(24, 12)))
    torch.manual_seed(2)
    assert coarse == list(itertools.chain(*_orders(24, 4)))
    state = torch.random.get_rng_state()
    _orders(24, 4)
    assert torch.equal(state, torch.random.get_rng_state())


def test_without_shuffle_rows_stay_in_order() -> None:
    assert _orders(6, 4, shuffle=False) == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("dp_size", [1, 2])
def test_a9_token_mean_over_the_whole_minibatch(dp_size: int, micro_batch: int) -> None:
    """One token of -1 and three of +1 are (3 - 1) / 4 whatever the split; a mean of means gives 0."""
    batch = _batch([1, 3], [1.0, -1.0])
    settings = UpdateSettings(policy=PLAIN, minibatch_size=2)
    total = 0.0
    for rank in range(dp_size):
        mine, denominator = prepare_minibatch(batch, [0, 1], settings, dp_rank=rank, dp_size=dp_size)
        assert denominator == 4.0
        assert mine.size == 2 // dp_size
        for rows in by_rows(mine.size, micro_batch):
            part = mine.select(rows).trim()
            loss, _ = actor_loss(PLAIN)(part, torch.zeros(part.size, part.width))
            total += float(loss) / denominator
    assert total == pytest.approx(0.5, abs=1e-7)


def test_the_denominator_follows_the_rows() -> None:
    batch = _batch([1, 3, 5, 2], [1.0, 1.0, 1.0, 1.0])
    settings = UpdateSettings(policy=PLAIN)
    mine, denominator = prepare_minibatch(batch, [3, 2], settings, dp_rank=1, dp_size=2)
    assert denominator == 7.0
    assert mine.response_lengths.tolist() == [5]
    assert mine.row_weights is None


def test_deepspeed_chat_is_a_mean_of_group_means() -> None:
    """Groups (2, 3 tokens) and (4 tokens, and one of 1 token that does not count)."""
    batch = _batch([2, 3, 4, 1], [1.0, 2.0, 3.0, 50.0], "deepspeed_chat")
    settings = UpdateSettings(policy=PLAIN, semantics="deepspeed_chat", ds_group_size=2)
    expected = -((2 * 1.0 + 3 * 2.0) / 5 + 3.0) / 2
    for dp_size in (1, 2, 4):
        total, count = 0.0, 0.0
        for rank in range(dp_size):
            mine, denominator = prepare_minibatch(batch, [0, 1, 2, 3], settings, dp_rank=rank, dp_size=dp_size)
            assert denominator == 1.0
            loss, metrics = actor_loss(PLAIN)(mine, torch.zeros(mine.size, mine.width))
            total += float(loss)
            count += float(metrics["policy_loss"].count)
        assert total == pytest.approx(expected, rel=1e-6)
        assert count == pytest.approx(1.0, rel=1e-6)


def test_deepspeed_chat_without_any_long_row_has_loss_zero() -> None:
    batch = _batch([1, 1], [1.0, 2.0], "deepspeed_chat")
    settings = UpdateSettings(policy=PLAIN, semantics="deepspeed_chat", ds_group_size=1)
    mine, _ = prepare_minibatch(batch, [0, 1], settings, dp_rank=0, dp_size=1)
    output = torch.zeros(2, mine.width, requires_grad=True)
    loss, _ = actor_loss(PLAIN)(mine, output)
    loss.backward()
    assert float(loss) == 0.0
    assert output.grad is not None
    assert torch.equal(output.grad, torch.zeros_like(output))


@given(st.lists(st.integers(1, 6), min_size=4, max_size=4), st.integers(1, 4), st.permutations(range(4)))
def test_deepspeed_chat_weights_do_not_depend_on_ranks(lengths: list[int], group: int, rows: list[int]) -> None:
    batch = _batch(lengths, [1.0] * 4, "deepspeed_chat")
    settings = UpdateSettings(policy=PLAIN, semantics="deepspeed_chat", ds_group_size=group)

    def weights(dp_size: int) -> list[float]:
        parts = [
            prepare_minibatch(batch, list(rows), settings, dp_rank=r, dp_size=dp_size)[0].row_weights
            for r in range(dp_size)
        ]
        return list(itertools.chain(*(part.tolist() for part in parts if part is not None)))

    assert len(weights(1)) == 4
    assert weights(1) == weights(2) == weights(4)


def _logprobs(batch: RolloutBatch) -> torch.Tensor:
    return torch.linspace(-0.4, 0.4, batch.size * batch.width).reshape(batch.size, batch.width)


def _loss(batch: RolloutBatch, output: torch.Tensor, **changes: object) -> tuple[float, dict[str, Metric]]:
    loss, metrics = actor_loss(PolicyLossSettings(**changes))(batch, output)  # type: ignore[arg-type]
    assert float(metrics["loss"].value) == float(loss)
    return float(loss), metrics


def test_the_entropy_coefficient_takes_the_entropy_off_the_loss() -> None:
    batch = _batch([2, 4], [1.0, -1.0])
    logprobs, entropy = _logprobs(batch), torch.full((batch.size, batch.width), 1.5)
    entropy[0] = 0.5
    plain, _ = _loss(batch, logprobs)
    both = torch.stack([logprobs, entropy])
    bonus, metrics = _loss(batch, both, entropy_coef=0.1)
    assert plain - bonus == pytest.approx(0.1 * (2 * 0.5 + 4 * 1.5), rel=1e-5)
    assert metrics["entropy"].result() == pytest.approx((2 * 0.5 + 4 * 1.5) / 6, rel=1e-6)
    # Only logged.
    logged, metrics = _loss(batch, both, log_entropy=True)
    assert logged == plain
    assert metrics["entropy"].result() == pytest.approx(7 / 6, rel=1e-6)
    # The policy's own share is logged without the bonus.
    assert float(metrics["policy_loss"].value) == plain


def test_the_kl_coefficient_adds_the_k3_estimate() -> None:
    batch = _batch([2, 4], [1.0, -1.0])
    logprobs = _logprobs(batch)
    plain, _ = _loss(batch, logprobs)
    penalised, metrics = _loss(batch, logprobs, kl_loss_coef=0.3, kl_loss_kind="k3")
    difference = (torch.full_like(logprobs, -0.5) - logprobs)[:, :-1][batch.response_mask]
    k3 = (difference.exp() - 1 - difference).double()
    assert penalised - plain == pytest.approx(0.3 * float(k3.sum()), rel=1e-5)
    assert metrics["kl_loss"].result() == pytest.approx(float(k3.mean()), rel=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_every_kind_of_kl_loss_and_its_gradient(kind: str) -> None:
    batch = _batch([2, 4], [1.0, -1.0])
    assert batch.response_mask is not None
    gradients = []
    for coef in (0.0, 0.3):
        logprobs = _logprobs(batch).requires_grad_()
        loss, _ = actor_loss(PolicyLossSettings(kl_loss_coef=coef, kl_loss_kind=kind))(batch, logprobs)  # type: ignore[arg-type]
        loss.backward()
        gradients.append((float(loss), logprobs.grad[:, :-1][batch.response_mask].double()))  # type: ignore[index]
    d = (_logprobs(batch) + 0.5)[:, :-1][batch.response_mask].double()  # log p - log p_ref
    value = {"k1": d, "k2": d.square() / 2, "k3": (-d).exp() - 1 + d, "abs": d.abs()}[kind]
    slope = {"k1": torch.ones_like(d), "k2": d, "k3": 1 - (-d).exp(), "abs": d.sign()}[kind]
    assert gradients[1][0] - gradients[0][0] == pytest.approx(0.3 * float(value.sum()), rel=1e-5)
    torch.testing.assert_close(gradients[1][1] - gradients[0][1], 0.3 * slope, rtol=1e-5, atol=1e-6)


def test_the_dual_clip_bounds_tokens_with_negative_advantage_only() -> None:
    batch = _batch([2, 2], [1.0, -1.0])
    output = torch.full((2, batch.width), 2.0)  # ratio e^2 = 7.39
    plain, _ = _loss(batch, output)
    assert plain == pytest.approx(2 * -1.2 + 2 * torch.tensor(2.0).exp().item(), rel=1e-6)
    clipped, metrics = _loss(batch, output, dual_clip=3.0)
    assert clipped == pytest.approx(2 * -1.2 + 2 * 3.0, rel=1e-6)
    assert metrics["dual_clip_fraction"].result() == 0.5


def test_the_last_slot_of_the_head_is_not_read() -> None:
    batch = _batch([2, 4], [1.0, -1.0])
    logprobs = _logprobs(batch)
    spoiled = logprobs.clone()
    spoiled[:, -1] = float("nan")
    assert _loss(batch, logprobs)[0] == _loss(batch, spoiled)[0]


def test_critic_loss_by_hand() -> None:
    """Returns 1 and -1, old values 0, clip .2: at V = .5 the clipped .2 is worse for R = 1, the free one for R = -1."""
    batch = _batch([1, 1], [1.0, -1.0])
    loss, metrics = critic_loss(0.2)(batch, torch.full((2, batch.width), 0.5))
    assert float(loss) == pytest.approx(0.5 * (0.8**2 + 1.5**2), rel=1e-6)
    assert metrics["loss"].result() == pytest.approx(float(loss) / 2, rel=1e-6)


def test_ratio_error_takes_the_larger_side() -> None:
    extremes = {"ratio_max": Metric("max", 1.25, 4.0), "ratio_min": Metric("min", 0.5, 4.0)}
    assert _ratio_error(extremes)["ratio_error_before_update"].result() == 0.5
    assert _ratio_error({}) == {}


AGGREGATIONS = {
    # Lengths 1 and 3, advantages +1 and -1, ratio 1: tokens -1, +1, +1, +1; the longest response could have 5 tokens.
    "token": (-1 + 3) / 4,
    "sequence": (-1 + 1) / 2,
    "fixed_length": (-1 + 3) / (2 * 5),
}


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("dp_size", [1, 2])
@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_means_of_the_loss_by_hand_whatever_the_split(kind: str, dp_size: int, micro_batch: int) -> None:
    batch = _batch([1, 3], [1.0, -1.0])
    policy = PolicyLossSettings(fixed_length=5 if kind == "fixed_length" else None)
    settings = UpdateSettings(policy=policy, loss_aggregation=kind, max_response_length=5)  # type: ignore[arg-type]
    totals, logged = [0.0, 0.0], []
    for rank in range(dp_size):
        mine, denominator = prepare_minibatch(batch, [0, 1], settings, dp_rank=rank, dp_size=dp_size)
        for rows in by_rows(mine.size, micro_batch):
            part = mine.select(rows).trim()
            output = torch.zeros(part.size, part.width)
            actor, metrics = actor_loss(policy)(part, output)
            # Values of 1 more than the old ones of 0, returns 1 and -1: errors 0 and 2, a loss of 0 and 2 a token.
            value, value_metrics = critic_loss(None, policy.fixed_length)(part, output + 1.0)
            totals = [total + float(x) / denominator for total, x in zip(totals, (actor, value), strict=True)]
            logged.append((metrics["policy_loss"], value_metrics["loss"]))
    assert totals[0] == pytest.approx(AGGREGATIONS[kind], abs=1e-7)
    expected = {"token": 6 / 4, "sequence": 2 / 2, "fixed_length": 6 / 10}
    assert totals[1] == pytest.approx(expected[kind], abs=1e-7)
    # What is logged is what is minimised.
    for index, total in enumerate(totals):
        merged = merge_metrics([{"x": pair[index]} for pair in logged])["x"]
        assert merged.result() == pytest.approx(total, abs=1e-7)
