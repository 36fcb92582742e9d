"""Data-parallel wrapping, Megatron's Adam and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from mrlhf.megatron import device


@dataclass(frozen=True)
class AdamSettings:
    """AdamW and its schedule.

    The rate rises linearly over the first ``warmup_steps`` steps of the schedule (the first step already has
    ``lr / warmup_steps``), then follows ``lr_schedule``, which would reach ``min_lr`` one step after the last of
    ``total_steps``. ``clip_grad`` is the largest norm of the gradient of the whole model; 0 turns clipping off (the
    norm is still measured). Weight decay is decoupled and spares one-dimensional parameters (norms, biases).
    """

    lr: float
    min_lr: float = 0.0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 1
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0


class Trainable:
    """A model that is trained: its stages in Megatron's DDP, the optimizer and the schedule of its rate."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        groups: ProcessGroupCollection,
        settings: AdamSettings,
        *,
        distributed_optimizer: bool = False,
    ) -> None:
        """Wrap ``chunks`` (weights already loaded: the optimizer copies them).

        Args:
            chunks: this rank's stages.
            groups: the model's process groups.
            settings: see `AdamSettings`.
            distributed_optimizer: shard the optimizer's state over the data-parallel ranks.
        """
        self.groups = groups
        self.settings = settings
        self.config = get_model_config(chunks[0])
        self.chunks = _wrap(chunks, self.config, groups, distributed_optimizer)
        self.optimizer = _build_optimizer(self.chunks, groups, settings, self.config, distributed_optimizer)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = partial(_finalize, groups=groups)
        self.schedule = _build_schedule(self.optimizer, settings)

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The stages without their wrapper."""
        return [chunk.module for chunk in self.chunks]

    @property
    def learning_rate(self) -> float:
        """The rate of the next update."""
        return float(self.optimizer.param_groups[0]["lr"])

    def train(self, mode: bool = True) -> None:
        """Training or evaluation mode (dropout)."""
        for chunk in self.chunks:
            chunk.train(mode)

    def zero_grad(self) -> None:
        """Clear gradients before a minibatch."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def advance_schedule(self) -> None:
        """Move the learning rate on by one step (the trainer does so once per iteration)."""
        self.schedule.step(increment=1)

    def step(self) -> tuple[bool, float]:
        """One update from the accumulated gradients.

        Returns:
            Whether weights changed (an fp16 overflow skips the update and lowers the loss scale), and the norm of the
            whole gradient before clipping.
        """
        updated, norm, _zeros = self.optimizer.step()
        return bool(updated), float("nan") if norm is None else float(norm)


def _wrap(
    chunks: Sequence[torch.nn.Module], config: Any, groups: ProcessGroupCollection, distributed: bool
) -> list[DistributedDataParallel]:
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=False,
        check_for_nan_in_grad=False,
    )
    return [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0, pg_collection=groups)
        for index, chunk in enumerate(chunks)
    ]


def _build_optimizer(
    chunks: Sequence[DistributedDataParallel],
    groups: ProcessGroupCollection,
    settings: AdamSettings,
    config: Any,
    distributed: bool,
) -> Any:
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        decoupled_weight_decay=True,
        # Megatron measures the norm only when it clips.
        clip_grad=settings.clip_grad if settings.clip_grad > 0 else math.inf,
        bf16=config.bf16,
        fp16=config.fp16,
        params_dtype=config.params_dtype,
        # Megatron's 2^32 would cost dozens of updates, each with its rollout, before the first one that counts.
        initial_loss_scale=2.0**16,
        use_distributed_optimizer=distributed,
    )
    return get_megatron_optimizer(optimizer_config, list(chunks), use_gloo_process_groups=False, pg_collection=groups)


def _build_schedule(optimizer: Any, settings: AdamSettings) -> OptimizerParamScheduler:
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr if settings.lr_schedule != "constant" else 0.0,
        lr_warmup_steps=settings.warmup_steps,
        # A warm-up is one step ahead (below), and so must be the end, or the last step would have min_lr already.
        lr_decay_steps=max(settings.total_steps, settings.warmup_steps) + (1 if settings.warmup_steps else 0),
        lr_decay_style=settings.lr_schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )
    if settings.warmup_steps:
        # Megatron starts a warm-up at 0; a whole rollout would go into an update that changes nothing.
        schedule.step(increment=1)
    return schedule


def _finalize(
    model: list[Any],
    num_tokens: torch.Tensor | None = None,
    *,
    groups: ProcessGroupCollection,
    pg_collection: ProcessGroupCollection | None = None,
    **kwargs: Any,
) -> None:
    """Reduce gradients over data-, sequence- and embedding-parallel ranks."""
    finalize_model_grads(model, num_tokens, pg_collection=pg_collection or groups, **kwargs)


def peak_memory_bytes() -> int:
    """Largest memory this process has held: on CUDA by torch's allocator, else resident memory."""
    if device.has_cuda():
        return int(torch.cuda.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
