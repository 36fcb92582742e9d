"""What all four roles share: a sharded model that turns rows into numbers per token."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mrlhf.megatron.balance import take_load_balancing_loss
from mrlhf.megatron.joined import passes_of_all
from mrlhf.megatron.model import LogprobRequest
from mrlhf.megatron.offload import HostCopy
from mrlhf.megatron.optimizer import Trainable
from mrlhf.megatron.schedule import forward_backward, forward_only
from mrlhf.model_config import ModelConfig
from mrlhf.parallel.batches import on_other_replicas
from mrlhf.parallel.collectives import broadcast_from_last_stage
from mrlhf.roles.micro_batches import Cut, Plan, split_up
from mrlhf.types import Metric, RolloutBatch, labels, merge_metrics

LossFunction = Callable[[RolloutBatch, torch.Tensor], tuple[torch.Tensor, dict[str, Metric]]]


@dataclass(frozen=True)
class Update:
    """What one optimizer step did.

    Attributes:
        updated: whether weights changed (a gradient that is not finite skips the step).
        grad_norm: norm of the whole gradient before clipping.
        metrics: of this rank's share of the minibatch; empty except on the last pipeline stage.
        scale_exhausted: fp16 only: the gradient overflowed at the lowest loss scale, so that waiting brings nothing.
    """

    updated: bool
    grad_norm: float
    metrics: dict[str, Metric]
    scale_exhausted: bool = False


@dataclass(frozen=True)
class Gradients:
    """What one minibatch accumulated, before the optimizer acts on it.

    Attributes:
        finite: whether all of it is, the same on every rank of the model.
        norm: of the whole gradient before clipping.
        metrics: as of `Update`.
        scale_exhausted: as of `Update`.
    """

    finite: bool
    norm: float
    metrics: dict[str, Metric]
    scale_exhausted: bool = False


def counts_metrics(groups: Any) -> bool:
    """Whether this rank speaks for its replica: the first of the last stage's tensor and context ranks, which agree."""
    last_stage = groups.pp.rank() == groups.pp.size() - 1
    return bool(last_stage and groups.tp.rank() == 0 and groups.cp.rank() == 0)


