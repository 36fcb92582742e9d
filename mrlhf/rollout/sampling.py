"""Sampling from vocabulary-sharded logits without gathering them.

Every tensor rank returns the same token, and the token does not depend on how the vocabulary is sharded: the weights
``exp((x - max) / T)`` of a fixed block of 128 columns are summed by themselves, by the rank that has them, and
``floor(sum * 2**34)`` is an integer, so the sums over blocks that decide are exact in float64 and free of order.
(Invariance therefore needs shards of whole blocks, which padding the vocabulary to a multiple of ``128 * TP`` gives.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.errors import MrlhfError
from mrlhf.parallel.vocab import gather_shards, group_size, shard_columns
from mrlhf.rollout.sort_keys import best_keys, decode_keys, from_order, order

_BLOCK = 128
# 2**18 tokens of weight up to 2**34 stay below float64's 2**53 exact integers, with room to spare.
_SCALE = 2.0**34
# Most candidates a shard sends; beyond that a kept set is found by bisection on its threshold.
_MAX_CANDIDATES = 1024
_NUCLEUS_CANDIDATES = 256
# Weights are fp32 exponentials: a mass this close to top_p has reached it (p [.5, .3, .2] at .8 keeps two tokens).
_MASS_TOLERANCE = 2.0**-20


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn; the filters act in the order temperature, top-k, top-p, as in transformers.

    Attributes:
        temperature: divides the logits; 0 means greedy.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the fewest tokens, most probable first, whose share of what top-k kept is at least this; 1 keeps
            all. The token that crosses the threshold is kept.
        greedy: take the most probable token.
        repetition_penalty: makes tokens that a row has already less likely, before all else; 1 is off (applied by
            `mrlhf.rollout.draw`, which knows the rows).

    Ties at the edge of a kept set, and for the greedy maximum, go to the lower token id.

    Raises:
        ValueError: a value outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or positive, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be positive and finite, not {self.repetition_penalty}")

    @property
    def is_greedy(self) -> bool:
        """Whether no random number is used."""
        return self.greedy or self.temperature == 0 or self.top_k == 1


def sample_tokens(
    logits: Tensor,
    uniforms: Tensor,
    params: SamplingParams,
    *,
    group: dist.ProcessGroup | None,
    vocab_size: int,
) -> Tensor:
    """Draw one token per row by the inverse of the cumulative distribution.

    Args:
        logits: ``[N, V/TP]``, this rank's columns of the padded vocabulary (any floating dtype, used in fp32).
        uniforms: ``[N]`` in [0, 1), fp32 or fp64, the same on every rank of ``group``; unused when greedy.
        params: temperature and filters.
        group: the tensor-parallel group; None when the vocabulary is not sharded.
        vocab_size: true vocabulary size; an id at or beyond it is never returned.

    Returns:
        Token ids ``[N]`` int64, the same on every rank and for every sharding of the same logits.

    Raises:
        ValueError: wrong shapes.
        MrlhfError: a row whose logits hold NaN, +inf or only -inf.
    """
    return _draw(logits, uniforms, params, group, vocab_size)[0]


def sample_with_logprobs(
    logits: Tensor,
    uniforms: Tensor,
    params: SamplingParams,
    *,
    group: dist.ProcessGroup | None,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """As `sample_tokens`, with the log-probs ``[N]`` fp32 of the tokens at the temperature (greedy: at 1).

    They are those of the whole distribution, without the filters, and come from the sums that the sampling needs
    anyway.
    """
    tokens, shard, total = _draw(logits, uniforms, params, group, vocab_size)
    if shard is None:
        return tokens, torch.zeros(tokens.shape, device=logits.device)
    total = shard.total() if total is None else total
    if group_size(group) == 1:
        values = shard.x.gather(1, tokens.unsqueeze(1)).squeeze(1) - shard.top
        return tokens, _logprobs(values, shard, total)
    columns = (tokens - shard.start).clamp(0, max(shard.x.shape[1] - 1, 0))
    own = (tokens >= shard.start) & (tokens < shard.start + shard.x.shape[1])
    values = torch.zeros_like(shard.top)
    if shard.x.shape[1]:
        values = torch.where(own, shard.x.gather(1, columns.unsqueeze(1)).squeeze(1) - shard.top, 0.0)
    dist.all_reduce(values, group=group)
    return tokens, _logprobs(values, shard, total)


def _logprobs(values: Tensor, shard: _Shard, total: Tensor) -> Tensor:
    """From logits less their row's maximum, and the weight of all tokens."""
    return (values.double() / shard.temperature - (total / _SCALE).log()).float()


