"""The losses of reward training and DPO on batches of rows, and what their configurations refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mrlhf.config import load_config
from mrlhf.config_preferences import DPOConfig, DPOLossConfig, RewardLossConfig, RewardTrainingConfig
from mrlhf.errors import ConfigError
from mrlhf.types import RolloutBatch


def batch_of(rows: list[tuple[list[int], list[int]]], margins: list[float] | None = None) -> RolloutBatch:
    batch = RolloutBatch.from_sequences([p for p, _ in rows], [r for _, r in rows], pad_id=0)
    slots = torch.arange(batch.width - 1)
    start, end = batch.prompt_lengths[:, None] - 1, batch.lengths[:, None] - 1
    mask = (slots >= start) & (slots < end)
    return batch.replace(response_mask=mask, margins=None if margins is None else torch.tensor(margins))


# Answers of 2 and 1 tokens; anything outside them must not be read.
PAIR = [([5, 6], [7, 8]), ([5, 6], [9])]
LOGPROBS = torch.tensor([[math.nan, -1.0, -3.0, math.nan], [math.nan, -2.0, math.nan, math.nan]])
REFERENCE = torch.tensor([[math.nan, -2.0, -4.0, math.nan], [math.nan, -2.5, math.nan, math.nan]])


def dpo(**options: Any) -> tuple[float, dict[str, float]]:
    from mrlhf.trainer.dpo import pair_loss

    batch = batch_of(PAIR, [0.5, 0.5]).replace(ref_logprobs=REFERENCE[:, :4])
    loss, metrics = pair_loss(DPOLossConfig(**options), batch, LOGPROBS)
    return float(loss), {name: metric.result() for name, metric in metrics.items()}


def test_dpo_compares_sums_of_the_responses() -> None:
    # chosen -4 to -6, rejected -2 to -2.5: h = 2 - 0.5.
    loss, metrics = dpo(beta=0.2)
    assert loss == pytest.approx(math.log1p(math.exp(-0.3)))
    assert metrics["chosen_logprob"] == -4.0
    assert metrics["chosen_reward"] == pytest.approx(0.4)
    assert "dpo_loss" not in metrics
    loss, _ = dpo(beta=0.2, use_margin=True)
    assert loss == pytest.approx(math.log1p(math.exp(0.2)))


def test_ipo_compares_means_of_the_responses() -> None:
    # chosen -2 to -3, rejected -2 to -2.5: h = 1 - 0.5.
    loss, metrics = dpo(beta=0.5, loss="ipo")
    assert loss == pytest.approx((0.5 - 1.0) ** 2)
    assert metrics["chosen_logprob"] == -2.0


def test_the_sft_term_is_the_mean_over_the_chosen_tokens() -> None:
    loss, metrics = dpo(beta=0.2, sft_coef=0.1)
    assert metrics["chosen_nll"] == 2.0
    assert metrics["dpo_loss"] == pytest.approx(math.log1p(math.exp(-0.3)))
    assert loss == pytest.approx(metrics["dpo_loss"] + 0.2)
    assert metrics["loss"] == pytest.approx(loss)


def reward(rows: list[tuple[list[int], list[int]]], scores: list[list[float]], **options: Any) -> float:
    from mrlhf.trainer.reward import pair_terms

    terms = pair_terms(RewardLossConfig(**options), batch_of(rows, [0.5, 0.5]), torch.tensor(scores))
    return float(terms.loss_sum)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


SCORES = [[9.0, 9.0, 1.0, 3.0], [9.0, 9.0, 2.0, 0.5]]


def test_bradley_terry_reads_the_last_token_of_each_row() -> None:
    assert reward(PAIR, SCORES, use_margin=False) == pytest.approx(softplus(-1.0))
    assert reward(PAIR, SCORES) == pytest.approx(softplus(-0.5))
    assert reward(PAIR, SCORES, use_margin=False, centering_coef=0.01) == pytest.approx(softplus(-1.0) + 0.25)


def test_deepspeed_chat_reads_the_padding_of_the_shorter_row() -> None:
    # Rows 5 6 7 8 and 5 6 9: positions 2 and 3, the second of them padding of the second row.
    expected = (softplus(2.0 - 1.0) + softplus(0.5 - 3.0)) / 2
    assert reward(PAIR, SCORES, loss="deepspeed_chat") == pytest.approx(expected)


def test_deepspeed_chat_passes_over_the_padding_at_the_beginning() -> None:
    rows = [([0, 6], [7, 8]), ([0, 6], [9])]
    expected = (softplus(2.0 - 1.0) + softplus(0.5 - 3.0)) / 2
    assert reward(rows, SCORES, loss="deepspeed_chat", num_padding_at_beginning=1) == pytest.approx(expected)
    # Told nothing, it takes both rows to end before they begin: one position, the first.
    assert reward(rows, SCORES, loss="deepspeed_chat") == pytest.approx(math.log(2))


BASE = ("model.path=m", "data.train=t.jsonl", "train.batch_size=2")


@pytest.mark.parametrize(
    ("schema", "overrides", "message"),
    [
        (RewardTrainingConfig, ("reward.loss=deepspeed_chat", "train.packing=true"), "packing must be false"),
        (RewardTrainingConfig, ("reward.loss=deepspeed_chat", "reward.centering_coef=0.1"), "bradley_terry only"),
        (RewardTrainingConfig, ("reward.num_padding_at_beginning=1",), "deepspeed_chat only"),
        (RewardTrainingConfig, ("model.init=random", "model.head=loaded"), "set model.head to auto"),
        (RewardTrainingConfig, ("data.max_length=10", "train.micro_batch_tokens=21"), "raise it to at least 22"),
        (DPOConfig, ("dpo.loss=hinge", "dpo.label_smoothing=0.1"), "with loss=sigmoid only, not with hinge"),
        (DPOConfig, ("dpo.loss=ipo", "dpo.use_margin=true"), "use_margin has no meaning with loss=ipo"),
        (DPOConfig, ("dpo.beta=0",), "dpo.beta"),
        (DPOConfig, ("dpo.label_smothing=0.1",), "did you mean dpo.label_smoothing"),
    ],
)
def test_configurations_that_are_refused(schema: type[Any], overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [*BASE, *overrides], schema)


def test_the_reference_is_the_start_of_the_policy_unless_it_has_a_path() -> None:
    plain: DPOConfig = load_config(None, BASE, DPOConfig)
    other: DPOConfig = load_config(None, [*BASE, "reference.path=r"], DPOConfig)
    assert (plain.reference_path, other.reference_path) == ("m", "r")
    assert other.model_folders() == {"model.path": "m", "reference.path": "r"}
