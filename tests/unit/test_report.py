"""Numbers and sample rows of an iteration."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.progress import open_display
from mrlhf.roles.model import Update
from mrlhf.trainer.experience import ShapingSettings, add_advantages, add_masks
from mrlhf.trainer.report import (
    SAMPLES,
    PhaseTimer,
    explained_variance,
    iteration_metrics,
    sample_rows,
    worst_of_ranks,
)
from mrlhf.trainer.updates import Step
from mrlhf.types import RolloutBatch
from tests.ranks import run_ranks


def _batch() -> RolloutBatch:
    """Responses of 2 and 3 tokens; KL .2 a token in the first row, .5 in the second; NaN outside."""
    batch = RolloutBatch.from_sequences(
        [[5, 6], [7]], [[8, 2], [9, 9, 9]], pad_id=0, truncated=[False, True], sample_ids=[4, 5]
    )
    batch = add_masks(batch, "standard", 3)
    frame = torch.where(batch.response_mask, 0.0, float("nan"))  # type: ignore[arg-type]
    kl = torch.tensor([[0.2], [0.5]])
    batch = batch.replace(
        old_logprobs=frame - 1,
        ref_logprobs=frame - 1 - kl,
        values=frame + 0.25,
        scores=torch.tensor([1.0, 3.0]),
        raw_scores=torch.tensor([11.0, 13.0]),
    )
    return add_advantages(batch, ShapingSettings(kl_coef=0.1), None)


def _metrics(seconds_by_rank: list[float]) -> dict[str, float]:
    import torch.distributed as dist

    second = seconds_by_rank[dist.get_rank()]
    seconds = {"rollout": second, "inference": second / 2, "train": 2 * second, "iteration": 4 * second}
    updates = [
        Step(Update(True, 1.0, {}), Update(True, 5.0, {})),
        Step(Update(False, 3.0, {}), Update(False, 7.0, {})),
        Step(None, Update(True, 7.0, {})),
    ]
    reduced = {"policy/policy_loss": 0.5, "value/loss": 0.25, "policy/unknown": 9.0}
    return iteration_metrics(_batch(), reduced, updates, worst_of_ranks(seconds), passes=2, epoch=3)


@pytest.fixture(scope="module")
def metrics() -> dict[str, float]:
    first, second = run_ranks(_metrics, 2, [1.0, 2.0])
    memory = "peak_memory_gib"
    assert {k: v for k, v in first.items() if k != memory} == {k: v for k, v in second.items() if k != memory}
    assert first[memory] == second[memory] > 0
    return first


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("score_mean", 12.0), ("score_std", 1.0), ("score_min", 11.0), ("score_max", 13.0),
        ("kl_k1", (2 * 0.2 + 3 * 0.5) / 5), ("kl_sequence", (2 * 0.2 + 3 * 0.5) / 2),
        # k3 = exp(ref - old) - 1 - (ref - old)
        ("kl_k3", (2 * (math.exp(-0.2) - 0.8) + 3 * (math.exp(-0.5) - 0.5)) / 5),
        ("reward_mean", (1 - 0.04 + 3 - 0.15) / 2), ("value_mean", 0.25),
        ("response_length_mean", 2.5), ("response_length_min", 2.0), ("response_length_max", 3.0),
        ("truncated_fraction", 0.5), ("policy_loss", 0.5), ("value_loss", 0.25),
        ("actor_grad_norm", 1.0), ("critic_grad_norm", 6.0), ("actor_updates", 1.0),
        ("critic_updates", 2.0), ("skipped_updates", 1.0), ("epoch", 3.0),
        # A skipped update has no part in the mean norm. The slower rank's seconds.
        ("time_rollout", 2.0), ("rollout_tokens_per_second", 5 / 2), ("inference_tokens_per_second", 8 / 1),
        ("train_tokens_per_second", 8 * 2 / 4), ("tokens_per_second", 8 / 8),
    ],
)  # fmt: skip
def test_numbers_by_hand(metrics: dict[str, float], name: str, expected: float) -> None:
    assert metrics[name] == pytest.approx(expected, rel=1e-6)


def test_only_known_names_are_logged(metrics: dict[str, float]) -> None:
    assert not [name for name in metrics if "/" in name]
    assert "entropy" not in metrics


def test_explained_variance() -> None:
    mask = torch.tensor([[True, True, True, False]])
    returns = torch.tensor([[1.0, 2.0, 3.0, float("nan")]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full_like(returns, 7.0), returns, mask) == pytest.approx(0.0, abs=1e-12)
    # The values miss each return by as much again: Var(R - V) = Var(2R).
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)
    assert math.isnan(explained_variance(returns, torch.ones(1, 4), mask))


def test_sample_rows(data_folder: Path, tmp_path: Path) -> None:
    from tools.make_tiny_model import build_tokenizer

    build_tokenizer(97).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    first, second = sample_rows(_batch(), tokenizer, 7)
    assert first["prompt"] == tokenizer.decode([5, 6])
    assert len(first["prompt"]) == 2
    assert second["response"] == tokenizer.decode([9, 9, 9])
    assert (first["iteration"], first["sample_id"], second["sample_id"]) == (7, 4, 5)
    assert (first["kl"], second["kl"]) == (pytest.approx(0.4), pytest.approx(1.5))
    assert (first["score"], second["score"]) == (11.0, 13.0)
    assert (first["truncated"], second["truncated"]) == (False, True)
    assert (first["response_length"], second["response_length"]) == (2, 3)
    # Without log-probs from before the updates nobody knows the KL.
    assert sample_rows(_batch().replace(kl=None), tokenizer, 7)[0] == {k: v for k, v in first.items() if k != "kl"}
    many = _batch().select([0, 1] * 6)
    assert len(sample_rows(many, tokenizer, 0)) == SAMPLES


def test_phases_are_timed() -> None:
    import time

    with open_display("off", 1, rank=0) as display:
        timer = PhaseTimer(display)
        with timer.phase("rollout"):
            time.sleep(0.02)
        with timer.phase("train"):
            pass
        seconds = timer.seconds()
    assert set(seconds) == {"rollout", "train", "iteration"}
    assert seconds["rollout"] >= 0.02 > seconds["train"]
    assert seconds["iteration"] >= seconds["rollout"] + seconds["train"]
