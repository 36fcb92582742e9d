"""Gradients that are not finite: actor and critic skip together, on all ranks, and a run without hope ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrlhf.config_schema import PPOConfig
from mrlhf.errors import MrlhfError
from mrlhf.trainer.ppo import build_trainer
from mrlhf.types import RolloutBatch
from tests.end_to_end.trainer_steps import make_batch, moved, update, weights
from tests.ranks import run_ranks
from tests.tiny_run import make_config, make_inputs, train

LAYOUTS = {
    "one": (1, []),
    "tp2": (2, ["parallel.tensor_model_parallel_size=2"]),
    "pp2": (2, ["parallel.pipeline_model_parallel_size=2"]),
    "dp2-distributed": (2, ["optimizer.distributed=true"]),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("skipped"))


def _spoil(batch: RolloutBatch, field: str, value: float, rows: int = 1) -> RolloutBatch:
    """``value`` at the first response token of the first rows: in one minibatch, on one data-parallel rank."""
    spoiled = getattr(batch, field).clone()
    for row in range(rows):
        spoiled[row, int(batch.prompt_lengths[row]) - 1] = value
    return batch.replace(**{field: spoiled})


def _skip(config: PPOConfig) -> dict[str, Any]:
    trainer = build_trainer(config)
    batch = make_batch(trainer)
    log: dict[str, Any] = {}
    for field, value in (("advantages", float("nan")), ("returns", float("inf"))):
        before = weights(trainer.actor), weights(trainer.critic)
        # One minibatch of 8 rows: the only step is the spoiled one.
        _, updates = update(trainer, _spoil(batch, field, value))
        log[field] = [(step.actor.updated, step.critic.updated) for step in updates]
        assert not moved(trainer.actor, before[0])
        assert not moved(trainer.critic, before[1])
        log["bad " + field] = trainer.updater.bad_steps
    before = weights(trainer.actor), weights(trainer.critic)
    _, updates = update(trainer, batch)
    log["good"] = [(step.actor.updated, step.critic.updated) for step in updates], trainer.updater.bad_steps
    log["moved"] = moved(trainer.actor, before[0]), moved(trainer.critic, before[1])
    # As if nothing had been skipped: Adam's moments and step count are untouched too.
    fresh = build_trainer(config)
    update(fresh, make_batch(fresh))
    log["traces"] = moved(trainer.actor, weights(fresh.actor)), moved(trainer.critic, weights(fresh.critic))
    return log


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_models_skip_where_one_gradient_is_not_finite(inputs: Path, tmp_path: Path, layout: str) -> None:
    world, overrides = LAYOUTS[layout]
    config = make_config(inputs, tmp_path, "ppo.epochs=1", "ppo.minibatch_size=8", *overrides)
    for log in run_ranks(_skip, world, config):
        # NaN in the actor's input only, then infinity in the critic's only.
        assert log["advantages"] == log["returns"] == [(False, False)]
        assert (log["bad advantages"], log["bad returns"]) == (1, 2)
        assert log["good"] == ([(True, True)], 0)
        assert log["moved"] == (True, True)
        assert log["traces"] == (False, False)


def _stop(config: PPOConfig) -> tuple[list[int], str]:
    """What is counted before the run stops, and its last words."""
    trainer = build_trainer(config)
    batch = _spoil(make_batch(trainer), "advantages", float("nan"), rows=8)
    counts = []
    for iteration in range(4):
        try:
            update(trainer, batch, iteration)
        except MrlhfError as error:
            return counts, str(error)
        counts.append(trainer.updater.bad_steps)
    return counts, ""


def test_a_run_of_bad_steps_ends(inputs: Path, tmp_path: Path) -> None:
    # Two steps an iteration: after five of them in a row the sixth, in the third iteration, is one too many.
    config = make_config(inputs, tmp_path, "ppo.epochs=1", "trainer.max_bad_steps=5")
    counts, message = run_ranks(_stop, 1, config)[0]
    assert counts == [2, 4]
    assert message.startswith("6 optimizer steps in a row")
    assert "iteration 2: actor nan" in message
    config = make_config(inputs, tmp_path, "ppo.epochs=1", "trainer.max_bad_steps=0")
    assert run_ranks(_stop, 1, config)[0][0] == []


def _fp16(config: PPOConfig) -> tuple[list[float], list[float], str]:
    """Loss scales of actor and critic while the actor overflows until nothing is left."""
    trainer = build_trainer(config)
    batch = make_batch(trainer)
    spoiled = _spoil(batch, "advantages", 1e9)
    models = trainer.actor, trainer.critic
    scales: tuple[list[float], list[float]] = ([], [])
    try:
        for iteration in range(40):
            before = weights(trainer.critic)
            update(trainer, spoiled, iteration)
            assert not moved(trainer.critic, before)
            for model, log in zip(models, scales, strict=True):
                log.append(model.trainable.loss_scale)
    except MrlhfError as error:
        return *scales, str(error)
    return *scales, ""


def test_fp16_lowers_the_scale_of_the_model_that_overflows_until_nothing_is_left(inputs: Path, tmp_path: Path) -> None:
    config = make_config(
        inputs, tmp_path, "precision.dtype=fp16", "ppo.epochs=1", "ppo.minibatch_size=8", "trainer.max_bad_steps=100"
    )
    actor, critic, message = run_ranks(_fp16, 1, config)[0]
    # Halved after two overflows in a row, and then at each: 17 overflows to come down to 1, the next ends the run.
    assert actor == [2.0**16, *(2.0**power for power in range(15, -1, -1))]
    assert set(critic) == {2.0**16}
    assert "the actor's gradient overflows fp16 even with a loss scale of 1" in message
    assert "precision.dtype=bf16" in message


def _diverge(config: PPOConfig) -> str:
    try:
        train(config)
    except MrlhfError as error:
        return str(error)
    return ""


def test_weights_that_diverged_end_the_run_with_a_way_out(inputs: Path, tmp_path: Path) -> None:
    config = make_config(inputs, tmp_path, "optimizer.actor.lr=1e30", "ppo.epochs=1", "ppo.minibatch_size=8")
    message = run_ranks(_diverge, 1, config)[0]
    assert message.startswith("cannot sample: the largest logit is")
    assert "lower optimizer.actor.lr" in message
