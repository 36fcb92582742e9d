"""One pass of packed tokens through all pipeline stages with a key-value cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from mrlhf.megatron.attention import CacheContext, LayerCache
from mrlhf.megatron.joined import filler_tokens, passes_of_all
from mrlhf.megatron.model import SelectRequest


def layer_numbers(chunks: Sequence[Any]) -> list[int]:
    """Global numbers (from 1) of the layers on this rank, all virtual stages."""
    return [layer.layer_number for chunk in chunks for layer in chunk.decoder.layers]


def packed_forward(
    chunks: Sequence[Any],
    tokens: torch.Tensor,
    context: CacheContext,
    select: torch.Tensor,
    *,
    groups: ProcessGroupCollection,
) -> torch.Tensor | None:
    """Run ``tokens`` through the pipeline; every rank of the replica calls this with the same arguments.

    Replicas that share experts make these passes together: one that has fewer of them calls `follow_others` then.

    Args:
        chunks: this rank's stages in evaluation mode, not wrapped.
        tokens: ``[T]`` int64; a multiple of TP under sequence parallelism.
        context: where they belong in the cache.
        select: ``[n]`` int64, places among the tokens whose logits are wanted.
        groups: the model's process groups.

    Returns:
        On the last pipeline stage ``[n, padded vocabulary / TP]`` logits, elsewhere None.
    """
    passes_of_all(1, groups)
    return _forward(chunks, tokens, context, select, groups)


def follow_others(chunks: Sequence[Any], cache: LayerCache, slot: int, *, groups: ProcessGroupCollection) -> None:
    """Make passes without meaning for as long as other replicas with the same experts call `packed_forward`.

    Args:
        chunks: this rank's stages in evaluation mode, not wrapped.
        cache: where the passes may write.
        slot: the place for it there, of at least `mrlhf.megatron.joined.filler_width` tokens.
        groups: the model's process groups.
    """
    if getattr(groups, "joined", None) is None:
        return
    tokens = filler_tokens(chunks[0], groups, next(chunks[0].parameters()).device)[0]
    positions = torch.arange(tokens.numel(), device=tokens.device)
    context = CacheContext(
        cache,
        torch.full_like(positions, slot),
        positions,
        max_sequence_length=tokens.numel(),
        segments=[(0, tokens.numel())],
    )
    while passes_of_all(0, groups):
        _forward(chunks, tokens, context, positions[:1], groups)


def _forward(
    chunks: Sequence[Any],
    tokens: torch.Tensor,
    context: CacheContext,
    select: torch.Tensor,
    groups: ProcessGroupCollection,
) -> torch.Tensor | None:
    pp, virtual = groups.pp, len(chunks)
    ranks = dist.get_process_group_ranks(pp)
    rank, size = pp.rank(), pp.size()
    config = chunks[0].config
    width = tokens.numel() // (groups.tp.size() if config.sequence_parallel else 1)
    output: torch.Tensor | None = None
    for stage, chunk in enumerate(chunks):
        first, last = stage == 0 and rank == 0, stage == virtual - 1 and rank == size - 1
        if first:
            chunk.set_input_tensor(None)
        else:
            if size > 1:
                hidden = torch.empty(width, 1, config.hidden_size, dtype=config.pipeline_dtype, device=tokens.device)
                dist.recv(hidden, src=ranks[(rank - 1) % size], group=pp)
            else:
                assert output is not None
                hidden = output
            chunk.set_input_tensor(hidden)
        output = chunk(
            tokens[None, :],
            context.positions[None, :],
            None,
            labels=SelectRequest(select),
            inference_context=context,
            runtime_gather_output=True,
        )
        if not last and size > 1:
            dist.send(output.contiguous(), dst=ranks[(rank + 1) % size], group=pp)
    return output.squeeze(0) if rank == size - 1 and output is not None else None
