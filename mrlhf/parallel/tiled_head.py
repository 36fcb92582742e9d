"""The language-model head fused with its log-probabilities: hidden states in, log-probs out, one tile at a time.

The logits of a tile of tokens x vocabulary live in one reused buffer. The forward keeps a running maximum and sum
per token (the online softmax of Milakov and Gimelshein, arXiv:1805.02867), the backward computes the tile again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.parallel.products import is_widened
from mrlhf.parallel.vocab import (
    LOGIT_FLOOR,
    check_targets,
    check_temperature,
    combine_shards,
    compute_dtype,
    shard_columns,
    softmax_gradient,
    target_columns,
)

# A CPU tile fits the cache; a GPU wants matrix products large enough to fill it.
_CPU_TILE = (512, 1024)
_CUDA_TILE = (2048, 4096)
# Tokens whose gradients are summed in fp32 before they are rounded to a 16-bit gradient, and the most rows copied
# at once when only some positions are wanted.
_BLOCK_TOKENS = 4096


class _Tiles:
    """The tiles of one call: buffers, and the scaled logits of one tile."""

    def __init__(self, hidden: Tensor, weight: Tensor, valid: int, temperature: float, tile: tuple[int, int]) -> None:
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

    def over_vocabulary(self) -> Iterator[slice]:
        """Slices of the real columns."""
        return _slices(self.valid, self.columns)

    def rows(self, columns: slice) -> Tensor:
        """The weight's rows of these columns, in the dtype of the matrix products."""
        if self._rows is None or self._rows[0] != columns:
            self._rows = columns, self.weight[columns].to(self.operands)
        return self._rows[1]

    def logits(self, hidden: Tensor, columns: slice) -> Tensor:
        """Logits over the temperature, ``[rows, columns]`` in the compute dtype; valid until the next call."""
        shape = (hidden.shape[0], columns.stop - columns.start)
        product = self._view(self._product, shape)
        torch.addmm(product, hidden, self.rows(columns).t(), beta=0, alpha=self.scale, out=product)
        return product if self._logits is self._product else self._view(self._logits, shape).copy_(product)

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


def _slices(length: int, step: int) -> Iterator[slice]:
    for begin in range(0, length, step):
        yield slice(begin, min(begin + step, length))


