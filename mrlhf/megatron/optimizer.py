"""Data-parallel wrapping, Megatron's Adam and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from mrlhf.megatron import device
from mrlhf.megatron.offload import HostCopy

MIN_LOSS_SCALE = 1.0
"""Where fp16 stops lowering its loss scale."""


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
        overlap_grad_reduce: bool = False,
        bucket_size: int | None = None,
    ) -> None:
        """Wrap ``chunks`` (weights already loaded: the optimizer copies them).

        Args:
            chunks: this rank's stages.
            groups: the model's process groups.
            settings: see `AdamSettings`.
            distributed_optimizer: shard the optimizer's state over the data-parallel ranks.
            overlap_grad_reduce: sum gradients over replicas while others are still computed. All sums are there when
                `prepare_step` begins. A step is one `zero_grad` and one `mrlhf.megatron.schedule.forward_backward`,
                overlapped or not.
            bucket_size: elements that are summed at once where that overlaps; None for Megatron's 40 million or more.
        """
        self.groups = groups
        self.settings = settings
        self.config = get_model_config(chunks[0])
        self.overlapped = overlap_grad_reduce and groups.dp_cp.size() > 1
        """Whether gradients are summed beside the backward pass."""
        bucket_size = bucket_size if self.overlapped else None
        self.chunks = _wrap(chunks, self.config, groups, distributed_optimizer, self.overlapped, bucket_size)
        self._optimizer = _build_optimizer(self.chunks, groups, settings, self.config, distributed_optimizer)
        self.config.grad_scale_func = self._optimizer.scale_loss
        self.config.finalize_model_grads_func = partial(_finalize, groups=groups)
        if self.overlapped:
            # Only the last micro-batch of a step sets sums off.
            contexts = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = contexts if len(contexts) > 1 else contexts[0]
        self.schedule = _build_schedule(self._optimizer, settings)
        self.scale_exhausted = False
        """fp16 only: the last gradient overflowed at the lowest loss scale, so that waiting brings nothing."""
        self._states = HostCopy(self._state_tensors, self._gradient_buffers)

    @property
    def optimizer(self) -> Any:
        """Megatron's, with its states on the device."""
        self._states.load()
        return self._optimizer

    def offload(self) -> None:
        """Move moments and fp32 weights to the host, and free the gradients; whoever needs them gets them back."""
        self._states.offload()

    def prefetch(self) -> None:
        """Begin to bring back what `offload` moved."""
        self._states.prefetch()

    def _state_tensors(self) -> list[torch.Tensor]:
        """Moments, and the fp32 copies of weights where the model is not fp32 itself."""
        weights = {p.untyped_storage()._cdata for chunk in self.chunks for p in chunk.parameters()}
        found = []
        for optimizer in self._optimizer.chained_optimizers:
            if optimizer.is_stub_optimizer:
                continue
            inner = optimizer.optimizer
            tensors = [t for state in inner.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
            tensors += [p for group in inner.param_groups for p in group["params"]]
            found += [t for t in tensors if t.numel() > 1 and t.untyped_storage()._cdata not in weights]
        return found

    def _gradient_buffers(self) -> list[torch.Tensor]:
        """Their content is not needed between updates: each begins with `zero_grad`."""
        chunks = self.chunks
        return [b.grad_data for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The stages without their wrapper."""
        return [chunk.module for chunk in self.chunks]

    @property
    def learning_rate(self) -> float:
        """The rate of the next update."""
        return float(self._optimizer.param_groups[0]["lr"])

    def train(self, mode: bool = True) -> None:
        """Training or evaluation mode (dropout)."""
        for chunk in self.chunks:
            chunk.train(mode)

    def zero_grad(self) -> None:
        """Clear gradients before a minibatch."""
        # The buffers have their memory from here on; moments may come while gradients are computed.
        self._states.prefetch()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def advance_schedule(self) -> None:
        """Move the learning rate on by one step (the trainer does so once per iteration)."""
        self.schedule.step(increment=1)

    def step(self) -> tuple[bool, float]:
        """One update from the accumulated gradients; one that is not finite changes nothing.

        Returns:
            Whether weights changed, and the norm of the whole gradient before clipping.
        """
        finite, norm = self.prepare_step()
        if finite:
            self.apply_step(norm)
        return finite, norm

    def prepare_step(self) -> tuple[bool, float]:
        """Look at the accumulated gradients before anything changes; the same answer on every rank of the model.

        Under fp16 they are unscaled, and the loss scale is moved: down after an overflow. `apply_step` may follow, or
        nothing, which skips the update.

        Returns:
            Whether all gradients are finite, and the norm of the whole gradient before clipping.
        """
        lowest = bool(self.config.fp16) and self.loss_scale <= MIN_LOSS_SCALE
        overflow = self._prepare_grads()
        self.scale_exhausted = overflow and lowest
        norm = self.optimizer.get_grad_norm()
        value = float("nan") if norm is None else float(norm)
        return not overflow and math.isfinite(value), value

    def _prepare_grads(self) -> bool:
        """Megatron's own, with one loss scale for the dense parameters and the experts.

        It keeps an optimizer with a scaler for each, and every scaler goes by its own gradients: after an overflow of
        one of them alone the other would unscale by another number than losses are multiplied with.
        """
        scalers = [s for o in self.optimizer.chained_optimizers if (s := getattr(o, "grad_scaler", None)) is not None]
        before = [dict(scaler.state_dict()) for scaler in scalers]
        overflow = bool(self.optimizer.prepare_grads())
        if self.config.fp16 and len(scalers) > 1:
            for scaler, state in zip(scalers, before, strict=True):
                scaler.load_state_dict(state)
                scaler.update(overflow)
        return overflow

    def apply_step(self, norm: float) -> None:
        """Clip the gradients that `prepare_step` found to be finite, of this ``norm``, and update the weights."""
        clip = self.settings.clip_grad
        for optimizer in self.optimizer.chained_optimizers:
            parameters = optimizer.get_parameters() if not optimizer.is_stub_optimizer else []
            if clip > 0 and parameters:
                # By the module: `device` puts another function there without CUDA.
                clip_grads.clip_grad_by_total_norm_fp32(parameters, max_norm=clip, total_norm=norm)
        self.optimizer.step_with_ready_grads()

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by against underflow: 1 unless the model is fp16."""
        return float(self._optimizer.get_loss_scale())


def _wrap(
    chunks: Sequence[torch.nn.Module],
    config: Any,
    groups: ProcessGroupCollection,
    distributed: bool,
    overlapped: bool,
    bucket_size: int | None,
) -> list[DistributedDataParallel]:
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=overlapped,
        bucket_size=bucket_size,
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
        clip_grad=settings.clip_grad,
        bf16=config.bf16,
        fp16=config.fp16,
        params_dtype=config.params_dtype,
        # Megatron's 2^32 would cost dozens of updates, each with its rollout, before the first one that counts.
        initial_loss_scale=2.0**16,
        min_loss_scale=MIN_LOSS_SCALE,
        use_distributed_optimizer=distributed,
    )
    with _among(groups.intra_dist_opt):
        return get_megatron_optimizer(
            optimizer_config, list(chunks), use_gloo_process_groups=False, pg_collection=groups
        )


@contextmanager
def _among(group: dist.ProcessGroup) -> Iterator[None]:
    """Collectives of all ranks are among those of ``group`` inside.

    Megatron's ``_get_param_groups`` compares the optimizer's parameter groups over the whole world, whatever groups
    it is given; but the other ranks may be building another model at that moment, or none.
    """
    world = dist.GroupMember.WORLD
    if world is None or group.size() == world.size():
        yield
        return
    try:
        dist.GroupMember.WORLD = group
        yield
    finally:
        dist.GroupMember.WORLD = world


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
