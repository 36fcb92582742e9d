"""Rows laid one after the other in one sequence without padding (Megatron's packed sequences, ``thd``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from mrlhf.megatron.model import LogprobRequest
from mrlhf.types import round_up


class PackedDocuments(PackedSeqParams):
    """Megatron's description of a packed sequence, with the bounds of its documents also on the host.

    Attributes:
        segments: ``(start, end)`` of every document; reading ``cu_seqlens_q`` would make every layer wait for a GPU.
    """

    segments: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Packing:
    """Where each token of some right-padded rows lies in the packed sequence, and back.

    A row is a document of its own: it starts at position 0 and attends only to itself. What is left up to the
    multiple that sequence parallelism asks for is one last document without meaning.

    Attributes:
        index: ``[n]`` int64, the place of packed token ``i`` in the flattened rows ``[b * S]``.
        shape: ``(b, S)`` of the rows.
        filling: tokens of the last document.
        positions: ``[1, n + filling]`` int64.
        documents: for the attention.
    """

    index: torch.Tensor
    shape: tuple[int, int]
    filling: int
    positions: torch.Tensor
    documents: PackedDocuments

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """``[b, S] -> [1, n + filling]``; the filling is 0 (False)."""
        packed = rows.reshape(-1)[self.index]
        return torch.nn.functional.pad(packed, (0, self.filling)).unsqueeze(0)

    def pack_request(self, request: Any) -> Any:
        """A head's request about rows as one about the packed sequence; None stays None."""
        if not isinstance(request, LogprobRequest):
            return request
        wanted = None if request.wanted is None else self.pack(request.wanted)
        return replace(request, targets=self.pack(request.targets), wanted=wanted)

    def unpack(self, output: torch.Tensor) -> torch.Tensor:
        """The head's output ``[..., 1, n + filling] -> [..., b, S]``, 0 where the rows are padding."""
        tokens = output[..., 0, : self.index.numel()]
        lead = tokens.shape[:-1]
        rows = tokens.new_zeros(*lead, self.shape[0] * self.shape[1]).index_copy(-1, self.index, tokens)
        return rows.view(*lead, *self.shape)


def pack_rows(lengths: Sequence[int], width: int, *, multiple: int, device: torch.device) -> Packing:
    """Lay rows of ``lengths`` tokens, each in ``width`` slots, one after the other.

    Args:
        lengths: tokens of each row, at least 1.
        width: slots of a padded row ``S``.
        multiple: the packed sequence is filled up to a multiple of it.
        device: of the result.

    Raises:
        ValueError: no rows, or a row without tokens.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"rows of {list(lengths)} tokens cannot be packed; there must be rows, each with a token")
    total = sum(lengths)
    filling = round_up(total, multiple) - total
    sizes = [*lengths, filling] if filling else list(lengths)
    bounds = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    places = [torch.arange(row * width, row * width + length) for row, length in enumerate(lengths)]
    cumulative = torch.tensor(bounds, dtype=torch.int32, device=device)
    documents = PackedDocuments(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=max(sizes),
        max_seqlen_kv=max(sizes),
    )
    documents.segments = tuple(pairwise(bounds))
    return Packing(
        index=torch.cat(places).to(device),
        shape=(len(lengths), width),
        filling=filling,
        positions=torch.cat([torch.arange(size) for size in sizes]).unsqueeze(0).to(device),
        documents=documents,
    )