def _statistics(tiles: _Tiles, hidden: Tensor, targets: Tensor, start: int, out: Tensor) -> None:
    """Fill ``out [3 or 4, rows]`` (see `combine_shards`) for one tile of tokens."""
    top, total, target_logit = out[0], out[1], out[2]
    for columns in tiles.over_vocabulary():
        x = tiles.logits(hidden, columns)
        index, inside = target_columns(targets, start + columns.start, x.shape[1])
        target_logit.add_(torch.where(inside, x.gather(1, index).squeeze(1), 0.0))
        new_top = torch.maximum(top, x.amax(1))
        # Before the first finite logit both maxima are -inf; their difference must not be NaN.
        shift = torch.where(top == new_top, 0.0, top - new_top)
        x.sub_(new_top.masked_fill(new_top == float("-inf"), 0.0).unsqueeze(1))
        decay = shift.exp()
        if out.shape[0] == 4:
            finite_shift = torch.where(decay > 0, shift, 0.0)
            out[3].add_(total * finite_shift).mul_(decay)
            weights = torch.exp(x, out=tiles.scratch(x))
            out[3].add_(x.clamp_(min=LOGIT_FLOOR).mul_(weights).sum(1))
        else:
            weights = x.exp_()
        total.mul_(decay).add_(weights.sum(1))
        top.copy_(new_top)


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        rows: Tensor | None,
        group: dist.ProcessGroup | None,
        vocab_size: int,
        temperature: float,
        with_entropy: bool,
        tile: tuple[int, int],
    ) -> tuple[Tensor, Tensor | None]:
        """``[n, h]`` hidden states and ``[V/TP, h]`` weights to log-probs ``[n]``, and entropy if asked."""
        start, valid = shard_columns(weight.shape[0], group, vocab_size)
        tiles = _Tiles(hidden, weight, valid, temperature, tile)
        if rows is not None:
            targets = targets[rows]
        local = hidden.new_zeros((4 if with_entropy else 3, targets.shape[0]), dtype=tiles.dtype)
        local[0] = float("-inf")
        for part in _slices(targets.shape[0], tiles.tokens):
            block = _take(hidden, rows, part, tiles.operands)
            _statistics(tiles, block, targets[part], start, local[:, part])
        result = combine_shards(local, group)
        ctx.save_for_backward(hidden, weight, targets, rows, result.logsumexp, result.entropy)
        ctx.constants = (start, valid, temperature, tile)
        ctx.set_materialize_grads(False)
        logprobs = _put(result.logprobs, rows, hidden.shape[0])
        return logprobs, None if result.entropy is None else _put(result.entropy, rows, hidden.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states and weights, tile by tile, from those of log-probs and entropy ``[n]``."""
        hidden, weight, targets, rows, logsumexp, entropy = ctx.saved_tensors
        start, valid, temperature, tile = ctx.constants
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        upstream = [None if g is None else (g if rows is None else g[rows]) for g in (grad_logprobs, grad_entropy)]
        active = _active_rows(upstream)
        if active is None or valid == 0:
            return (grad_hidden, grad_weight, *[None] * 7)
        if active.shape[0] < targets.shape[0]:
            rows = active if rows is None else rows[active]
            targets, logsumexp = targets[active], logsumexp[active]
            entropy = None if entropy is None else entropy[active]
            upstream = [None if g is None else g[active] for g in upstream]
        scaled = [None if g is None else g.to(logsumexp.dtype) / temperature for g in upstream]
        of_logprobs = torch.zeros_like(logsumexp) if scaled[0] is None else scaled[0]
        _Backward(
            _Tiles(hidden, weight, valid, temperature, tile), targets, start, logsumexp, entropy, of_logprobs, scaled[1]
        ).run(hidden, rows, grad_hidden, grad_weight)
        return (grad_hidden, grad_weight, *[None] * 7)


class _Backward:
    """Gradients of all tiles. Vocabulary tiles are the outer loop, so one slice of the weight gradient is hot."""

    def __init__(
        self,
        tiles: _Tiles,
        targets: Tensor,
        start: int,
        logsumexp: Tensor,
        entropy: Tensor | None,
        grad_logprobs: Tensor,
        grad_entropy: Tensor | None,
    ) -> None:
        self.tiles, self.targets, self.start, self.logsumexp = tiles, targets, start, logsumexp
        self.entropy, self.grad_logprobs, self.grad_entropy = entropy, grad_logprobs, grad_entropy

    def run(self, hidden: Tensor, rows: Tensor | None, grad_hidden: Tensor | None, grad_weight: Tensor | None) -> None:
        """Add to ``grad_hidden`` and ``grad_weight`` (zeros on entry) in place."""
        tiles, dtype = self.tiles, self.tiles.dtype
        count = self.targets.shape[0]
        in_place = rows is None and hidden.dtype == dtype == tiles.weight.dtype
        step = count if in_place else tiles.tokens * max(1, _BLOCK_TOKENS // tiles.tokens)
        for block in _slices(count, step):
            source = _take(hidden, rows, block, tiles.operands)
            grad_source = None
            if grad_hidden is not None:
                grad_source = grad_hidden if in_place else torch.zeros_like(source, dtype=dtype)
            for columns in tiles.over_vocabulary():
                grad_columns = None
                if grad_weight is not None:
                    grad_columns = grad_weight[columns]
                    if grad_columns.dtype != dtype:
                        grad_columns = torch.zeros_like(grad_columns, dtype=dtype)
                for part in _slices(block.stop - block.start, tiles.tokens):
                    gradient = self._tile(source[part], columns, block.start, part)
                    if grad_source is not None:
                        _add_product(grad_source[part], gradient, tiles.rows(columns))
                    if grad_columns is not None:
                        _add_product(grad_columns, gradient.t(), source[part])
                if grad_weight is not None and grad_columns is not None and grad_weight.dtype != dtype:
                    grad_weight[columns].add_(grad_columns)
            if grad_hidden is not None and grad_source is not None and not in_place:
                index = slice(block.start, block.stop) if rows is None else rows[block]
                grad_hidden[index] = grad_source.to(grad_hidden.dtype)

    def _tile(self, source: Tensor, columns: slice, offset: int, part: slice) -> Tensor:
        x = self.tiles.logits(source, columns)
        at = slice(offset + part.start, offset + part.stop)
        entropy = None
        if self.grad_entropy is not None and self.entropy is not None:
            entropy = (self.entropy[at], self.grad_entropy[at])
        target = target_columns(self.targets[at], self.start + columns.start, x.shape[1])
        softmax_gradient(
            x, target, self.logsumexp[at], self.grad_logprobs[at], entropy, self.tiles.scratch(x) if entropy else None
        )
        return self.tiles.as_operand(x)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:  # 16-bit product, fp32 sum
        total.add_(a @ b)


def _take(hidden: Tensor, rows: Tensor | None, part: slice, dtype: torch.dtype) -> Tensor:
    return (hidden[part] if rows is None else hidden.index_select(0, rows[part])).to(dtype)


def _put(values: Tensor, rows: Tensor | None, length: int) -> Tensor:
    return values if rows is None else values.new_zeros(length).index_copy_(0, rows, values)


def _active_rows(upstream: list[Tensor | None]) -> Tensor | None:
    """Indices with a non-zero upstream gradient (NaN counts), None if there are none: the rest need no work."""
    active = None
    for gradient in upstream:
        if gradient is not None:
            active = gradient != 0 if active is None else active | (gradient != 0)
    if active is None:
        return None
    index = active.nonzero().squeeze(1)
    return index if index.numel() else None


def fused_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    group: dist.ProcessGroup | None,
    vocab_size: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    mask: Tensor | None = None,
    tile_tokens: int | None = None,
    tile_vocab: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of ``targets`` under ``hidden @ weight.T``, never holding more than a tile of logits.

    One all-gather of 3 floats per wanted token (4 with entropy) in the forward, no collective in the backward: the
    gradient of ``hidden`` is this shard's part, to be summed by the region ``hidden`` came from. Matrix products run
    in the weight's dtype (in fp32 on processors that are slow in 16 bits, see `mrlhf.parallel.products`), softmax and
    sums in fp32 (fp64 for fp64 weights).

    Args:
        hidden: ``[N, h]``, the same on every rank of ``group``.
        weight: ``[Vpad/TP, h]``, this rank's rows of the padded output embedding.
        targets: ``[N]`` int64 token ids.
        group: the tensor-parallel group; None when the vocabulary is not sharded.
        vocab_size: true vocabulary size; rows of the weight at or beyond it take no part and get no gradient.
        temperature: the logits are divided by it, for log-probs and entropy alike.
        with_entropy: also return the entropy; its work is skipped otherwise.
        mask: ``[N]`` bool, the positions wanted. Elsewhere log-prob and entropy are 0, the gradient is 0, and hidden
            states and targets may hold anything.
        tile_tokens: tokens of a tile (default 512 on CPU, 2,048 on CUDA).
        tile_vocab: columns of a tile (default 1,024 on CPU, 4,096 on CUDA).

    Returns:
        Log-probs ``[N]`` and entropy ``[N]`` (or None), fp32 (fp64 for fp64 weights), the same on every rank.

    Raises:
        ValueError: wrong shapes, a temperature or tile that is not positive, shards smaller than the vocabulary, or
            (on CPU) a wanted target outside ``[0, vocab_size)``.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"need hidden [N, h] and weight [V/TP, h], got {list(hidden.shape)} and {list(weight.shape)}")
    if targets.shape != hidden.shape[:1] or (mask is not None and mask.shape != targets.shape):
        raise ValueError(f"targets and mask must be [{hidden.shape[0]}], got {list(targets.shape)}")
    check_temperature(temperature)
    default = _CUDA_TILE if hidden.is_cuda else _CPU_TILE
    tile = (default[0] if tile_tokens is None else tile_tokens, default[1] if tile_vocab is None else tile_vocab)
    if min(tile) < 1:
        raise ValueError(f"a tile needs at least one token and one column, got {tile}")
    rows = None if mask is None else mask.nonzero().squeeze(1)
    check_targets(targets if rows is None else targets[rows], vocab_size)
    result: tuple[Tensor, Tensor | None] = _FusedLogprobs.apply(
        hidden, weight, targets, rows, group, vocab_size, float(temperature), with_entropy, tile
    )
    return result
