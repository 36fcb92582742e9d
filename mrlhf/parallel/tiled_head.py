"""The language-model head fused with its log-probabilities: hidden states in, log-probs out, one tile at a time.

The logits of a tile of tokens x vocabulary live in one reused buffer (`mrlhf.parallel.logit_tiles`). The forward merges
the maxima and sums of all tiles as the online softmax does (Milakov and Gimelshein, arXiv:1805.02867), the backward
computes the tiles again, but for those that a CPU kept.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.parallel.logit_tiles import LogitTiles, slices
from mrlhf.parallel.vocab import (
    LOGIT_FLOOR,
    check_targets,
    check_temperature,
    combine_shards,
    shard_columns,
)

# A CPU tile fits the cache; a GPU wants matrix products large enough to fill it.
_CPU_TILE = (1024, 1024)
_CUDA_TILE = (2048, 4096)
# Logits in fp32 (48 MiB) that a CPU keeps for the backward pass, which computes the rest again: a quarter of the head's
# products. A GPU has better use for its memory.
_CPU_KEPT = 12 << 20
# Tokens whose gradients are summed in fp32 before they are rounded to a 16-bit gradient, and the most rows copied
# at once when only some positions are wanted.
_BLOCK_TOKENS = 4096


class _Statistics:
    """Of one block of tokens: of each tile the maximum, the largest probability, and the target's logit if it is there.

    They are kept as ``[tiles, rows]`` and merged once, so that a tile costs its matrix product and few passes.
    ``softmax`` is one pass over the cache where ``exp`` alone is no cheaper, and a tile's log of the sum of
    exponentials is its maximum minus the log of its largest probability.
    """

    def __init__(
        self, tiles: LogitTiles, hidden: Tensor, at: int, place: tuple[Tensor, Tensor], with_entropy: bool
    ) -> None:
        self.tiles, self.hidden, self.at = tiles, hidden, at
        self.slices = list(tiles.over_vocabulary())
        self.tile_of, self.column = place
        shape = (len(self.slices), hidden.shape[0])
        self.top, self.largest, self.chosen = (hidden.new_empty(shape, dtype=tiles.dtype) for _ in range(3))
        self.mean = torch.empty_like(self.top) if with_entropy else None
        # Whether there may be logits of -inf, whose part of the entropy is 0 and not NaN. Looking for them costs a CPU
        # little and would make a GPU wait.
        self.floor = hidden.is_cuda

    def fill(self, out: Tensor) -> Tensor:
        """Write ``out [3 or 4, rows]`` (see `combine_shards`); returns each tile's logsumexp ``[tiles, rows]``."""
        self._over_tiles()
        if not self.floor and not bool((self.largest if self.mean is None else self.mean).isfinite().all()):
            self.floor = True
            self._over_tiles()
        top = self.top.amax(0)
        lse = self.top - self.largest.log()
        # A tile of nothing but -inf has no softmax; before the first finite logit there is nothing to add either.
        lse = torch.where(self.top == float("-inf"), self.top, lse)
        weights = (lse - top.clamp(min=torch.finfo(top.dtype).min)).exp()
        out[0], out[1] = top, weights.sum(0)
        chosen = self.chosen.gather(0, self.tile_of.clamp(min=0).unsqueeze(0)).squeeze(0)
        out[2] = torch.where(self.tile_of >= 0, chosen, 0.0)
        if self.mean is not None:
            shifted = torch.where(weights > 0, self.mean - top, 0.0)
            out[3] = (shifted * weights).sum(0)
        return lse

    def _over_tiles(self) -> None:
        for i, columns in enumerate(self.slices):
            x = self.tiles.logits(self.hidden, columns, self.at)
            torch.gather(x, 1, self.column.clamp(max=x.shape[1] - 1), out=self.chosen[i].unsqueeze(1))
            torch.amax(x, 1, out=self.top[i])
            weights = torch.softmax(x, 1, out=self.tiles.scratch(x))
            torch.amax(weights, 1, out=self.largest[i])
            if self.mean is not None:
                torch.sum(weights.mul_(x.clamp_(min=LOGIT_FLOOR) if self.floor else x), 1, out=self.mean[i])


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
        keep: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """``[n, h]`` and ``[V/TP, h]`` to log-probs ``[n]``, and entropy if asked; ``keep``: for a backward pass."""
        start, valid = shard_columns(weight.shape[0], group, vocab_size)
        room = _CPU_KEPT if keep and not hidden.is_cuda and any(ctx.needs_input_grad) else 0
        tiles = LogitTiles(hidden, weight, valid, temperature, tile, room=room)
        if rows is not None:
            targets = targets[rows]
        local = hidden.new_zeros((4 if with_entropy else 3, targets.shape[0]), dtype=tiles.dtype)
        local[0] = float("-inf")
        of_tiles = local.new_empty(len(list(tiles.over_vocabulary())), targets.shape[0])
        floor = False
        for part in slices(targets.shape[0], tiles.tokens) if valid else ():
            block = _take(hidden, rows, part, tiles.operands)
            place = tiles.place(targets[part], start)
            statistics = _Statistics(tiles, block, part.start, place, with_entropy)
            of_tiles[:, part] = statistics.fill(local[:, part])
            floor = floor or statistics.floor
        result = combine_shards(local, group)
        ctx.save_for_backward(hidden, weight, targets, rows, result.logsumexp, result.entropy, of_tiles)
        ctx.constants = (start, valid, temperature, tile, floor)
        ctx.kept = tiles.kept
        ctx.set_materialize_grads(False)
        logprobs = _put(result.logprobs, rows, hidden.shape[0])
        return logprobs, None if result.entropy is None else _put(result.entropy, rows, hidden.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states and weights, tile by tile, from those of log-probs and entropy ``[n]``."""
        hidden, weight, targets, rows, logsumexp, entropy, of_tiles = ctx.saved_tensors
        start, valid, temperature, tile, floor = ctx.constants
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        upstream = [None if g is None else (g if rows is None else g[rows]) for g in (grad_logprobs, grad_entropy)]
        active = _active_rows(upstream)
        if active is None or valid == 0:
            return (grad_hidden, grad_weight, *[None] * 8)
        if active.shape[0] < targets.shape[0]:
            ctx.kept.clear()  # it was of all rows
            rows = active if rows is None else rows[active]
            targets, logsumexp, of_tiles = targets[active], logsumexp[active], of_tiles[:, active]
            entropy = None if entropy is None else entropy[active]
            upstream = [None if g is None else g[active] for g in upstream]
        tiles = LogitTiles(hidden, weight, valid, temperature, tile, kept=ctx.kept)
        scaled = [None if g is None else g.to(logsumexp.dtype) * tiles.scale for g in upstream]
        of_logprobs = torch.zeros_like(logsumexp) if scaled[0] is None else scaled[0]
        place = tiles.place(targets, start)
        gradient = _LogitGradient(of_tiles, logsumexp, place, of_logprobs, entropy, scaled[1], floor)
        _Backward(tiles, gradient).run(hidden, rows, grad_hidden, grad_weight)
        return (grad_hidden, grad_weight, *[None] * 8)


class _LogitGradient:
    """The gradient of a tile of scaled logits x, from those of log-probs (g) and entropies H (e), all ``[n]``.

    With p = softmax(x): d logp/dx = onehot - p and dH/dx = -p (log p + H), so that it is g onehot + p (a x + b) with
    a = -e and b = e (logsumexp - H) - g. A tile's own softmax times its share of the sum is p.
    """

    def __init__(
        self,
        of_tiles: Tensor,
        logsumexp: Tensor,
        place: tuple[Tensor, Tensor],
        grad_logprobs: Tensor,
        entropy: Tensor | None,
        grad_entropy: Tensor | None,
        floor: bool,
    ) -> None:
        self.of_tiles, self.logsumexp, self.grad_logprobs = of_tiles, logsumexp, grad_logprobs
        self.tile_of, self.column = place
        self.slope, self.offset = None, -grad_logprobs
        if entropy is not None and grad_entropy is not None:
            self.slope = -grad_entropy
            self.offset = grad_entropy * (logsumexp - entropy) - grad_logprobs
        self.floor = floor

    def of(self, x: Tensor, index: int, at: slice, scratch: Tensor) -> Tensor:
        """Of tile ``index`` and the tokens ``at``; written over ``x`` or ``scratch``, both overwritten."""
        of_tile = self.of_tiles[index, at]
        share = (of_tile - self.logsumexp[at]).exp_()
        weights = torch.softmax(x, 1, out=scratch)
        if self.floor:
            weights.masked_fill_((of_tile == float("-inf")).unsqueeze(1), 0.0)
            x.clamp_(min=LOGIT_FLOOR)
        offset = (self.offset[at] * share).unsqueeze(1)
        if self.slope is None:
            result = weights.mul_(offset)
        else:
            slope = (self.slope[at] * share).unsqueeze(1)
            result = torch.addcmul(offset, x, slope, out=x).mul_(weights)
        chosen = torch.where(self.tile_of[at] == index, self.grad_logprobs[at], 0.0).unsqueeze(1)
        return result.scatter_add_(1, self.column[at].clamp(max=x.shape[1] - 1), chosen)


class _Backward:
    """Gradients of all tiles. Vocabulary tiles are the outer loop, so one slice of the weight gradient is hot."""

    def __init__(self, tiles: LogitTiles, gradient: _LogitGradient) -> None:
        self.tiles, self.gradient = tiles, gradient

    def run(self, hidden: Tensor, rows: Tensor | None, grad_hidden: Tensor | None, grad_weight: Tensor | None) -> None:
        """Add to ``grad_hidden`` and ``grad_weight`` (zeros on entry) in place."""
        tiles, dtype = self.tiles, self.tiles.dtype
        count = self.gradient.logsumexp.shape[0]
        in_place = rows is None and hidden.dtype == dtype == tiles.weight.dtype
        step = count if in_place else tiles.tokens * max(1, _BLOCK_TOKENS // tiles.tokens)
        for block in slices(count, step):
            source = _take(hidden, rows, block, tiles.operands)
            grad_source = None
            if grad_hidden is not None:
                grad_source = grad_hidden if in_place else torch.zeros_like(source, dtype=dtype)
            for index, columns in enumerate(tiles.over_vocabulary()):
                grad_columns = None
                if grad_weight is not None:
                    grad_columns = grad_weight[columns]
                    if grad_columns.dtype != dtype:
                        grad_columns = torch.zeros_like(grad_columns, dtype=dtype)
                for part in slices(block.stop - block.start, tiles.tokens):
                    at = slice(block.start + part.start, block.start + part.stop)
                    x = tiles.recall(source[part], columns, at.start)
                    gradient = tiles.as_operand(self.gradient.of(x, index, at, tiles.scratch(x)))
                    if grad_source is not None:
                        _add_product(grad_source[part], gradient, tiles.rows(columns))
                    if grad_columns is not None:
                        _add_product(grad_columns, gradient.t(), source[part])
                if grad_weight is not None and grad_columns is not None and grad_weight.dtype != dtype:
                    grad_weight[columns].add_(grad_columns)
            if grad_hidden is not None and grad_source is not None and not in_place:
                taken = slice(block.start, block.stop) if rows is None else rows[block]
                grad_hidden[taken] = grad_source.to(grad_hidden.dtype)


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
    """Log-probs of ``targets`` under ``hidden @ weight.T``, a tile of logits at a time.

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
        tile_tokens: tokens of a tile (default 1,024 on CPU, 2,048 on CUDA).
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
        hidden,
        weight,
        targets,
        rows,
        group,
        vocab_size,
        float(temperature),
        with_entropy,
        tile,
        torch.is_grad_enabled(),
    )
    return result
