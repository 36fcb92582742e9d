"""DeepSpeed-Chat's step-2 loss against recorded values, with scores from the recorded checkpoint in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlhf import rl


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    result: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "ds_chat_reward_loss.json").read_text())
    return result


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForSequenceClassification

    folder = Path(__file__).parents[1] / "data" / "ds_chat_trajectory" / "reward"
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()


def scores_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    hidden = model.model(input_ids=tokens, attention_mask=(tokens != 0).long()).last_hidden_state
    return model.score(hidden).squeeze(-1)


def terms_of(model: Any, pairs: list[dict[str, Any]]) -> tuple[rl.LossTerms, rl.LossTerms]:
    chosen, rejected = (torch.tensor([p[name] for p in pairs]) for name in ("chosen", "rejected"))
    lengths = [(tokens != 0).sum(1) for tokens in (chosen, rejected)]
    scores = [scores_of(model, tokens) for tokens in (chosen, rejected)]
    ends = [s.gather(1, n.unsqueeze(1) - 1).squeeze(1) for s, n in zip(scores, lengths, strict=True)]
    return rl.diverging_pairwise_loss(*scores, chosen, rejected, *lengths), rl.pairwise_loss(*ends)


@pytest.mark.parametrize("index", range(6))
def test_each_pair(recorded: dict[str, Any], model: Any, index: int) -> None:
    pair = recorded["pairs"][index]
    terms, plain = terms_of(model, [pair])
    assert terms.loss_sum.item() == pytest.approx(pair["loss"], rel=2e-4, abs=1e-5)
    assert plain.loss_sum.item() == pytest.approx(pair["bradley_terry_loss"], rel=1e-3, abs=1e-5)
    assert terms.metrics["chosen_score"].result() == pytest.approx(pair["chosen_end_score"], abs=2e-4)
    assert terms.metrics["rejected_score"].result() == pytest.approx(pair["rejected_end_score"], abs=2e-4)
    model.zero_grad()
    terms.loss_sum.backward()
    assert model.score.weight.grad.norm().item() == pytest.approx(pair["head_grad_norm"], rel=1e-3, abs=1e-4)


def test_the_batch(recorded: dict[str, Any], model: Any) -> None:
    assert len(recorded["pairs"]) == 6
    terms, _ = terms_of(model, recorded["pairs"])
    assert (terms.loss_sum / terms.count).item() == pytest.approx(recorded["batch_loss"], rel=2e-4)
