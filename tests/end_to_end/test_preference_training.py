"""Reward model training and DPO under every layout against the same training unsharded in transformers and torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.megatron_tools import PP2, SP, TP2, VPP2
from tests.preference_run import (
    bradley_terry,
    deepspeed_chat,
    dpo_config,
    dpo_with_sft,
    load_classifier,
    load_policy,
    make_inputs,
    read_examples,
    reward_config,
    torch_run,
    train,
)
from tests.ranks import run_ranks
from tests.tiny_run import read_lines

DATA = Path(__file__).parents[1] / "data"
RUNS = {
    "bradley_terry": ("reward.centering_coef=0.05",),
    "deepspeed_chat": ("reward.loss=deepspeed_chat", "reward.use_margin=false"),
    "dpo": ("dpo.beta=0.3", "dpo.label_smoothing=0.1", "dpo.sft_coef=0.2"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("preferences"))


@pytest.fixture(scope="module")
def expected(inputs: Path) -> dict[str, dict[str, Any]]:
    pairs, held_out = read_examples(inputs, "train.jsonl"), read_examples(inputs, "held_out.jsonl")
    scorers = [load_classifier(inputs / "scorer") for _ in range(2)]
    policy, reference = load_policy(inputs / "policy"), load_policy(inputs / "policy")
    return {
        "bradley_terry": torch_run(scorers[0], pairs, held_out, bradley_terry(scorers[0], 0.05)),
        "deepspeed_chat": torch_run(scorers[1], pairs, held_out, deepspeed_chat(scorers[1])),
        "dpo": torch_run(policy, pairs, held_out, dpo_with_sft(policy, reference, 0.3, 0.1, 0.2)),
    }


def config_of(name: str, inputs: Path, output: Path, overrides: tuple[str, ...]) -> Any:
    make = dpo_config if name == "dpo" else reward_config
    return make(inputs, output, *RUNS[name], *overrides)


def train_all(
    inputs: Path, output: Path, variants: dict[str, tuple[str, ...]], with_recorded: bool = True
) -> dict[str, Any]:
    """Every run in every variant of its options, and the recorded pairs; metrics of the runs on rank 0."""
    from torch import distributed as dist

    results: dict[str, Any] = {}
    for variant, overrides in variants.items():
        for name in RUNS:
            if name == "deepspeed_chat" and "train.packing=true" in overrides:
                continue
            folder = output / f"{name}-{variant}"
            trainer = train(config_of(name, inputs, folder, overrides))
            results[f"{name}-{variant}"] = read_lines(folder / "metrics.jsonl") if dist.get_rank() == 0 else None
            if name == "dpo":
                frozen = trainer.objective.reference
                assert not any(p.requires_grad for chunk in frozen.chunks for p in chunk.parameters())
    # One pair alone makes one micro-batch, which is too few for virtual stages.
    results["recorded"] = with_recorded and {
        loss: recorded_pairs(inputs, output, f"reward.loss={loss}", *next(iter(variants.values())))
        for loss in ("deepspeed_chat", "bradley_terry")
    }
    return results


def recorded_pairs(inputs: Path, output: Path, *overrides: str) -> list[dict[str, float]]:
    """Loss, scores and norm of the head's gradient of every recorded pair alone, then of all pairs together."""
    from mrlhf.parallel.collectives import all_reduce_metrics
    from mrlhf.trainer.reward import build_trainer

    scorer = f"model.path={DATA / 'ds_chat_trajectory' / 'reward'}"
    options = (f"tokenizer.path={inputs / 'policy'}", "model.head=loaded", "reward.use_margin=false")
    trainer = build_trainer(reward_config(inputs, output / "recorded", *overrides, scorer, *options))
    objective: Any = trainer.objective
    model, results = objective.model, []
    batches = [recorded_batch([pair], trainer.job.pad_to_multiple) for pair in recorded()["pairs"]]
    whole = recorded_batch(recorded()["pairs"], trainer.job.pad_to_multiple)
    for batch in [*batches, whole]:
        plan = [list(range(i, min(i + 4, batch.size))) for i in range(0, batch.size, 4)]
        gradients = model.gradients(batch, plan, objective.loss, objective.denominator(batch) * trainer.job.dp_size)
        counted = gradients.metrics if model.counts_metrics else {}
        result = {name: metric.result() for name, metric in all_reduce_metrics(counted).items()}
        evaluated = objective.evaluate(batch)
        for name, metric in all_reduce_metrics(evaluated).items():
            assert metric.result() == pytest.approx(result[name], rel=1e-5, abs=1e-6), name
        if model.is_last_stage:
            head = model.trainable.modules[-1].output_layer.weight
            result["head_grad_norm"] = float(head.main_grad.norm())
        results.append(result)
    return results


def recorded() -> Any:
    return json.loads((DATA / "ds_chat_reward_loss.json").read_text())


