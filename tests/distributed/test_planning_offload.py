"""What the planner says about host memory, against a run that offloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.tiny_run import make_config, make_inputs

OFFLOAD = ("offload.reference=true", "offload.reward=true", "offload.optimizer=true")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("offload"), vocab_size=128)


def _held(config: Any) -> dict[str, tuple[int, int]]:
    """By role: bytes on the host after two iterations, and those of the plan for this rank."""
    from mrlhf.cli_plan import read_models
    from mrlhf.planning.from_config import make_job
    from mrlhf.planning.offload import host_bytes_of
    from mrlhf.trainer.ppo import PPOTrainer, build_trainer

    trainer = build_trainer(config)
    assert isinstance(trainer, PPOTrainer)
    trainer.train()
    copies = {model.name: model.trainable._states for model in (trainer.actor, trainer.critic) if model is not None}
    copies |= {"reference": trainer.reference._weights, "reward0": trainer.scorer.models[0][0]._weights}  # type: ignore[union-attr]
    job = make_job(config, read_models(config), dist.get_world_size())
    return {
        role.name: (
            sum(buffer.numel() for buffer in copies[role.name]._host.values()),
            host_bytes_of(job, role, role.stage_of(dist.get_rank())),
        )
        for role in job.roles
    }


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.pipeline_model_parallel_size=2", "precision.dtype=bf16"),
        pytest.param(("optimizer.distributed=true",), marks=pytest.mark.slow),
        pytest.param(("parallel.tensor_model_parallel_size=2",), marks=pytest.mark.slow),
    ],
)
def test_host_memory_is_what_the_plan_says(inputs: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    for rank in run_ranks(_held, 2, make_config(inputs, tmp_path, *OFFLOAD, *overrides)):
        assert set(rank) == {"actor", "critic", "reference", "reward0"}
        for role, (held, planned) in rank.items():
            # A distributed optimizer pads its shards.
            assert held == pytest.approx(planned, rel=0.05), role
            assert held > 0
