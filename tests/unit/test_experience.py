"""Masks, shaping and GAE of a rollout against hand numbers; whitening over ranks is in tests/distributed."""

from __future__ import annotations

import pytest
import torch

from mrlhf.trainer.experience import ShapingSettings, add_advantages, add_masks, score_clip_fraction
from mrlhf.types import RolloutBatch
from tests.ranks import run_ranks

PAD = EOS = 2


def _batch(
    prompts: list[list[int]], responses: list[list[int]], *, semantics: str = "standard", response_width: int = 99
) -> RolloutBatch:
    batch = RolloutBatch.from_sequences(
        prompts, responses, pad_id=PAD, truncated=[not r or r[-1] != EOS for r in responses]
    )
    batch = add_masks(batch, semantics, response_width)  # type: ignore[arg-type]
    frame = torch.zeros(batch.size, batch.width - 1)
    return batch.replace(
        old_logprobs=frame, ref_logprobs=frame.clone(), values=frame.clone(), scores=torch.zeros(batch.size)
    )


def _at(batch: RolloutBatch, row: int, values: list[float]) -> torch.Tensor:
    """A label frame with ``values`` from the first response label of ``row`` on, NaN elsewhere."""
    frame = torch.full((batch.size, batch.width - 1), float("nan"))
    start = int(batch.prompt_lengths[row]) - 1
    frame[row, start : start + len(values)] = torch.tensor(values)
    return frame


def _response(batch: RolloutBatch, x: torch.Tensor | None, row: int = 0) -> list[float]:
    assert x is not None
    assert batch.gae_mask is not None
    return x[row][batch.gae_mask[row]].tolist()


def _close(values: list[float]) -> object:
    return pytest.approx(values, abs=1e-6)


def test_a1_the_score_is_on_the_end_token() -> None:
    batch = _batch([[7, 8]], [[11, 12, EOS]])
    batch = batch.replace(scores=torch.tensor([1.0]), values=_at(batch, 0, [0.2, 0.3, 0.4]))
    done = add_advantages(batch, ShapingSettings(), None)
    assert _response(done, done.rewards) == _close([0, 0, 1])
    assert _response(done, done.advantages) == _close([0.7365, 0.67, 0.6])
    assert _response(done, done.returns) == _close([0.9365, 0.97, 1.0])
    assert float(done.rewards.sum()) == 1.0  # type: ignore[union-attr]


def test_a2_the_end_token_stays_in_the_mask_where_it_is_the_pad_id() -> None:
    batch = _batch([[PAD, PAD], [5, 6, 7]], [[11, 12, EOS], [11] * 5])
    batch = batch.replace(scores=torch.tensor([1.0, 0.0]))
    done = add_advantages(batch, ShapingSettings(), None)
    assert done.response_mask is not None
    assert done.response_mask[0, 1:6].tolist() == [True, True, True, False, False]
    assert int((done.advantages[0] != 0).sum()) == int(done.response_mask[0].sum()) == 3  # type: ignore[index]


def test_the_samplers_log_probs_shape_where_the_trainers_are_not_known() -> None:
    batch = _batch([[7]], [[11, EOS]])
    known = {"ref_logprobs": _at(batch, 0, [-1.0, -1.0]), "scores": torch.tensor([1.0])}
    numbers = _at(batch, 0, [-0.8, -0.6])
    done = add_advantages(batch.replace(old_logprobs=numbers, **known), ShapingSettings(), None)
    skipped = add_advantages(
        batch.replace(old_logprobs=None, rollout_logprobs=numbers, **known), ShapingSettings(), None
    )
    assert _response(skipped, skipped.kl) == _close([0.2, 0.4])
    for name in ("kl", "rewards", "advantages", "returns"):
        assert torch.equal(getattr(done, name), getattr(skipped, name))


@pytest.mark.parametrize("unknown", ["old_logprobs", "ref_logprobs"])
def test_rewards_without_a_kl(unknown: str) -> None:
    batch = _batch([[7]], [[11, EOS]]).replace(scores=torch.tensor([9.0])).replace(**{unknown: None})
    done = add_advantages(batch, ShapingSettings(kl_coef=0), None)
    assert _response(done, done.rewards) == _close([0, 5])
    assert done.kl is None
    with pytest.raises(AssertionError, match="no log-probs for the KL"):
        add_advantages(batch, ShapingSettings(kl_coef=0.1), None)


