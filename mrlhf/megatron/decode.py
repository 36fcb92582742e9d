"""Passes of packed tokens through the pipeline stages with a key-value cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from mrlhf.megatron.cached_attention import CacheContext
from mrlhf.megatron.joined import filler_width, passes_of_all
from mrlhf.megatron.lean import LeanStage
from mrlhf.megatron.model import SelectRequest


def layer_numbers(chunks: Sequence[Any]) -> list[int]:
    """Global numbers (from 1) of the layers on this rank, all virtual stages."""
    return [layer.layer_number for chunk in chunks for layer in chunk.decoder.layers]


def filler_tokens_of_round(chunks: Sequence[Any], groups: ProcessGroupCollection) -> int:
    """Tokens of a pass without meaning where replicas share experts (see `mrlhf.megatron.joined`); 0 elsewhere."""
    return filler_width(chunks[0], groups) if getattr(groups, "joined", None) is not None else 0


def round_of_all(wanted: bool, groups: ProcessGroupCollection) -> bool:
    """Whether any replica with the same experts wants another round of passes; all of them call this together."""
    return bool(passes_of_all(int(wanted), groups))


class Pipeline:
    """This rank's stages, and the messages to and from its neighbours.

    Sending does not wait for the receiver, so that a stage goes on with the next pass at once; what was sent is kept
    until it has arrived.
    """

    def __init__(self, chunks: Sequence[Any], groups: ProcessGroupCollection, *, lean: bool = True) -> None:
        """Take the stages as they are: in evaluation mode, not wrapped.

        Args:
            chunks: this rank's stages.
            groups: the model's process groups.
            lean: use `LeanStage` for stages that it knows.
        """
        self.chunks, self.groups = list(chunks), groups
        self.rank, self.size = groups.pp.rank(), groups.pp.size()
        self._ranks = dist.get_process_group_ranks(groups.pp)
        self._lean = [LeanStage(c, groups) if lean and LeanStage.is_known(c, groups) else None for c in self.chunks]
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of this rank's keys and values."""
        dtypes = {self.chunks[0].config.params_dtype if part is None else part.dtype for part in self._lean}
        # A stage that takes another dtype than its cache's converts.
        dtype: torch.dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        return dtype

    def without_autograd(self) -> AbstractContextManager[Any]:
        """The context for passes: inference mode, whose kernels start faster, where nothing that it makes is kept."""
        complete = all(part is not None and part.is_complete for part in self._lean)
        return torch.inference_mode() if complete else torch.no_grad()

    def is_last(self, stage: int) -> bool:
        """Whether this (virtual) stage of this rank is the last one of the model."""
        return stage == len(self.chunks) - 1 and self.rank == self.size - 1

    def run(self, stage: int, tokens: torch.Tensor, context: CacheContext, select: torch.Tensor) -> torch.Tensor | None:
        """One stage of a pass. Every rank of the replica runs the stages of all passes in one order.

        Args:
            stage: which of this rank's (virtual) stages.
            tokens: ``[T]`` int64; a multiple of TP under sequence parallelism.
            context: where they belong in the cache.
            select: ``[n]`` int64, places among the tokens whose logits are wanted, in rising order.

        Returns:
            On the last stage ``[n, padded vocabulary / TP]`` logits, elsewhere None.
        """
        hidden = None if stage == 0 and self.rank == 0 else self._receive(tokens)
        lean = self._lean[stage]
        if lean is not None:
            output = lean(tokens, None if hidden is None else hidden.squeeze(1), context, select)
        else:
            output = self._forward(self.chunks[stage], tokens, hidden, context, select)
        if self.is_last(stage):
            return output
        # Messages are in the model's dtype, whatever a lean stage computes in.
        self._send(output.view(output.size(0), 1, -1).to(self.chunks[0].config.params_dtype))
        return None

    def settle(self) -> None:
        """Wait until everything that was sent has arrived."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _forward(
        self, chunk: Any, tokens: torch.Tensor, hidden: torch.Tensor | None, context: CacheContext, select: torch.Tensor
    ) -> torch.Tensor:
        chunk.set_input_tensor(hidden)
        output: torch.Tensor = chunk(
            tokens[None, :],
            context.positions[None, :],
            None,
            labels=SelectRequest(select),
            inference_context=context,
            runtime_gather_output=True,
        )
        return output.squeeze(0) if chunk.post_process else output

    def _receive(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return self._sent.popleft()[1]
        config = self.chunks[0].config
        width = tokens.numel() // (self.groups.tp.size() if config.sequence_parallel else 1)
        hidden = torch.empty(width, 1, config.hidden_size, dtype=config.pipeline_dtype, device=tokens.device)
        dist.recv(hidden, src=self._ranks[(self.rank - 1) % self.size], group=self.groups.pp)
        return hidden

    def _send(self, hidden: torch.Tensor) -> None:
        hidden = hidden.contiguous()
        work = None
        if self.size > 1:
            work = dist.isend(hidden, dst=self._ranks[(self.rank + 1) % self.size], group=self.groups.pp)
            # Messages of two rounds ago were received before the tokens of that round came back.
            while len(self._sent) > 2 * self.size * len(self.chunks):
                self._sent.popleft()[0].wait()
        self._sent.append((work, hidden))
