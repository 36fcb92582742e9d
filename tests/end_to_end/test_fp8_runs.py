"""Runs with emulated FP8: which models take part, the ratio before the first update, and a resumed delayed recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import sft_run, tiny_run
from tests.ranks import run_ranks

FP8 = ("precision.fp8=hybrid", "precision.fp8_emulation=true")
# The passes before the update have the micro-batches of the update itself: 4 rows each, in order.
ALIKE = ("ppo.epochs=1", "ppo.shuffle=false", "ppo.micro_batch_size=4", "inference.micro_batch_size=4")
RUNS: dict[str, tuple[str, ...]] = {
    "fp32": ALIKE,
    "all": (*FP8, *ALIKE),
    "frozen": (*FP8, *ALIKE, "precision.fp8_roles=[reference, reward]"),
    "other micro-batches": FP8,
    "delayed": (*FP8, "precision.fp8_recipe=delayed"),
}


def several(inputs: Path, output: Path) -> dict[str, Any]:
    """One iteration of every run."""
    result = {}
    for name, overrides in RUNS.items():
        folder = output / name.replace(" ", "-")
        trainer = tiny_run.train(tiny_run.make_config(inputs, folder, "trainer.iterations=1", *overrides))
        (row,) = tiny_run.read_lines(folder / "metrics.jsonl")
        models = {"actor": trainer.actor, "critic": trainer.critic, "reference": trainer.reference}
        models |= {model.name: model for model, _ in trainer.scorer.models}
        inside = {
            role: sum(hasattr(module, "quantizers") for chunk in model.chunks for module in chunk.modules())
            for role, model in models.items()
        }
        result[name] = {"metrics": row, "layers": inside}
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("fp8")
    found: dict[str, Any] = run_ranks(several, 1, tiny_run.make_inputs(root / "ppo"), root / "out")[0]
    return found


def test_the_models_named_are_in_fp8(runs: dict[str, Any]) -> None:
    roles = ("actor", "critic", "reference", "reward0")
    eight = 4 * 2  # four products in each of two layers
    for name, expected in {"fp32": (), "all": roles, "frozen": roles[2:], "delayed": roles[:2]}.items():
        assert runs[name]["layers"] == {role: eight if role in expected else 0 for role in roles}


def test_kl_before_the_update_tells_whether_actor_and_reference_are_rounded_alike(runs: dict[str, Any]) -> None:
    kl = {name: run["metrics"]["kl_k3"] for name, run in runs.items()}
    assert kl["fp32"] == kl["all"] == pytest.approx(0.0, abs=1e-12)
    assert 1e-6 < kl["frozen"] < 0.02
    assert 1e-6 < kl["delayed"] < 0.02


def test_the_ratio_before_the_update_is_1_where_micro_batches_agree(runs: dict[str, Any]) -> None:
    error = {name: run["metrics"]["ratio_error_before_update"] for name, run in runs.items()}
    assert error["fp32"] < 1e-5
    assert error["frozen"] < 1e-5
    assert error["all"] < 1e-5, "the same tokens have the same scales"
    # Other rows beside a row, or the scales of an earlier pass: the accuracy of FP8, on single tokens.
    assert 1e-4 < error["other micro-batches"] < 0.3
    assert 1e-4 < error["delayed"] < 0.5


def test_a_rounded_run_is_near_the_exact_one_and_not_equal(runs: dict[str, Any]) -> None:
    exact = runs["fp32"]["metrics"]
    for name in ("all", "frozen"):
        metrics = runs[name]["metrics"]
        assert metrics["value_mean"] == pytest.approx(exact["value_mean"], abs=0.05)
        assert abs(metrics["policy_loss"] - exact["policy_loss"]) > 1e-7


def stop_and_resume(inputs: Path, output: Path) -> tuple[Any, ...]:
    fp8 = (*FP8, "precision.fp8_recipe=delayed", "precision.fp8_amax_history_len=3")
    common = ("checkpoint.interval=2", "checkpoint.keep_last=5", *fp8)
    whole = sft_run.train(sft_run.make_config(inputs, output / "whole", *common))
    found = [whole.model.weights_hash(), scales(whole)]
    saved = min(path for path in (output / "whole" / "checkpoints").iterdir() if (path / "state.json").exists())
    resumed = sft_run.train(sft_run.make_config(inputs, output / "parts", *common, f"trainer.resume={saved}"))
    return (*found, resumed.model.weights_hash(), scales(resumed))


def scales(trainer: Any) -> dict[str, list[Any]]:
    from mrlhf.megatron.fp8 import scaling_state

    state = scaling_state(trainer.model.trainable.modules)
    return {name: [value["scale"].tolist(), value["history"].tolist()] for name, value in state.items()}


def test_a_resumed_run_has_the_scales_of_the_whole_one(tmp_path: Path) -> None:
    inputs = sft_run.make_inputs(tmp_path / "sft")
    for rank in run_ranks(stop_and_resume, 2, inputs, tmp_path / "out"):
        weights, state, resumed_weights, resumed_state = rank
        assert state
        assert resumed_state == state
        assert resumed_weights == weights