def recorded_batch(pairs: list[dict[str, Any]], multiple: int) -> Any:
    from mrlhf.types import RolloutBatch

    rows = [[t for t in pair[side] if t != 0] for pair in pairs for side in ("chosen", "rejected")]
    return RolloutBatch.from_sequences(
        [row[:1] for row in rows], [row[1:] for row in rows], pad_id=0, pad_to_multiple=multiple
    )


def overrides(sizes: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"parallel.{key}={str(value).lower()}" for key, value in sizes.items())


BUDGET = "train.micro_batch_tokens=200"
LAYOUTS: dict[str, tuple[int, dict[str, tuple[str, ...]]]] = {
    "one": (
        1,
        {
            "pairs2": (),
            "pairs1": ("train.micro_batch_size=1",),
            "pairs4": ("train.micro_batch_size=4",),
            "budget": (BUDGET,),
            "packed": ("train.packing=true",),
        },
    ),
    "tp2": (2, {"plain": overrides(TP2), "sp": overrides({**TP2, **SP})}),
    "pp2": (2, {"plain": overrides(PP2), "packed": (*overrides(PP2), BUDGET, "train.packing=true")}),
    "dp2": (2, {"plain": ("train.micro_batch_size=1",), "distributed": ("optimizer.distributed=true", BUDGET)}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_of_five_steps(layout: str, inputs: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    world, variants = LAYOUTS[layout]
    ranks = run_ranks(train_all, world, inputs, tmp_path, variants)
    for run, rows in ranks[0].items():
        if run == "recorded":
            continue
        wanted = expected[run.split("-")[0]]
        assert [row["loss"] for row in rows] == pytest.approx(wanted["loss"], rel=2e-5), run
        assert [row["grad_norm"] for row in rows] == pytest.approx(wanted["grad_norm"], rel=1e-4), run
        assert rows[-1]["validation/loss"] == pytest.approx(wanted["validation"], rel=5e-5), run
        if run.startswith("dpo"):
            # The policy is the reference, to the last bit.
            assert (rows[0]["reward_margin"], rows[0]["chosen_reward"], rows[0]["accuracy"]) == (0.0, 0.0, 0.0), run
            assert rows[0]["dpo_loss"] == pytest.approx(math.log(2), rel=1e-7), run
            assert abs(rows[1]["reward_margin"]) > 1e-3, run
    check_recorded(ranks[-1]["recorded"])


def check_recorded(results: dict[str, list[dict[str, float]]]) -> None:
    stored = recorded()
    for loss, key in (("deepspeed_chat", "loss"), ("bradley_terry", "bradley_terry_loss")):
        for pair, result in zip(stored["pairs"], results[loss], strict=False):
            assert result["loss"] == pytest.approx(pair[key], rel=2e-4, abs=1e-5), pair["name"]
            assert result["chosen_score"] == pytest.approx(pair["chosen_end_score"], abs=2e-4), pair["name"]
            assert result["rejected_score"] == pytest.approx(pair["rejected_end_score"], abs=2e-4), pair["name"]
            if loss == "deepspeed_chat":
                assert result["head_grad_norm"] == pytest.approx(pair["head_grad_norm"], rel=1e-3, abs=1e-4)
        assert len(results[loss]) == len(stored["pairs"]) + 1 == 7
    assert results["deepspeed_chat"][-1]["loss"] == pytest.approx(stored["batch_loss"], rel=2e-4)


@pytest.mark.slow
def test_virtual_stages_with_a_token_budget(inputs: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    from tools.make_tiny_model import make_tiny_model

    for name, classifier in (("policy", False), ("scorer", True)):
        make_tiny_model(tmp_path / name, seed=4, num_layers=4, hidden_size=32, classifier=classifier)
    for name in ("train.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text((inputs / name).read_text())
    interleaved = {"plain": (*overrides({**PP2, **VPP2}), BUDGET)}
    ours = run_ranks(train_all, 2, tmp_path, tmp_path / "interleaved", interleaved, False)[0]
    plain = run_ranks(train_all, 1, tmp_path, tmp_path / "one", {"plain": ()}, False)[0]
    for run in (f"{name}-plain" for name in RUNS):
        for mine, row in zip(ours[run], plain[run], strict=True):
            assert mine["loss"] == pytest.approx(row["loss"], rel=2e-5)
            assert mine["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-4)


def test_recorded_rows_hold_what_the_test_is_about() -> None:
    """Scores on the padding matter in the recording: with causal attention alone the loss would be another."""
    model = load_classifier(DATA / "ds_chat_trajectory" / "reward")
    pair = recorded()["pairs"][1]
    tokens = torch.tensor([pair["chosen"], pair["rejected"]])
    with torch.no_grad():
        masked, causal = (
            model.score(model.model(input_ids=tokens, attention_mask=mask).last_hidden_state)[..., 0]
            for mask in ((tokens != 0).long(), None)
        )
    assert (masked[0] - causal[0]).abs().max() < 1e-5
    assert (masked[1, :7] - causal[1, :7]).abs().max() < 1e-5
    assert (masked[1, 7:] - causal[1, 7:]).abs().max() > 0.1
