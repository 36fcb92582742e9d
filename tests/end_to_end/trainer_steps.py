"""The parts of an iteration of the trainer, for tests that look between them."""

from __future__ import annotations

import torch

from mrlhf.data.prompts import shard
from mrlhf.parallel.batches import gather_batch
from mrlhf.parallel.collectives import all_reduce_metrics
from mrlhf.roles.model import RoleModel
from mrlhf.trainer.experience import add_advantages, add_masks
from mrlhf.trainer.ppo import PPOTrainer
from mrlhf.types import RolloutBatch


def make_batch(trainer: PPOTrainer, iteration: int = 0) -> RolloutBatch:
    """Rows of all ranks, ready for the updates."""
    config, job = trainer.config, trainer.job
    samples = shard(
        next(trainer.stream), job.dp_rank, job.dp_size, samples_per_prompt=config.rollout.samples_per_prompt
    )
    batch, width, samples = trainer.sampler.sample(samples, iteration)
    batch = trainer._infer(add_masks(batch, config.semantics, width), samples)
    return gather_batch(add_advantages(batch, trainer.shaping, job.groups.dp), job.groups.dp)


def update(trainer: PPOTrainer, batch: RolloutBatch, iteration: int = 0) -> tuple[dict[str, float], list]:
    """All updates on ``batch``: the losses' metrics over all ranks, and what the updater returned."""
    accumulator, updates = trainer.updater.run(batch, iteration)
    return {name: m.result() for name, m in all_reduce_metrics(accumulator.metrics()).items()}, updates


def weights(model: RoleModel) -> dict[str, torch.Tensor]:
    """Copies of this rank's parameters."""
    return {f"{i}.{n}": p.detach().clone() for i, c in enumerate(model.chunks) for n, p in c.named_parameters()}


def moved(model: RoleModel, before: dict[str, torch.Tensor]) -> bool:
    """Whether any parameter of this rank differs from ``before``."""
    return any(not torch.equal(before[name], now) for name, now in weights(model).items())
