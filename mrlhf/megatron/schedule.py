"""Forward and backward passes over micro-batches, under any pipeline layout.

The one file that knows how Megatron scales losses. With M micro-batches, a two-part loss is multiplied by the context
parallel size CP and divided by M, and DDP divides gradients by DP x CP. Our losses are *sums*; the wanted gradient is
that of (sum over all micro-batches and ranks) / denominator. So each micro-batch hands Megatron
``loss_sum * M * (DP x CP) / (CP x denominator)``, which makes loss and gradient independent of the split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

Batch = TypeVar("Batch")
Request = Callable[[Batch], Any]
"""Builds what the head of the last stage gets as ``labels`` (see `mrlhf.megatron.model`), or None."""


def forward_only(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[Batch],
    post: Callable[[Batch, torch.Tensor], Any],
    *,
    groups: ProcessGroupCollection,
    tokens: Callable[[Batch], torch.Tensor],
    request: Request[Batch] | None = None,
) -> list[Any]:
    """Run ``micro_batches`` through the model without gradients.

    Args:
        chunks: this rank's stages.
        micro_batches: the same number on every rank; widths may differ from one to the next.
        post: called on the last stage with the micro-batch and the model's output.
        groups: the model's process groups.
        tokens: gives ``[b, s]`` int64 token ids of a micro-batch.
        request: gives the head's request for a micro-batch.

    Returns:
        On the last pipeline stage the results of ``post`` in order, elsewhere an empty list.
    """
    count = len(micro_batches)
    if count == 0:
        return []
    padded = list(micro_batches)
    if len(chunks) > 1:
        # The interleaved schedule works in groups of PP micro-batches; the repeated ones are dropped below.
        padded += [padded[-1]] * (-count % groups.pp.size())

    def step(iterator: Iterator[Batch], model: torch.nn.Module, *_: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = next(iterator)
        output = _call(model, tokens(batch), request(batch) if request else None)
        return output, lambda out, non_loss_data=False: post(batch, out)

    with torch.no_grad():
        results = _run(chunks, padded, step, groups, forward_only=True)
    return results[:count]


def forward_backward(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[Batch],
    loss: Callable[[Batch, torch.Tensor], tuple[torch.Tensor, Any]],
    denominator: float,
    *,
    groups: ProcessGroupCollection,
    tokens: Callable[[Batch], torch.Tensor],
    request: Request[Batch] | None = None,
) -> list[Any]:
    """Accumulate the gradient of ``sum(loss_sum) / denominator`` over all micro-batches and data-parallel ranks.

    Args:
        chunks: this rank's stages, wrapped in Megatron's DDP.
        micro_batches: as in `forward_only`; with virtual stages their number is a multiple of PP.
        loss: called on the last stage; gives ``(loss_sum, metrics)``, a differentiable scalar sum and anything.
        denominator: the count over the whole minibatch (all micro-batches, all data-parallel ranks), the same number
            on every rank. Zero or less is taken as 1, so that an empty minibatch has zero gradients, not NaN.
        groups: the model's process groups.
        tokens: gives ``[b, s]`` int64 token ids of a micro-batch.
        request: gives the head's request for a micro-batch.

    Returns:
        On the last stage the metrics of every micro-batch in order, elsewhere an empty list.

    Raises:
        ValueError: with virtual stages, a number of micro-batches that is not a multiple of PP.
    """
    count = len(micro_batches)
    if len(chunks) > 1 and count % groups.pp.size():
        raise ValueError(
            f"{count} micro-batches; with virtual pipeline stages they must be a multiple of "
            f"pipeline_model_parallel_size {groups.pp.size()}"
        )
    scale = count * groups.dp_cp.size() / (groups.cp.size() * (denominator if denominator > 0 else 1.0))

    def step(iterator: Iterator[Batch], model: torch.nn.Module, *_: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = next(iterator)
        output = _call(model, tokens(batch), request(batch) if request else None)

        def loss_function(out: torch.Tensor) -> tuple[torch.Tensor, Any]:
            loss_sum, metrics = loss(batch, out)
            # A new tensor: Megatron scales what it is given in place, and metrics may hold loss_sum itself.
            return loss_sum * scale, metrics

        return output, loss_function

    return _run(chunks, list(micro_batches), step, groups, forward_only=False)


def _call(model: torch.nn.Module, tokens: torch.Tensor, request: Any) -> torch.Tensor:
    positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
    output: torch.Tensor = model(tokens, positions, None, labels=request)
    return output


def _run(
    chunks: Sequence[torch.nn.Module],
    micro_batches: list[Any],
    step: Callable[..., Any],
    groups: ProcessGroupCollection,
    *,
    forward_only: bool,
) -> list[Any]:
    config = get_model_config(chunks[0])
    pp_size = groups.pp.size()
    schedule = get_forward_backward_func(pp_size=pp_size, vp_size=len(chunks) if len(chunks) > 1 else None)
    iterators = [iter(micro_batches) for _ in chunks]
    results: list[Any] = schedule(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(micro_batches),
        # Widths travel with the tensors (variable_seq_lengths); these two only need to be positive.
        seq_length=groups.tp.size(),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
        p2p_communicator=P2PCommunicator(groups.pp, config),
        pg_collection=groups,
    )
    return results