def test_a4_the_kl_stays_the_kl() -> None:
    batch = _batch([[7]], [[11, EOS]])
    batch = batch.replace(
        scores=torch.tensor([1.0]), old_logprobs=_at(batch, 0, [-0.8, -0.6]), ref_logprobs=_at(batch, 0, [-1.0, -1.0])
    )
    for _ in range(2):
        done = add_advantages(batch, ShapingSettings(kl_coef=0.1), None)
        assert _response(done, done.rewards) == _close([-0.02, 0.96])
        assert _response(done, done.kl) == _close([0.2, 0.4])
    assert done.kl is not None
    assert float(done.kl[done.response_mask].mean()) == pytest.approx(0.3, abs=1e-6)


def test_a13_masks_follow_their_rows() -> None:
    batch = _batch([[1, 2, 3], [4]], [[5, EOS], [6, 7, 8]])
    swapped = batch.select([1, 0])
    assert torch.equal(swapped.response_mask, batch.response_mask[[1, 0]])  # type: ignore[index, arg-type]
    assert batch.response_mask is not None
    assert [row.tolist() for row in batch.response_mask] == [
        [False, False, True, True, False],
        [True, True, True, False, False],
    ]


def test_d12_a_response_that_is_only_the_end_token() -> None:
    batch = _batch([[7, 8, 9], [7]], [[EOS], [11, 12, EOS]])
    batch = batch.replace(scores=torch.tensor([0.7, 0.0]))
    done = add_advantages(batch, ShapingSettings(), None)
    assert done.response_lengths.tolist() == [1, 3]
    assert _response(done, done.rewards, 0) == _close([0.7])
    assert done.rewards is not None
    assert float(done.rewards[0, 2]) == pytest.approx(0.7)


def test_deepspeed_chat_puts_the_score_one_slot_later() -> None:
    """Two tokens and the pad after them; the slot's own KL and value take part, and the full row has no such slot."""
    batch = _batch([[7], [7]], [[11, 12], [11, 12, 13]], semantics="deepspeed_chat", response_width=3)
    values = torch.tensor([[0.1, 0.2, 0.3, 9.0], [0.1, 0.2, 0.3, 9.0]])
    batch = batch.replace(
        scores=torch.tensor([1.0, 2.0]),
        old_logprobs=torch.tensor([[0.0, 0.0, -0.5, 0.0], [0.0] * 4]),
        ref_logprobs=torch.tensor([[0.0, 0.0, -1.0, 0.0], [0.0] * 4]),
        values=values,
    )
    done = add_advantages(batch, ShapingSettings(semantics="deepspeed_chat", gae_lambda=1.0), None)
    assert _response(done, done.rewards, 0) == _close([0, 0, 0.95])
    assert _response(done, done.rewards, 1) == _close([0, 0, 2.0])
    assert _response(done, done.returns, 0) == _close([0.95] * 3)
    assert int(done.response_mask.sum()) == 5  # type: ignore[union-attr]


def test_the_penalty_comes_before_the_clip() -> None:
    """6 - 2 = 4 and 6 clipped to 5; the other way round the truncated one would be 3."""
    batch = _batch([[7], [7]], [[11, 12], [11, EOS]])
    batch = batch.replace(scores=torch.tensor([6.0, 6.0]))
    done = add_advantages(batch, ShapingSettings(missing_eos_penalty=2.0, score_clip=5.0), None)
    assert _response(done, done.rewards, 0) == _close([0, 4])
    assert _response(done, done.rewards, 1) == _close([0, 5])
    # The score itself is what is logged, without penalty.
    assert done.scores is not None
    assert done.scores.tolist() == [6.0, 6.0]


def test_bootstrap_on_truncated_rows_only() -> None:
    batch = _batch([[7, 8], [7, 8]], [[11, 12], [11, EOS]])
    values = torch.tensor([[9.0, 0.2, 0.3, 0.5], [9.0, 0.2, 0.3, 0.5]])[:, : batch.width - 1]
    batch = batch.replace(values=values, scores=torch.tensor([1.0, 1.0]))
    settings = ShapingSettings(bootstrap_truncated=True, gamma=0.5, gae_lambda=1.0)
    done = add_advantages(batch, settings, None)
    # Truncated: the value after token 12 stands at the slot after the response, 0.5.
    assert _response(done, done.returns, 0) == _close([0.5 * (1 + 0.5 * 0.5), 1 + 0.5 * 0.5])
    assert _response(done, done.returns, 1) == _close([0.5, 1.0])
    plain = add_advantages(batch, ShapingSettings(gamma=0.5, gae_lambda=1.0), None)
    assert _response(plain, plain.returns, 0) == _close([0.5, 1.0])


