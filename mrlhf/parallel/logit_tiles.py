"""Tiles of logits of the fused head (`mrlhf.parallel.tiled_head`): buffers, and what is kept for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mrlhf.parallel.products import is_widened
from mrlhf.parallel.vocab import compute_dtype


def slices(length: int, step: int) -> Iterator[slice]:
    """Consecutive slices of ``step`` that cover ``length``."""
    for begin in range(0, length, step):
        yield slice(begin, min(begin + step, length))


class LogitTiles:
    """The tiles of one pass: buffers, and the scaled logits of one tile.

    Attributes:
        kept: logits for the backward pass, by their first row and column.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        valid: int,
        temperature: float,
        tile: tuple[int, int],
        *,
        room: int = 0,
        kept: dict[tuple[int, int], Tensor] | None = None,
    ) -> None:
        """Make the buffers; ``room``: elements of logits to keep, ``kept``: what a forward pass has kept."""
        self.weight = weight
        self.valid = valid
        self.scale = 1.0 / temperature
        self.tokens, self.columns = min(tile[0], max(hidden.shape[0], 1)), min(tile[1], max(valid, 1))
        self.dtype = compute_dtype(weight.dtype)
        size = self.tokens * self.columns
        self.operands = self.dtype if is_widened(weight) else weight.dtype
        self._product = hidden.new_empty(size, dtype=self.operands)
        same = self.dtype == self.operands
        self._logits = self._product if same else hidden.new_empty(size, dtype=self.dtype)
        self._scratch: Tensor | None = None
        self._rows: tuple[slice, Tensor] | None = None
        self._room = room
        self.kept = {} if kept is None else kept

    def over_vocabulary(self) -> Iterator[slice]:
        """Slices of the real columns."""
        return slices(self.valid, self.columns)

    def rows(self, columns: slice) -> Tensor:
        """The weight's rows of these columns, in the dtype of the matrix products."""
        if self._rows is None or self._rows[0] != columns:
            self._rows = columns, self.weight[columns].to(self.operands)
        return self._rows[1]

    def place(self, targets: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """The tile of each target's column (-1: another shard's) ``[n]``, and its place in the tile ``[n, 1]``."""
        local = targets - start
        inside = (local >= 0) & (local < self.valid)
        return torch.where(inside, local // self.columns, -1), (local % self.columns).unsqueeze(1)

    def logits(self, hidden: Tensor, columns: slice, at: int) -> Tensor:
        """Logits over the temperature, ``[rows, columns]`` in the compute dtype; valid until the next call.

        While there is room, those of the rows from ``at`` on are kept.
        """
        shape = (hidden.shape[0], columns.stop - columns.start)
        same = self._logits is self._product
        product = self.kept.get((at, columns.start))
        if product is None and same and shape[0] * shape[1] <= self._room:
            self._room -= shape[0] * shape[1]
            product = self.kept[at, columns.start] = self._product.new_empty(shape)
        if product is None:
            product = self._view(self._product, shape)
        torch.addmm(product, hidden, self.rows(columns).t(), beta=0, alpha=self.scale, out=product)
        return product if same else self._view(self._logits, shape).copy_(product)

    def recall(self, hidden: Tensor, columns: slice, at: int) -> Tensor:
        """The logits of `logits` again, to be overwritten: what was kept is given away."""
        kept = self.kept.pop((at, columns.start), None)
        return self.logits(hidden, columns, at) if kept is None else kept

    def scratch(self, like: Tensor) -> Tensor:
        """A second buffer of the tile's size; its content is undefined."""
        if self._scratch is None:
            self._scratch = torch.empty_like(self._logits)
        return self._view(self._scratch, (like.shape[0], like.shape[1]))

    def as_operand(self, gradient: Tensor) -> Tensor:
        """The tile's gradient in the dtype of the matrix products."""
        if self._logits is self._product:
            return gradient
        return self._view(self._product, (gradient.shape[0], gradient.shape[1])).copy_(gradient)

    @staticmethod
    def _view(buffer: Tensor, shape: tuple[int, int]) -> Tensor:
        return buffer[: shape[0] * shape[1]].view(shape)