def _draw(
    logits: Tensor, uniforms: Tensor, params: SamplingParams, group: dist.ProcessGroup | None, vocab_size: int
) -> tuple[Tensor, _Shard | None, Tensor | None]:
    """Tokens, the shard (None without rows) and its total weight, where that was needed."""
    if logits.dim() != 2 or uniforms.shape != logits.shape[:1]:
        raise ValueError(f"need logits [N, V/TP] and uniforms [N], got {list(logits.shape)}, {list(uniforms.shape)}")
    start, valid = shard_columns(logits.shape[1], group, vocab_size)
    if logits.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device), None, None
    x = logits.detach()[:, :valid].float()
    uniforms = uniforms.detach().double()
    if params.is_greedy:
        tokens, top = _greedy(x, start, group)
        return tokens, _Shard(x, start, params.temperature or 1.0, group, top), None
    shard = _Shard(x, start, params.temperature, group)
    if 0 < params.top_k <= _MAX_CANDIDATES and params.top_k < vocab_size:
        tokens, _done = _from_candidates(shard, uniforms, params.top_k, params.top_p, total=None)
        return tokens, shard, None
    filtered = 0 < params.top_k < vocab_size
    if params.top_p < 1 and not filtered:
        count, total = min(_NUCLEUS_CANDIDATES, vocab_size), shard.total()
        tokens, done = _from_candidates(shard, uniforms, count, params.top_p, total=total)
        left = (~done).nonzero().squeeze(1)
        if left.numel():
            tokens[left] = _from_threshold(shard.rows(left), uniforms[left], params, filtered)
        return tokens, shard, total
    if filtered:
        return _from_threshold(shard, uniforms, params, filtered), shard, None
    tokens, total = _inverse_cdf(shard, shard.weights, uniforms)
    return tokens, shard, total


class _Shard:
    """This rank's real columns and their weights; whatever is called `total` is over all shards."""

    def __init__(
        self, x: Tensor, start: int, temperature: float, group: dist.ProcessGroup | None, top: Tensor | None = None
    ) -> None:
        self.x, self.start, self.temperature, self.group = x, start, temperature, group
        if top is None:
            top = gather_shards(_row_max(x), group).amax(0)
            _check_rows(top)
        self.top = top
        self._weights: Tensor | None = None

    @property
    def weights(self) -> Tensor:
        """``[N, columns]`` fp32, at most 1; a row's largest over all shards is 1."""
        if self._weights is None:
            self._weights = self.weigh(self.x)
        return self._weights

    def rows(self, index: Tensor) -> _Shard:
        """The same shard with some of the rows."""
        part = _Shard(self.x[index], self.start, self.temperature, self.group, self.top[index])
        part._weights = self.weights[index]
        return part

    def weigh(self, x: Tensor) -> Tensor:
        """Weights of logits ``x [N, ...]`` relative to the row's maximum."""
        weights = x - self.top.unsqueeze(1)
        if self.temperature != 1:
            weights.div_(self.temperature)
        return weights.exp_()

    def total(self, weights: Tensor | None = None) -> Tensor:
        """Sum of ``[N, columns]`` weights over all shards in units of ``2**-34``, ``[N]`` float64."""
        weights = self.weights if weights is None else weights
        return gather_shards(_block_sums(weights).sum(1), self.group).sum(0)


def _whole(weights: Tensor) -> Tensor:
    """Weights in units of ``2**-34`` as integer-valued fp32."""
    return (weights * _SCALE).floor_()


def _row_max(x: Tensor) -> Tensor:
    return x.amax(1) if x.shape[1] else x.new_full((x.shape[0],), float("-inf"))


def _check_rows(top: Tensor) -> None:
    if top.sum().isfinite():
        return
    bad = (~top.isfinite()).nonzero()
    if bad.numel():
        rows = bad.squeeze(1).tolist()
        raise MrlhfError(
            f"cannot sample: the largest logit is {top[rows[0]].item()} in row(s) {rows[:8]}; the actor's weights have "
            "diverged or were not sound to begin with: lower optimizer.actor.lr, use precision.dtype=bf16 or fp32 in "
            "place of fp16, or start from another checkpoint"
        )