@pytest.mark.parametrize("bootstrap", [True, False])
def test_what_lies_outside_the_response_changes_nothing(bootstrap: bool) -> None:
    batch = _batch([[7, 8], [7]], [[11, 12, EOS], [11, EOS]])
    settings = ShapingSettings(bootstrap_truncated=bootstrap)
    batch = batch.replace(scores=torch.tensor([1.0, -1.0]))
    clean = add_advantages(batch, settings, None)
    spoiled = {
        name: torch.where(batch.gae_mask, getattr(batch, name), torch.tensor(float("nan")))  # type: ignore[arg-type]
        for name in ("old_logprobs", "ref_logprobs", "values")
    }
    dirty = add_advantages(batch.replace(**spoiled), settings, None)
    for name in ("rewards", "kl", "advantages", "returns"):
        mask = batch.gae_mask
        assert torch.equal(getattr(clean, name)[mask], getattr(dirty, name)[mask]), name


def _group_batch() -> RolloutBatch:
    """Two prompts with two responses each; a KL of .5 on the first token of every response."""
    batch = _batch([[7], [7], [8, 8], [8, 8]], [[11, EOS], [11, 12, EOS], [EOS], [13, 13]])
    ref = batch.ref_logprobs.clone()  # type: ignore[union-attr]
    ref[[0, 1, 2, 3], [0, 0, 1, 1]] = -0.5
    return batch.replace(
        ref_logprobs=ref,
        group_ids=torch.tensor([0, 0, 1, 1]),
        scores=torch.tensor([3.0, 1.0, 9.0, 2.0]),
        values=None,
    )


def test_rloo_compares_what_responses_earned() -> None:
    """Scores less .2 x .5 of KL each; the third is clipped to 5, the last loses 1 for having no end."""
    settings = ShapingSettings(estimator="rloo", kl_coef=0.2, missing_eos_penalty=1.0)
    done = add_advantages(_group_batch(), settings, None)
    earned = [2.9, 0.9, 4.9, 0.9]
    each = [earned[0] - earned[1], earned[1] - earned[0], earned[2] - earned[3], earned[3] - earned[2]]
    for row, advantage in enumerate(each):
        tokens = int(done.response_lengths[row])
        assert _response(done, done.advantages, row) == _close([advantage] * tokens)
    assert done.returns is None
    assert done.advantages is not None
    assert done.advantages[~done.response_mask].abs().sum() == 0  # type: ignore[operator]


def test_grpo_normalises_within_the_group() -> None:
    done = add_advantages(_group_batch(), ShapingSettings(estimator="grpo", kl_coef=0.0), None)
    root = 0.5**0.5
    assert [_response(done, done.advantages, row)[0] for row in range(4)] == _close([root, -root, root, -root])
    plain = ShapingSettings(estimator="grpo", kl_coef=0.0, grpo_normalize_std=False)
    done = add_advantages(_group_batch(), plain, None)
    assert [_response(done, done.advantages, row)[0] for row in range(4)] == _close([1, -1, 1.5, -1.5])


def _reinforce() -> list[float]:
    import torch.distributed as dist

    share = 4 // dist.get_world_size()
    mine = _group_batch().select(slice(dist.get_rank() * share, (dist.get_rank() + 1) * share))
    done = add_advantages(mine, ShapingSettings(estimator="reinforce_plus_plus", kl_coef=0.2), None)
    return [advantage for row in range(share) for advantage in _response(done, done.advantages, row)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_reinforce_plus_plus_whitens_the_return_of_every_token_over_all_ranks(ranks: int) -> None:
    # From the first token on -.1 + score, after it the score, which is on the last token.
    returns = torch.tensor([2.9, 3.0, 0.9, 1.0, 1.0, 4.9, 1.9, 2.0], dtype=torch.float64)
    white = (returns - returns.mean()) / returns.std(unbiased=False)
    assert [x for part in run_ranks(_reinforce, ranks) for x in part] == _close(white.tolist())


@pytest.mark.parametrize(("clip", "fraction", "kept"), [(2.5, 0.5, 2.5), (None, 0.0, 9.0)])
def test_the_score_clip_and_how_often_it_acts(clip: float | None, fraction: float, kept: float) -> None:
    batch = _group_batch().replace(values=torch.zeros(4, 4))
    settings = ShapingSettings(score_clip=clip, kl_coef=0.0)
    done = add_advantages(batch, settings, None)
    assert float(done.rewards.max()) == kept  # type: ignore[union-attr]
    assert score_clip_fraction(done, settings) == fraction
