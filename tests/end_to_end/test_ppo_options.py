"""Options of the update, each through whole runs of the trainer: what it changes, and the same under every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mrlhf.config_schema import PPOConfig
from mrlhf.trainer.ppo import build_trainer
from tests.end_to_end.test_ppo_run import TP2, Runs, _assert_same_run
from tests.end_to_end.trainer_steps import make_batch, moved, update, weights
from tests.ranks import run_ranks
from tests.tiny_run import make_config, read_lines


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("options"))


GROUPS = ["rollout.prompts_per_iteration=4", "rollout.samples_per_prompt=2", "ppo.kl_coef=0.05"]
CRITICLESS = {
    "grpo": ["ppo.advantage=grpo", "ppo.loss_aggregation=sequence", "ppo.kl_loss_coef=0.1", *GROUPS],
    "dr-grpo": ["ppo.advantage=grpo", "ppo.grpo_normalize_std=false", "ppo.loss_aggregation=fixed_length", *GROUPS],
    "rloo": ["ppo.advantage=rloo", *GROUPS],
    "reinforce_plus_plus": ["ppo.advantage=reinforce_plus_plus", "ppo.gamma=0.9"],
}


SLOW = ("dr-grpo", "reinforce_plus_plus")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CRITICLESS])
def test_estimators_without_a_critic_are_the_same_under_every_layout(runs: Runs, name: str) -> None:
    overrides = [*CRITICLESS[name], "trainer.export=true"]
    # Groups and minibatches of other ranks: responses to a prompt are in minibatches with those to another.
    layout = [TP2] if name == "rloo" else ["ppo.micro_batch_size=1"]
    alone, shared = runs(name, 1, *overrides), runs(f"{name}-shared", 2, *overrides, *layout)
    _assert_same_run(shared, alone, tolerance=5e-4)
    row = read_lines(alone / "metrics.jsonl")[-1]
    assert not [key for key in row if "critic" in key or "value" in key or key == "explained_variance"]
    assert row["actor_updates"] == 4
    assert ("kl_loss" in row) == ("grpo" in name)
    for rank in runs.results(name):
        assert set(rank["after"]) == {"actor", "reference", "reward0"}
        assert rank["before"]["actor"] != rank["after"]["actor"]
    assert (alone / "actor").is_dir()
    assert not (alone / "critic").exists()


def test_the_updates_stop_where_the_policy_has_come_too_far(runs: Runs) -> None:
    """Four minibatches an iteration: at the first the KL is 0, at the second the limit is passed."""
    overrides = ["ppo.target_approx_kl=1e-6"]
    alone, shared = runs("stop", 1, *overrides), runs("stop-dp2", 2, *overrides)
    _assert_same_run(shared, alone)
    for row in read_lines(alone / "metrics.jsonl"):
        assert (row["early_stopped"], row["actor_updates"], row["critic_updates"]) == (1, 1, 4)
        assert row["skipped_updates"] == 0
        assert row["approx_kl"] > 1e-6 / 2  # of two minibatches, the first of which has none
    free = read_lines(runs("free", 1, "ppo.target_approx_kl=1e3") / "metrics.jsonl")
    assert [(row["early_stopped"], row["actor_updates"]) for row in free] == [(0, 4), (0, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_every_rank_of_a_model_stops_alike(runs: Runs, layout: str) -> None:
    overrides = ["ppo.target_approx_kl=1e-6", f"parallel.{layout}_model_parallel_size=2"]
    _assert_same_run(runs(f"stop-{layout}", 2, *overrides), runs("stop", 1, overrides[0]))


def _stop_weights(config: PPOConfig) -> tuple[bool, bool]:
    """Whether a run that stops has the actor of its first step alone, and the critic of all steps."""
    stopped, plain = build_trainer(config), build_trainer(config)
    batch = make_batch(stopped)
    update(stopped, batch)
    # The rows of the first minibatch, once.
    plain.updater.settings = replace(plain.updater.settings, target_approx_kl=None, epochs=1)
    update(plain, batch.select([0, 1, 2, 3]))
    assert plain.critic is not None
    assert stopped.critic is not None
    return moved(plain.actor, weights(stopped.actor)), moved(plain.critic, weights(stopped.critic))


def test_a_step_that_is_measured_too_far_is_not_made(runs: Runs, tmp_path: Path) -> None:
    config = make_config(runs.inputs, tmp_path, "ppo.target_approx_kl=1e-6", "ppo.shuffle=false")
    assert run_ranks(_stop_weights, 1, config)[0] == (False, True)


def test_the_critic_warms_up_alone(runs: Runs) -> None:
    output = runs(
        "warm-up", 1, "ppo.critic_warmup_iterations=2", "trainer.iterations=3", "optimizer.actor.warmup_iterations=1",
        "optimizer.actor.lr_schedule=linear", "optimizer.critic.lr_schedule=linear",
    )  # fmt: skip
    rows = read_lines(output / "metrics.jsonl")
    assert [(row["actor_updates"], row["critic_updates"]) for row in rows] == [(0, 4), (0, 4), (4, 4)]
    assert [abs(row["kl_k1"]) < 1e-6 for row in rows] == [True] * 3
    assert "policy_loss" not in rows[0]
    assert rows[2]["ratio_error_before_update"] < 1e-5
    # The actor's schedule waits, the critic's does not.
    assert [row["actor_lr"] for row in rows] == pytest.approx([2e-3] * 3)
    assert rows[1]["critic_lr"] < rows[0]["critic_lr"]
    assert rows[1]["value_error"] < rows[0]["value_error"]


def test_the_kl_coefficient_is_steered(runs: Runs) -> None:
    overrides = ["ppo.kl_target=0.05", "ppo.kl_horizon=40", "trainer.iterations=3"]
    rows = read_lines(runs("adaptive", 1, *overrides) / "metrics.jsonl")
    expected = [0.1]
    for row in rows[:-1]:
        error = min(max(row["kl_sequence"] / 0.05 - 1, -0.2), 0.2)
        expected.append(expected[-1] * (1 + error * 8 / 40))
    assert [row["kl_coef"] for row in rows] == pytest.approx(expected, rel=1e-12)
    # No KL before the first update, so at first it falls by the most it can.
    assert rows[1]["kl_coef"] == pytest.approx(0.1 * (1 - 0.2 * 8 / 40))
    # The coefficient that is logged is the one that shaped the rewards: with the same scores the reward tells.
    steady_rows = read_lines(runs("steady", 1, "trainer.iterations=3") / "metrics.jsonl")
    for ours, theirs in zip(rows[:2], steady_rows[:2], strict=True):
        difference = (theirs["kl_coef"] - ours["kl_coef"]) * ours["kl_sequence"]
        assert ours["reward_mean"] - theirs["reward_mean"] == pytest.approx(difference, abs=1e-5)


def test_two_reward_models_and_a_function_are_a_weighted_sum(runs: Runs) -> None:
    from tools.make_tiny_model import make_tiny_model

    second = make_tiny_model(
        runs.folder / "reward2", seed=7, classifier=True, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
        ffn_hidden_size=64,
    )  # fmt: skip
    sources = (
        f"reward.sources=[{{kind: model, path: '{runs.inputs / 'reward'}', weight: 0.5}}, "
        f"{{kind: model, path: '{second}', weight: -1.5}}, "
        "{kind: function, target: 'tests.tiny_run:letters', weight: 2.0}]"
    )
    output = runs("ensemble", 2, sources, TP2, "trainer.iterations=1")
    row = read_lines(output / "metrics.jsonl")[0]
    parts = [row["score/reward_model0"], row["score/reward_model1"], row["score/letters"]]
    assert len({round(part, 4) for part in parts}) == 3
    assert row["score_mean"] == pytest.approx(0.5 * parts[0] - 1.5 * parts[1] + 2.0 * parts[2], rel=1e-5)


def test_no_clip_where_it_is_null(runs: Runs) -> None:
    """Scores of up to 2 x 1 + 2 x .7 and more from the model, clipped to .5 in one run and not at all in another."""
    for clip in ("0.5", "null"):
        output = runs(f"clip-{clip}", 1, f"ppo.score_clip={clip}", "ppo.value_clip=null", "trainer.iterations=1")
        row = read_lines(output / "metrics.jsonl")[0]
        assert row["value_clip_fraction"] == 0
        if clip == "null":
            assert row["score_clip_fraction"] == 0
            assert row["reward_mean"] == pytest.approx(row["score_mean"], abs=1e-5)  # no KL yet
        else:
            assert row["score_clip_fraction"] > 0
            assert row["reward_mean"] <= 0.5
            assert row["score_max"] > 0.5


def test_the_samplers_log_probs_are_those_of_the_training_passes(runs: Runs) -> None:
    """In fp32 up to rounding, so that weights made of them change next to nothing; under every layout."""
    plain, alone = runs("plain", 1), runs("sampler", 1, "rollout.logprobs=true", "rollout.batch_size=3")
    weighted = runs("weighted", 2, TP2, "ppo.importance_cap=1.5")
    gap = "rollout_logprob_gap_"
    for row, without, other in zip(*(read_lines(f / "metrics.jsonl") for f in (alone, plain, weighted)), strict=True):
        assert row.keys() - without.keys() == {f"{gap}mean", f"{gap}max", f"{gap}share"}
        assert 0 < row[f"{gap}mean"] <= row[f"{gap}max"] < 1e-5
        assert row[f"{gap}share"] == 0
        assert other[f"{gap}max"] < 1e-5
        assert other["importance_weight_mean"] == pytest.approx(1.0, abs=1e-5)
        for name in ("policy_loss", "actor_grad_norm", "score_mean"):
            assert other[name] == pytest.approx(without[name], rel=2e-4, abs=2e-5)


@pytest.mark.slow
def test_the_gap_shows_what_fp8_does_to_the_sampler(runs: Runs) -> None:
    """Scales of tensors that are cut otherwise round to other values; the weights are then not all 1."""
    fp8 = ["precision.fp8=hybrid", "precision.fp8_emulation=true", "ppo.importance_cap=1.0001"]
    row = read_lines(runs("fp8-gap", 1, *fp8) / "metrics.jsonl")[0]
    assert row["rollout_logprob_gap_max"] > 1e-3
    assert row["importance_weight_mean"] < 1.0