def _block_sums(weights: Tensor) -> Tensor:
    """Sums of 128 columns each in units of ``2**-34``, ``[N, blocks]`` integer-valued float64.

    The order of addition depends on neither width nor rows: torch's CPU kernel sums each run of 128 numbers by itself
    (in an order of the processor's kind; a test watches over it), elsewhere additions are element-wise.
    """
    short = -weights.shape[1] % _BLOCK
    if short:
        weights = torch.nn.functional.pad(weights, (0, short))
    sums = weights.view(weights.shape[0], -1, _BLOCK)
    if sums.device.type == "cpu":
        return sums.sum(2).double().mul_(_SCALE).floor_()
    while sums.shape[2] > 1:
        half = sums.shape[2] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums.squeeze(2).double().mul_(_SCALE).floor_()


def _greedy(x: Tensor, start: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """The best token of each row and its logit."""
    if x.shape[1]:
        value, index = x.max(1).values, x.argmax(1)  # argmax, unlike max, promises the first of equals
    else:
        value, index = _row_max(x), torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    values, ids = gather_shards(torch.stack([value.double(), (index + start).double()]), group).unbind(1)
    top = values.amax(0)
    _check_rows(top)
    return torch.where(values == top, ids, float("inf")).amin(0).long(), top.float()


def _inverse_cdf(shard: _Shard, weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sample from ``weights [N, columns]`` in the order of the token ids; two collectives of N numbers.

    Returns:
        Tokens, and the total of the weights in units of ``2**-34``.
    """
    blocks = _block_sums(weights).cumsum(1)
    local = blocks[:, -1] if blocks.shape[1] else blocks.new_zeros(blocks.shape[0])
    ends = gather_shards(local, shard.group).cumsum(0)
    total = ends[-1]
    target = torch.minimum((uniforms * total).floor(), total - 1)
    if group_size(shard.group) == 1:
        return _pick_in_blocks(weights, blocks, target) + shard.start, total
    tokens = torch.full_like(target, -1, dtype=torch.int64)
    if weights.shape[1]:
        offset = ends[0 if shard.group is None else dist.get_rank(shard.group)] - local
        target = target - offset
        own = (target >= 0) & (target < local)
        picked = _pick_in_blocks(weights, blocks, torch.where(own, target, 0.0))
        tokens = torch.where(own, picked + shard.start, tokens)
    dist.all_reduce(tokens, op=dist.ReduceOp.MAX, group=shard.group)
    return tokens, total


def _pick_in_blocks(weights: Tensor, blocks: Tensor, target: Tensor) -> Tensor:
    """First column whose cumulative weight exceeds ``target [N]``; ``blocks`` are the cumulative block sums."""
    block = torch.searchsorted(blocks, target.unsqueeze(1), right=True).clamp_(max=blocks.shape[1] - 1)
    end = blocks.gather(1, block)
    begin = torch.where(block > 0, blocks.gather(1, (block - 1).clamp(min=0)), 0.0)
    columns = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    if weights.shape[1] % _BLOCK:
        inside = columns < weights.shape[1]
        part = torch.where(inside, weights.gather(1, columns.clamp(max=weights.shape[1] - 1)), 0.0)
    else:
        part = weights.gather(1, columns)
    cumulative = part.double().mul_(_SCALE).cumsum(1)
    # The block's own sum was rounded to fp32; the place inside is scaled to the exact one.
    exact = cumulative[:, -1:]
    place = ((target.unsqueeze(1) - begin) * (exact / (end - begin).clamp(min=1))).floor()
    place = torch.minimum(place, exact - 1).clamp_(min=0)
    index = torch.searchsorted(cumulative, place, right=True).clamp_(max=_BLOCK - 1)
    return columns.gather(1, index).squeeze(1)


def _from_candidates(
    shard: _Shard, uniforms: Tensor, count: int, top_p: float, total: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sample among the ``count`` best tokens, cut to the nucleus, in the order of probability.

    Args:
        shard: this rank's columns.
        uniforms: ``[N]`` float64.
        count: candidates in all (fewer where the vocabulary has fewer).
        top_p: share of ``total`` to keep.
        total: the weight of all tokens ``[N]``; None when the candidates are all there is (top-k).

    Returns:
        Tokens ``[N]``, and whether the candidates held enough weight ``[N]`` bool.
    """
    keys = gather_shards(best_keys(shard.x, shard.start, count).t().contiguous(), shard.group)
    keys = keys.flatten(0, 1).t().contiguous().sort(1, descending=True).values[:, :count]
    values, ids = decode_keys(keys)
    weights = _whole(shard.weigh(values)).double()
    cumulative = weights.cumsum(1)
    total = cumulative[:, -1] if total is None else total
    if top_p < 1:
        target = (total * (top_p * (1 - _MASS_TOLERANCE))).unsqueeze(1)
        done = cumulative[:, -1:] >= target
        kept = (cumulative - weights < target).sum(1, keepdim=True)
        mass = cumulative.gather(1, kept - 1)
    else:
        mass = cumulative[:, -1:]
        done = torch.ones_like(mass, dtype=torch.bool)
    place = torch.minimum((uniforms.unsqueeze(1) * mass).floor(), mass - 1)
    index = torch.searchsorted(cumulative, place, right=True).clamp_(max=cumulative.shape[1] - 1)
    return ids.gather(1, index).squeeze(1), done.squeeze(1)


def _from_threshold(shard: _Shard, uniforms: Tensor, params: SamplingParams, top_k: bool) -> Tensor:
    """Sample from kept sets too large to send: each is found by bisection on the logit at its edge."""
    weights = shard.weights
    if top_k:
        target = torch.full_like(uniforms, float(params.top_k))
        weights = torch.where(_keep_prefix(shard, torch.ones_like(weights), target), weights, 0.0)
    if params.top_p < 1:
        whole = _whole(weights)
        total = gather_shards(whole.sum(1, dtype=torch.float64), shard.group).sum(0)
        target = (total * (params.top_p * (1 - _MASS_TOLERANCE))).ceil()
        weights = torch.where(_keep_prefix(shard, whole, target), weights, 0.0)
    return _inverse_cdf(shard, weights, uniforms)[0]


def _keep_prefix(shard: _Shard, measure: Tensor, target: Tensor) -> Tensor:
    """The fewest columns, by falling logit and rising id, whose measure sums to ``target``.

    Args:
        shard: this rank's columns.
        measure: ``[N, columns]`` integer-valued fp32, equal for equal logits unless 0.
        target: ``[N]`` positive, at most the total measure.

    Returns:
        ``[N, columns]`` bool.
    """
    # Prefix sums of the shard's sorted measures: integers, so exact in float64 whatever the order of ties.
    negated, index = (-shard.x).sort(1)
    sums = torch.nn.functional.pad(measure.gather(1, index).double().cumsum(1), (1, 0))

    def mass(edge: Tensor, inclusive: bool) -> Tensor:
        """Weight of the columns above an edge, over all shards."""
        count = torch.searchsorted(negated, -edge, right=inclusive)
        return gather_shards(sums.gather(1, count).squeeze(1), shard.group).sum(0)

    low = order(torch.full_like(shard.top, float("-inf")))
    high = order(shard.top)
    for _ in range(32):  # fp32 has fewer than 2**32 values; low always reaches the target
        middle = low + (high - low + 1) // 2
        reached = mass(from_order(middle).unsqueeze(1), inclusive=True) >= target
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle - 1)
    edge = from_order(low).unsqueeze(1)
    above, tied = shard.x > edge, (shard.x == edge) & (measure > 0)
    missing = target - mass(edge, inclusive=False)
    local = torch.where(tied, measure, 0.0)
    each = gather_shards(local.amax(1) if local.shape[1] else torch.zeros_like(shard.top), shard.group).amax(0)
    wanted = (missing / each.double()).ceil().clamp(min=1)
    counts = gather_shards(tied.sum(1), shard.group).cumsum(0)
    before = counts[0 if shard.group is None else dist.get_rank(shard.group)] - tied.sum(1)
    rank = tied.cumsum(1) + before.unsqueeze(1)
    return above | (tied & (rank <= wanted.unsqueeze(1)))