class RoleModel:
    """One role's model on this rank."""

    def __init__(self, name: str, config: ModelConfig, chunks: Sequence[torch.nn.Module], groups: Any) -> None:
        """Keep references.

        Args:
            name: ``actor``, ``critic``, ``reference`` or ``reward``, for messages.
            config: the architecture.
            chunks: this rank's stages with weights loaded, not wrapped.
            groups: the model's process groups.
        """
        self.name = name
        self.config = config
        self._chunks = list(chunks)
        self._weights: HostCopy | None = None
        self.groups = groups
        self.home: Any = None
        """Data-parallel group that shares out the rows of `inferred`; None: the model's own."""
        self.attention_mask: Callable[[RolloutBatch], torch.Tensor] | None = None
        """Mask of a micro-batch for every pass, of a model built for it (``masked``); None: causal."""

    @property
    def chunks(self) -> list[torch.nn.Module]:
        """This rank's stages, on the device."""
        if self._weights is not None:
            self._weights.load()
        return self._chunks

    def offload(self) -> None:
        """Move the weights of a frozen model to the host until somebody asks for `chunks`."""
        if self._weights is None:
            self._weights = HostCopy(lambda: (p for chunk in self._chunks for p in chunk.parameters()), constant=True)
        self._weights.offload()

    def prefetch(self) -> None:
        """Begin to bring back what `offload` moved."""
        if self._weights is not None:
            self._weights.prefetch()

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the head."""
        return bool(self.groups.pp.rank() == self.groups.pp.size() - 1)

    @property
    def counts_metrics(self) -> bool:
        """Whether this rank's metrics count: of the last stage's tensor and context ranks, which agree, the first."""
        return counts_metrics(self.groups)

    @property
    def micro_batch_multiple(self) -> int:
        """What the number of micro-batches of an update is a multiple of: PP with interleaved stages.

        Passes without gradient fill up their last group by themselves.
        """
        return int(self.groups.pp.size()) if len(self.chunks) > 1 else 1

    def inferred(
        self, batch: RolloutBatch, cut: Cut, request: Callable[[RolloutBatch], LogprobRequest] | None = None
    ) -> torch.Tensor:
        """`per_token` where the model's layout may be another one than that of the rows, see `home`.

        Args:
            batch: this rank's rows.
            cut: makes the micro-batches of the rows that this rank's replica of the model gets.
            request: see `per_token`.
        """

        def compute(rows: RolloutBatch) -> torch.Tensor:
            """On the model's own replica."""
            return self.per_token(rows, cut(rows), request, packed=cut.packed)

        if self.home is None:
            return compute(batch)
        return on_other_replicas(batch, self.home, self.groups.dp, compute)

    def per_token(
        self,
        batch: RolloutBatch,
        plan: Plan,
        request: Callable[[RolloutBatch], LogprobRequest] | None = None,
        *,
        packed: bool = False,
    ) -> torch.Tensor:
        """The head's output for every row in the label frame, on every rank of the replica.

        Args:
            batch: rows, the same on every rank of the replica.
            plan: their micro-batches.
            request: the head's request for a micro-batch; None for a value head.
            packed: lay the rows of a micro-batch one after the other without padding, which is the faster the more
                their lengths differ. Results on the tokens are the same; those of the padding are 0.

        Returns:
            ``[B, S-1]`` fp32; positions that a micro-batch did not need to compute are 0.
        """
        shape = (batch.size, batch.width - 1)
        # Without rows there is nothing to do, unless other replicas need this one's experts.
        micro_batches = [batch.select(rows).trim() for rows in plan] if batch.size else []
        outputs = forward_only(
            self.chunks,
            micro_batches,
            lambda _, output: in_label_frame(output).float(),
            groups=self.groups,
            tokens=_tokens,
            request=request,
            attention_mask=self.attention_mask,
            lengths=_lengths if packed else None,
        )
        if not batch.size:
            return torch.zeros(shape, device=batch.tokens.device)
        result = None
        if self.is_last_stage:
            result = torch.zeros(shape, device=batch.tokens.device)
            for rows, output in zip(plan, outputs, strict=True):
                result[rows, : output.size(1)] = output
        return broadcast_from_last_stage(result, shape, torch.float32, self.groups.pp)

    def weights_hash(self) -> str:
        """SHA-256 of this rank's weights: equal before and after means that nothing was trained."""
        digest = hashlib.sha256()
        for chunk in self.chunks:
            for name, tensor in sorted(chunk.state_dict().items()):
                if isinstance(tensor, torch.Tensor):
                    digest.update(name.encode())
                    digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class TrainedModel(RoleModel):
    """A role whose weights are updated: actor and critic."""

    def __init__(self, name: str, config: ModelConfig, trainable: Trainable, groups: Any) -> None:
        """Keep references.

        Args:
            name: see `RoleModel`.
            config: the architecture.
            trainable: stages in DDP with their optimizer.
            groups: the model's process groups.
        """
        super().__init__(name, config, trainable.modules, groups)
        self.trainable = trainable

    def update(
        self,
        minibatch: RolloutBatch,
        plan: Plan,
        loss: LossFunction,
        denominator: float,
        request: Callable[[RolloutBatch], LogprobRequest] | None = None,
        *,
        packed: bool = False,
    ) -> Update:
        """One optimizer step on this rank's rows of a minibatch; all ranks of the model call it together.

        A gradient that is not finite changes nothing; ``updated`` of the result tells.

        Args:
            minibatch: this data-parallel rank's rows.
            plan: their micro-batches.
            loss: of a micro-batch and the head's output ``[..., b, S]``.
            denominator: of the whole minibatch over all ranks, see `mrlhf.megatron.schedule.forward_backward`.
            request: see `per_token`.
            packed: see `per_token`.
        """
        gradients = self.gradients(minibatch, plan, loss, denominator, request, packed=packed)
        return self.apply(gradients, gradients.finite)

    def gradients(
        self,
        minibatch: RolloutBatch,
        plan: Plan,
        loss: LossFunction,
        denominator: float,
        request: Callable[[RolloutBatch], LogprobRequest] | None = None,
        *,
        packed: bool = False,
    ) -> Gradients:
        """The first half of `update`, which leaves the weights alone: `apply` is next."""
        # Fused kernels and recomputation look at the mode; dropout is 0 unless the configuration asks for it.
        self.trainable.train(True)
        self.trainable.zero_grad()
        balanced = bool(self.trainable.config.num_moe_experts and self.trainable.config.moe_aux_loss_coeff)
        passes = passes_of_all(len(plan), self.groups) if balanced else len(plan)
        # A pass without meaning would be one more for the routers to balance.
        plan = split_up(plan, passes)
        parts = forward_backward(
            self.trainable.chunks,
            [minibatch.select(rows).trim() for rows in plan],
            loss,
            denominator,
            groups=self.groups,
            tokens=_tokens,
            request=request,
            attention_mask=self.attention_mask,
            lengths=_lengths if packed else None,
        )
        self.trainable.train(False)
        finite, norm = self.trainable.prepare_step()
        metrics = merge_metrics(parts)
        balance = take_load_balancing_loss(self.trainable.config, self.groups, passes)
        if balance is not None and self.is_last_stage:
            value = torch.tensor(balance, dtype=torch.float64)
            metrics["load_balancing_loss"] = Metric("mean", value, torch.tensor(1.0, dtype=torch.float64))
        return Gradients(finite, norm, metrics, self.trainable.scale_exhausted)

    def apply(self, gradients: Gradients, wanted: bool = True) -> Update:
        """Step on finite ``gradients``, or skip them where the step is not ``wanted``."""
        if wanted:
            self.trainable.apply_step(gradients.norm)
        return Update(wanted, gradients.norm, gradients.metrics, gradients.scale_exhausted)


def in_label_frame(output: torch.Tensor) -> torch.Tensor:
    """Drop the last slot of the head's output ``[..., b, S]``: nothing follows it, so it predicts no label."""
    return output[..., :-1]


def label_targets(batch: RolloutBatch) -> torch.Tensor:
    """``[B, S]`` targets for the head: the labels, and anything valid for the last slot, which is dropped again."""
    return torch.cat([labels(batch.tokens), batch.tokens[:, -1:]], dim=1)


def pad_frame(mask: torch.Tensor) -> torch.Tensor:
    """A mask of the label frame ``[B, S-1]`` as a mask of slots ``[B, S]``."""
    return torch.nn.functional.pad(mask, (0, 1))


def _tokens(batch: RolloutBatch) -> torch.Tensor:
    return batch.tokens


def _lengths(batch: RolloutBatch) -> torch.Tensor:
    return batch.lengths
