"""Heads of the last pipeline stage: vocabulary log-probs fused with the output layer, and the value head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from mrlhf.megatron import device
from mrlhf.megatron.cpu_products import linear
from mrlhf.parallel.tiled_head import fused_logprobs

__all__ = ["LogprobHead", "ValueHead", "fused_logprobs"]


class LogprobHead(ColumnParallelLinear):
    """GPTModel's ``output_layer``: vocabulary-parallel logits, or log-probs where labels are given.

    Parameter name, shape and checkpoint key are those of Megatron's own output layer, so the two can be exchanged.

    Args:
        input_size: hidden size.
        output_size: padded vocabulary size, a multiple of the group's size.
        true_vocab_size: tokens that exist; columns beyond take no part in log-probs.
        **kwargs: `ColumnParallelLinear`'s; ``bias`` must be False.

    Raises:
        ValueError: a bias was asked for, or gradients would bypass autograd.
    """

    def __init__(self, input_size: int, output_size: int, *, true_vocab_size: int, **kwargs: Any) -> None:
        if kwargs.setdefault("bias", False):
            raise ValueError("LogprobHead has no bias: the fused log-probs would not see it")
        if kwargs["config"].gradient_accumulation_fusion or kwargs["config"].defer_embedding_wgrad_compute:
            raise ValueError("LogprobHead returns the weight's gradient through autograd: set Megatron's "
                             "gradient_accumulation_fusion and defer_embedding_wgrad_compute to False")  # fmt: skip
        super().__init__(input_size, output_size, **kwargs)
        self.true_vocab_size = true_vocab_size

    def forward(
        self,
        x: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        labels: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        temperature: float = 1.0,
        with_entropy: bool = False,
        index: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of this rank's columns, or log-probs and entropy of ``labels``.

        Args:
            x: ``[s, b, h]`` hidden states (``[s/TP, b, h]`` under sequence parallelism).
            weight: tied weight ``[Vpad/TP, h]``, or None for the layer's own.
            runtime_gather_output: part of Megatron's call and without effect: logits are never gathered.
            labels: ``[s, b]`` int64 token ids to score.
            mask: ``[s, b]`` bool, with labels: positions wanted; elsewhere results and gradients are 0.
            temperature: with labels: divides the logits.
            with_entropy: with labels: also return the entropy.
            index: ``[n]`` int64, without labels: the places of the whole sequence whose logits are wanted.

        Returns:
            With labels: log-probs ``[s, b]`` and entropy ``[s, b]`` or None, fp32, the same on every tensor rank.
            Else: logits ``[s, b, Vpad/TP]`` (``[n, b, Vpad/TP]`` with ``index``) and None.

        Raises:
            ValueError: a weight or labels of the wrong shape, or a label outside the vocabulary (on CPU).
        """
        weight = self.weight if weight is None else weight
        expected = (self.output_size_per_partition, self.input_size)
        if weight is None or weight.shape != expected:
            raise ValueError(f"need a weight {list(expected)}, got {None if weight is None else list(weight.shape)}")
        if self.sequence_parallel:
            x = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            x = copy_to_tensor_model_parallel_region(x, group=self.tp_group)
        if labels is None:
            return linear(x if index is None else x[index], weight), None
        if labels.shape != x.shape[:2]:
            raise ValueError(f"labels {list(labels.shape)} do not fit hidden states {list(x.shape)}")
        logprobs, entropy = fused_logprobs(
            x.reshape(-1, x.shape[2]),
            weight,
            labels.reshape(-1),
            group=self.tp_group,
            vocab_size=self.true_vocab_size,
            temperature=temperature,
            with_entropy=with_entropy,
            mask=None if mask is None else mask.reshape(-1),
        )
        return logprobs.view(labels.shape), None if entropy is None else entropy.view(labels.shape)


class ValueHead(torch.nn.Module):
    """One ``hidden -> 1`` linear, replicated over the tensor-parallel group, computed in fp32 (fp64 for fp64).

    Under sequence parallelism each rank computes its share of the sequence and only the values are gathered; the
    parameters' gradients are then partial and marked ``sequence_parallel``, so that Megatron's
    ``finalize_model_grads`` sums them over the group.

    Args:
        hidden_size: width of the hidden states.
        config: Megatron's configuration (parameter dtype, sequence parallelism, initialisation).
        tp_group: the tensor-parallel group.
        bias: with a bias (zero at first), as some reward models have.
        init_method: fills the weight; by default a normal of deviation ``1 / sqrt(hidden_size + 1)`` (Stiennon et
            al. 2020, arXiv:2009.01325). The result is broadcast over the group.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        config: ModelParallelConfig,
        tp_group: dist.ProcessGroup,
        bias: bool = False,
        init_method: Callable[[Tensor], Any] | None = None,
    ) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.sequence_parallel = bool(config.sequence_parallel) and tp_group.size() > 1
        where = torch.device("cpu") if config.use_cpu_initialization else device.device()
        self.weight = torch.nn.Parameter(torch.empty(1, hidden_size, dtype=config.params_dtype, device=where))
        self.bias: torch.nn.Parameter | None = None
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=where))
        for parameter in self.parameters():
            parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        if config.perform_initialization:
            self.reset_parameters(init_method)

    @torch.no_grad()
    def reset_parameters(self, init_method: Callable[[Tensor], Any] | None = None) -> None:
        """Draw a fresh weight, the same on every tensor rank, and set the bias to zero. All ranks call it."""
        if init_method is None:
            torch.nn.init.normal_(self.weight, std=(self.weight.shape[1] + 1) ** -0.5)
        else:
            init_method(self.weight)
        if self.bias is not None:
            self.bias.zero_()
        # A process group of one rank needs nothing; parameters on CPU of a CUDA run cannot use NCCL.
        if self.tp_group.size() > 1 and self.weight.device.type == device.device().type:
            dist.broadcast(self.weight, group=self.tp_group, group_src=0)

    def forward(
        self, x: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Values of hidden states.

        Args:
            x: ``[s, b, h]`` (``[s/TP, b, h]`` under sequence parallelism).
            weight: part of Megatron's call; a value head is never tied, so it must be None.
            runtime_gather_output: part of Megatron's call, without effect.

        Returns:
            Values ``[s, b, 1]`` of the whole sequence, fp32 (fp64 for fp64 weights), and None.

        Raises:
            ValueError: a tied weight was passed.
        """
        if weight is not None:
            raise ValueError("a value head cannot be tied to the embedding: build the model untied")
        dtype = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        bias = None if self.bias is None else self.bias.to(dtype)
        values = torch.nn.functional.linear(x.to(dtype), self.weight.to(dtype), bias)
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Entries for ``dist_checkpointing``: replicated over tensor and data ranks."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state = self.state_dict(prefix="", keep_vars=True)
        result: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {}, sharded_offsets, tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"]
        )
        return result
