"""Forward and backward passes over micro-batches, under any pipeline layout.

The one file that knows how Megatron scales losses. With M micro-batches, a two-part loss is multiplied by the context
parallel size CP and divided by M, and DDP divides gradients by DP x CP. Our losses are *sums*; the wanted gradient is
that of (sum over all micro-batches and ranks) / denominator. So each micro-batch hands Megatron
``loss_sum * M * (DP x CP) / (CP x denominator)``, which makes loss and gradient independent of the split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from mrlhf.megatron import device
from mrlhf.megatron.context import part_of_rank, whole_rows
from mrlhf.megatron.fp8 import token_multiple
from mrlhf.megatron.joined import filler_tokens, passes_of_all
from mrlhf.megatron.packing import pack_rows

Batch = TypeVar("Batch")
Request = Callable[[Batch], Any]
"""Builds what the head of the last stage gets as ``labels`` (see `mrlhf.megatron.model`), or None."""
Lengths = Callable[[Batch], torch.Tensor]
"""Gives ``[b]`` int64, the tokens of each row."""
AttentionMask = Callable[[Batch], torch.Tensor]
"""Builds the attention mask of a micro-batch (see `mrlhf.megatron.attention`); without one attention is causal."""


class _Filler:
    """A micro-batch without meaning, see `mrlhf.megatron.joined`."""


_FILLER: Any = _Filler()


def forward_only(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[Batch],
    post: Callable[[Batch, torch.Tensor], Any],
    *,
    groups: ProcessGroupCollection,
    tokens: Callable[[Batch], torch.Tensor],
    request: Request[Batch] | None = None,
    attention_mask: AttentionMask[Batch] | None = None,
    lengths: Lengths[Batch] | None = None,
) -> list[Any]:
    """Run ``micro_batches`` through the model without gradients.

    Args:
        chunks: this rank's stages.
        micro_batches: the same number on every rank of a replica; widths may differ from one to the next. Replicas that
            share experts may have different numbers (perhaps none), but all call this together.
        post: called on the last stage with the micro-batch and the model's output.
        groups: the model's process groups.
        tokens: gives ``[b, s]`` int64 token ids of a micro-batch.
        request: gives the head's request for a micro-batch.
        attention_mask: gives bool ``[b, 1, s, s]`` for a micro-batch; by default attention is causal.
        lengths: gives the tokens of each row; the rows are then packed into one sequence without padding, causal and
            without a mask. Results are the same, and 0 in the padding.

    Returns:
        On the last pipeline stage the results of ``post`` in order, elsewhere an empty list.
    """
    count = len(micro_batches)
    passes = passes_of_all(count, groups)
    if passes == 0:
        return []
    padded = list(micro_batches) + [_FILLER] * (passes - count)
    if len(chunks) > 1:
        # The interleaved schedule works in groups of PP micro-batches; the repeated ones are dropped below.
        padded += [padded[-1]] * (-passes % groups.pp.size())

    call = _Caller(groups, tokens, request, attention_mask, lengths)

    def step(iterator: Iterator[Batch], model: torch.nn.Module, *_: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        """Megatron's forward step: the stage's output, and what the last stage makes of it."""
        batch = next(iterator)
        output, unpack = call(batch, model)
        if batch is _FILLER:
            return output, lambda out, non_loss_data=False: None
        return output, lambda out, non_loss_data=False: post(batch, unpack(out))

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
    attention_mask: AttentionMask[Batch] | None = None,
    lengths: Lengths[Batch] | None = None,
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
        attention_mask: gives bool ``[b, 1, s, s]`` for a micro-batch; by default attention is causal.
        lengths: gives the tokens of each row; the rows are then packed into one sequence without padding, causal and
            without a mask. Results are the same, and 0 in the padding.

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
    passes = passes_of_all(count, groups)
    scale = passes * groups.dp_cp.size() / (groups.cp.size() * (denominator if denominator > 0 else 1.0))

    call = _Caller(groups, tokens, request, attention_mask, lengths)

    def step(iterator: Iterator[Batch], model: torch.nn.Module, *_: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        """Megatron's forward step: the stage's output, and what the last stage makes of it."""
        batch = next(iterator)
        output, unpack = call(batch, model)

        def loss_function(out: torch.Tensor) -> tuple[torch.Tensor, Any]:
            """The scaled loss of a micro-batch, and its metrics."""
            if batch is _FILLER:
                return out.float().sum() * 0.0, None
            loss_sum, metrics = loss(batch, unpack(out))
            # A new tensor: Megatron scales what it is given in place, and metrics may hold loss_sum itself.
            return loss_sum * scale, metrics

        return output, loss_function

    padded = list(micro_batches) + [_FILLER] * (passes - count)
    return _run(chunks, padded, step, groups, forward_only=False)[:count]


class _Caller(Generic[Batch]):
    """Hands micro-batches to a stage, padded or packed."""

    def __init__(
        self,
        groups: ProcessGroupCollection,
        tokens: Callable[[Batch], torch.Tensor],
        request: Request[Batch] | None,
        attention_mask: AttentionMask[Batch] | None,
        lengths: Lengths[Batch] | None,
    ) -> None:
        if attention_mask is not None and lengths is not None:
            raise ValueError("packed rows take no attention mask")
        if groups.cp.size() > 1 and (attention_mask is not None or lengths is not None):
            raise ValueError("context parallelism takes neither packed rows nor an attention mask")
        self.groups = groups
        self.tokens, self.request = tokens, request
        self.attention_mask, self.lengths = attention_mask, lengths

    def __call__(
        self, batch: Batch, model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """The stage's output, and what makes rows of the head's."""
        if batch is _FILLER:
            tokens = filler_tokens(model, self.groups, device.device())
            if self.groups.cp.size() > 1:
                return self._in_parts(tokens, None, model)
            return model(tokens, torch.arange(tokens.size(1), device=tokens.device)[None], None), lambda output: output
        tokens, request = self.tokens(batch), self.request(batch) if self.request else None
        if self.groups.cp.size() > 1:
            return self._in_parts(tokens, request, model)
        if self.lengths is None:
            positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
            mask = self.attention_mask(batch) if self.attention_mask else None
            return model(tokens, positions, mask, labels=request), lambda output: output
        lengths = self.lengths(batch).tolist()
        multiple = self.groups.tp.size() * token_multiple(model)
        packing = pack_rows(lengths, tokens.size(1), multiple=multiple, device=tokens.device)
        output = model(
            packing.pack(tokens),
            packing.positions,
            None,
            labels=packing.pack_request(request),
            packed_seq_params=packing.documents,
        )
        return output, packing.unpack

    def _in_parts(
        self, tokens: torch.Tensor, request: Any, model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """This rank's part of every row; the head's output is put together again."""
        cp = self.groups.cp
        slots = part_of_rank(tokens.size(1), cp.rank(), cp.size(), tokens.device)
        positions = slots.expand(tokens.size(0), -1)
        output = model(tokens[:, slots], positions, None, labels=None if request is None else request.part(slots))

        def unpack(part: torch.Tensor) -> torch.Tensor:
            """Log-probs (with entropies) and values end with the slots; bare logits are ``[b, s, vocabulary]``."""
            logits = request is None and part.dim() == 3
            return whole_rows(part, 1 if logits else part.dim() - 1, cp)

        return output, unpack


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
    with _sums_held_back(config, wanted=not forward_only):
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


@contextmanager
def _sums_held_back(config: Any, *, wanted: bool) -> Iterator[None]:
    """Without ``wanted`` the schedule does not hold sums of gradients back: it would, and never go on with them."""
    no_sync = config.no_sync_func
    config.no_sync_func = no_sync if wanted else None
    try:
        yield
    finally:
        config.no_sync_func = no_sync
