"""`offload`: what is away when, and no number of a run moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mrlhf.config_schema import PPOConfig
from mrlhf.progress import open_display
from mrlhf.trainer.ppo import build_trainer
from tests.end_to_end.test_ppo_run import PP2, TP2, Runs
from tests.ranks import run_ranks
from tests.tiny_run import make_config, read_lines, steady

OFFLOAD = ["offload.reference=true", "offload.reward=true", "offload.optimizer=true"]


def test_the_run_is_the_same(tmp_path: Path) -> None:
    """With saves and evaluations, which need what is away; in 16 bits, where there are fp32 weights to move."""
    runs = Runs(tmp_path)
    for name, options in {
        "fp32": [PP2],
        "bf16": ["precision.dtype=bf16", "optimizer.distributed=true"],
    }.items():
        both = [*options, "checkpoint.interval=1", "trainer.eval_interval=1"]
        both.append(f"evaluation.prompts={runs.inputs / 'prompts.jsonl'}")
        folders = runs(name, 2, *both), runs(f"{name}-offload", 2, *both, *OFFLOAD)
        plain, moved = (steady(read_lines(folder / "metrics.jsonl")) for folder in folders)
        assert len(plain) == 2
        assert moved == plain
        for mine, theirs in zip(runs.results(f"{name}-offload"), runs.results(name), strict=True):
            assert mine["after"] == theirs["after"]


def _memory(config: PPOConfig) -> dict[str, Any]:
    """Bytes on the device of each kind of tensor, seen from inside the phases."""
    trainer: Any = build_trainer(config)
    seen: dict[str, dict[str, int]] = {}
    trainable = trainer.actor.trainable

    def held(tensors: Any) -> int:
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())

    def look(phase: str) -> None:
        parameters = {
            "reference": [p for c in trainer.reference._chunks for p in c.parameters()],
            "reward": [p for c in trainer.scorer.models[0][0]._chunks for p in c.parameters()],
            "actor": [p for c in trainer.actor._chunks for p in c.parameters()],
        }
        parameters["optimizer"] = [t for t in trainable._state_tensors() if isinstance(t, torch.Tensor)]
        parameters["gradients"] = trainable._gradient_buffers()
        seen.setdefault(phase, {name: held(tensors) for name, tensors in parameters.items()})

    generate, step = trainer.sampler.sample, trainer.updater.run

    def sample(*arguments: Any) -> Any:
        look("rollout" if trainable.optimizer_steps_seen else "first")
        return generate(*arguments)

    trainable.optimizer_steps_seen = 0

    def run(*arguments: Any, **keywords: Any) -> Any:
        result = step(*arguments, **keywords)
        look("train")
        trainable.optimizer_steps_seen += 1
        return result

    evaluate, zero_grad = trainer.evaluator.run, trainable.zero_grad
    coming: list[bool] = []

    def measure() -> Any:
        look("evaluation")
        return evaluate()

    def clear() -> None:
        zero_grad()
        coming.append(trainable._states._on_its_way)

    infer = trainer._infer

    def inferred(*arguments: Any) -> Any:
        result = infer(*arguments)
        look("inference")
        return result

    trainer.sampler.sample, trainer.updater.run, trainer._infer = sample, run, inferred
    trainer.evaluator.run, trainable.zero_grad = measure, clear
    with open_display("off", 2, rank=1) as display:
        for iteration in range(2):
            trainer.iterate(iteration, display)
            trainer.measure(iteration, display)
    return {**seen, "coming": coming}


IDLE = ("ppo.skip_old_logprobs=true", "ppo.kl_coef=0", "ppo.epochs=1", "ppo.minibatch_size=8")
"""Inference does not ask the reference."""


@pytest.mark.parametrize("options", [(), pytest.param(IDLE, marks=pytest.mark.slow)])
def test_what_is_away_in_which_phase(tmp_path: Path, options: tuple[str, ...]) -> None:
    inputs = Runs(tmp_path).inputs
    evaluated = ("trainer.eval_interval=1", f"evaluation.prompts={inputs / 'prompts.jsonl'}")
    for seen in run_ranks(_memory, 2, make_config(inputs, tmp_path / "out", TP2, *OFFLOAD, *evaluated, *options)):
        rollout, train = seen["rollout"], seen["train"]
        there = [seen["inference"][name] > 0 for name in ("reference", "reward", "optimizer")]
        assert there == [not options, True, False]
        assert [rollout[name] for name in ("reference", "reward", "optimizer", "gradients")] == [0, 0, 0, 0]
        assert [train[name] for name in ("reference", "reward")] == [0, 0]
        assert rollout["actor"] == train["actor"] > 0
        assert train["optimizer"] >= 2 * train["actor"]
        assert train["gradients"] >= train["actor"]
        # Evaluations generate, too.
        assert [seen["evaluation"][name] for name in ("optimizer", "gradients")] == [0, 0]
        # The first gradients of an iteration are computed while moments are on their way; a step waits for them.
        half = len(seen["coming"]) // 2
        assert half > (0 if options else 1)
        assert seen["coming"] == ([True] + [False] * (half - 1)) * 2
