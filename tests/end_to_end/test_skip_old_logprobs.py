"""``ppo.skip_old_logprobs``: one pass of the actor less, and the same run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlhf.trainer.critic_part import CriticTrainer
from mrlhf.trainer.ppo import PPOTrainer, build_trainer
from tests.end_to_end.test_ppo_run import _assert_same_run
from tests.end_to_end.trainer_steps import weights
from tests.ranks import run_ranks
from tests.tiny_run import make_config, make_inputs, read_lines, steady

# Entries with a tiny gradient would otherwise move by the sign of their rounding error.
ONE_STEP = ("ppo.epochs=1", "ppo.minibatch_size=8", "optimizer.actor.eps=1e-3", "optimizer.critic.eps=1e-3")
SKIP = "ppo.skip_old_logprobs=true"
RUNS: dict[str, tuple[str, ...]] = {
    # All that reads log-probs from before the updates, at a temperature that is not 1.
    "shaped": (
        *("rollout.logprobs=true", "rollout.temperature=0.8", "rollout.top_k=20", "ppo.importance_cap=1.5"),
        *("ppo.kl_target=0.05", "ppo.kl_horizon=40", "ppo.kl_loss_coef=0.05", "ppo.entropy_coef=0.01"),
        *("trainer.iterations=3", "ppo.dual_clip=3.0", "ppo.target_approx_kl=0.1"),
    ),
    # Nothing does, and nothing reads the reference.
    "bare": ("ppo.kl_coef=0", "ppo.whiten_advantages=true"),
    "grpo": (
        *("ppo.advantage=grpo", "rollout.samples_per_prompt=2", "rollout.prompts_per_iteration=4"),
        *("ppo.loss_aggregation=sequence", "ppo.kl_loss_coef=0.1"),
    ),
}
KL = {"kl_k1", "kl_k3", "kl_sequence"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def _counted(trainer: PPOTrainer) -> Counter[tuple[str, str]]:
    """Counts the passes of each model in inference and in updates, from now on."""
    counts: Counter[tuple[str, str]] = Counter()
    phase = ["other"]

    def within(name: str, run: Any) -> Any:
        def inner(*args: Any, **options: Any) -> Any:
            phase[0] = name
            try:
                return run(*args, **options)
            finally:
                phase[0] = "other"

        return inner

    trainer._infer = within("inference", trainer._infer)  # type: ignore[method-assign]
    trainer.updater.run = within("updates", trainer.updater.run)  # type: ignore[method-assign]
    for model in (trainer.actor, trainer.critic, trainer.reference):
        if model is not None:
            name = model.name
            model.chunks[0].register_forward_pre_hook(lambda *_, name=name: counts.update([(name, phase[0])]))
    return counts


def _pair(inputs: Path, root: Path, names: list[str], overrides: tuple[str, ...]) -> dict[str, list[Any]]:
    """Each run with the pass and without: passes by model and phase, and the weights after it."""
    found: dict[str, list[Any]] = {}
    for name in names:
        for skip in (False, True):
            given = (*ONE_STEP, *RUNS[name], *overrides, *([SKIP] if skip else []))
            trainer = build_trainer(make_config(inputs, root / f"{name}-{skip}", *given))
            if isinstance(trainer, CriticTrainer):
                trainer.train()
                found.setdefault(name, []).append(({}, {}, True))
                continue
            counts = _counted(trainer)
            trainer.train()
            models = [model for model in (trainer.actor, trainer.critic) if model is not None]
            after = {f"{model.name} {key}": value for model in models for key, value in weights(model).items()}
            found.setdefault(name, []).append((dict(counts), after, trainer.reference is not None))
    return found


def _assert_same_weights(made: list[Any]) -> None:
    (_, with_pass, _), (_, without, _) = made
    assert with_pass.keys() == without.keys()
    for name, value in with_pass.items():
        torch.testing.assert_close(without[name], value, rtol=1e-4, atol=1e-5, msg=name)


def _assert_metrics(root: Path, name: str) -> None:
    """The numbers of the run with the pass, less those that nobody knows; none that were not there."""
    ours, theirs = (steady(read_lines(root / f"{name}-{skip}" / "metrics.jsonl")) for skip in (True, False))
    unknown = {"ratio_error_before_update", *(set() if name == "shaped" else KL)}
    for ran, other in zip(ours, theirs, strict=True):
        assert other.keys() - ran.keys() == unknown
        assert not ran.keys() - other.keys()
        for key, value in ran.items():
            assert value == pytest.approx(other[key], rel=2e-4, abs=2e-5), key
        assert (ran["ratio_mean"], ran["ratio_min"], ran["ratio_max"]) == (1, 1, 1)
        assert (ran["approx_kl"], ran["approx_kl_k1"], ran["clip_fraction"]) == (0, 0, 0)
    rows = read_lines(root / f"{name}-True" / "samples.jsonl")
    assert all(("kl" in row) == (name == "shaped") for row in rows)


LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "padded": (1, ()),
    "packed": (1, ("ppo.packing=true", "inference.packing=true", "ppo.micro_batch_tokens=60")),
    "tp2": (2, ("parallel.tensor_model_parallel_size=2",)),
    "pp2": (2, ("parallel.pipeline_model_parallel_size=2",)),
    "dp2": (2, ("optimizer.distributed=true",)),
    "split": (2, ("placement=split",)),
}
QUICK = {"padded": list(RUNS), "packed": ["shaped"], "pp2": ["shaped"], "dp2": ["shaped"]}
CASES = [
    *QUICK.items(),
    *(
        pytest.param(layout, [name], marks=pytest.mark.slow)
        for layout in LAYOUTS
        for name in RUNS
        if name not in QUICK.get(layout, [])
    ),
]


@pytest.mark.parametrize(("layout", "names"), CASES)
def test_the_run_is_the_one_with_the_pass(inputs: Path, tmp_path: Path, layout: str, names: list[str]) -> None:
    world, overrides = LAYOUTS[layout]
    ranks = run_ranks(_pair, world, inputs, tmp_path, names, overrides)
    for name in names:
        _assert_metrics(tmp_path, name)
        for rank in ranks:
            _assert_same_weights(rank[name])
        counts, fewer = (made[0] for made in ranks[0][name])
        # As many micro-batches in the updates; in inference none of the actor's.
        assert counts["actor", "inference"] > 0
        assert ("actor", "inference") not in fewer
        assert fewer["actor", "updates"] == counts["actor", "updates"] > 0
        assert counts["reference", "inference"] > 0
        assert fewer.get(("reference", "inference")) == (None if name == "bare" else counts["reference", "inference"])
        assert ranks[0][name][1][2] == (name != "bare")
        # Other models have theirs as before.
        assert fewer.get(("critic", "inference")) == counts.get(("critic", "inference"))


def _alone(inputs: Path, root: Path, overrides: tuple[str, ...]) -> None:
    build_trainer(make_config(inputs, root, *ONE_STEP, *RUNS["shaped"], SKIP, *overrides)).train()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("padded", "split")])
def test_the_same_under_every_layout(inputs: Path, tmp_path: Path, layout: str) -> None:
    run_ranks(_alone, 1, inputs, tmp_path / "alone", ())
    world, overrides = LAYOUTS[layout]
    run_ranks(_alone, world, inputs, tmp_path / layout, overrides)
    _assert_same_run(tmp_path / layout, tmp_path / "alone")


def _evaluated(inputs: Path, root: Path) -> dict[tuple[str, str], int]:
    held_out = (f"evaluation.prompts={inputs / 'prompts.jsonl'}", "evaluation.max_prompts=2", "trainer.eval_interval=1")
    trainer = build_trainer(make_config(inputs, root, *ONE_STEP, "ppo.kl_coef=0", SKIP, *held_out))
    assert isinstance(trainer, PPOTrainer)
    counts = _counted(trainer)
    trainer.train()
    return dict(counts)


def test_evaluations_have_their_reference(inputs: Path, tmp_path: Path) -> None:
    """It is there for them alone: sampled rows do not go through it, and the KL is that of the held-out prompts."""
    counts = run_ranks(_evaluated, 1, inputs, tmp_path)[0]
    assert ("reference", "inference") not in counts
    assert counts["reference", "other"] > 0
    for row in read_lines(tmp_path / "metrics.jsonl"):
        assert not row.keys() & KL
        assert "eval/kl_k1" in row
