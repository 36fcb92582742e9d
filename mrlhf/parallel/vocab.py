"""Log-probabilities over logits that are sharded along the vocabulary.

Every tensor rank holds the columns ``[rank * V/TP, (rank + 1) * V/TP)`` of the padded vocabulary. A token's
log-probability needs only the maximum, the sum of exponentials and the target's logit of each shard (and the
exponential-weighted sum of the logits for the entropy), so 3 or 4 floats per token travel, in one all-gather.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Rows are worked on in chunks of about this many elements, so that no fp32 copy of all the logits ever exists; on a CPU
# a chunk stays in the cache, a GPU wants enough work for one kernel.
_CPU_CHUNK, _CUDA_CHUNK = 1 << 18, 1 << 24
# exp(-inf) * -inf is NaN although its limit is 0; a floor this low leaves every other term unchanged.
LOGIT_FLOOR = -1e30
# torch 2.13 renamed the operator and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TokenStatistics(NamedTuple):
    """What the group knows of each token: all ``[N]``, in the compute dtype; ``entropy`` is None unless asked for."""

    logprobs: Tensor
    logsumexp: Tensor
    entropy: Tensor | None


def group_size(group: dist.ProcessGroup | None) -> int:
    """Ranks of ``group``; ``None`` stands for an unsharded vocabulary, not for the world."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This process's rank in ``group`` (0 for ``None``)."""
    return 0 if group is None else dist.get_rank(group)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype softmax arithmetic runs in: fp64 stays, everything else becomes fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def shard_columns(width: int, group: dist.ProcessGroup | None, vocab_size: int) -> tuple[int, int]:
    """First global column of this rank's shard, and how many of its ``width`` columns are real tokens (may be 0).

    Raises:
        ValueError: the shards together hold fewer than ``vocab_size`` columns.
    """
    if width * group_size(group) < vocab_size:
        raise ValueError(
            f"{group_size(group)} shard(s) of {width} columns cannot hold a vocabulary of {vocab_size} tokens"
        )
    start = width * group_rank(group)
    return start, min(max(vocab_size - start, 0), width)


def gather_shards(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All ranks' ``local`` stacked along a new first dimension, ``[TP, *local.shape]``; one collective or none."""
    size = group_size(group)
    if size == 1 or local.numel() == 0:
        return local.expand(size, *local.shape)
    gathered = local.new_empty((size * local.shape[0], *local.shape[1:]))
    _all_gather(gathered, local.contiguous(), group=group)
    return gathered.view(size, *local.shape)


def check_targets(targets: Tensor, vocab_size: int) -> None:
    """Refuse target ids outside ``[0, vocab_size)``: no shard would own them and their log-prob would be made up.

    Raises:
        ValueError: on CPU; on CUDA a device-side assertion, which costs no synchronisation.
    """
    if targets.numel() == 0:
        return
    if targets.is_cuda:
        torch._assert_async(((targets >= 0) & (targets < vocab_size)).all())
        return
    low, high = (int(x) for x in torch.aminmax(targets))
    if low < 0 or high >= vocab_size:
        raise ValueError(f"target ids span [{low}, {high}], outside the vocabulary [0, {vocab_size})")


def combine_shards(local: Tensor, group: dist.ProcessGroup | None) -> TokenStatistics:
    """Merge shard statistics over the group with one all-gather.

    Args:
        local: ``[3 or 4, N]`` of this shard: maximum m (-inf if it has no real column), sum of exp(x - m), the
            target's logit where the shard owns it, else 0, and, for the entropy, sum of exp(x - m) * (x - m).
        group: the tensor-parallel group, or None.
    """
    parts = gather_shards(local, group)
    top = parts[:, 0].amax(0)
    shift = parts[:, 0] - top
    scale = shift.exp()
    total = (parts[:, 1] * scale).sum(0)
    log_total = total.log()
    entropy = None
    if local.shape[0] == 4:
        # An empty shard has shift -inf and sum 0; its product must be 0.
        shift = torch.where(scale > 0, shift, 0.0)
        entropy = log_total - (scale * (parts[:, 3] + parts[:, 1] * shift)).sum(0) / total
    return TokenStatistics(parts[:, 2].sum(0) - top - log_total, top + log_total, entropy)


def target_columns(targets: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Column of each target in ``[start, start + width)`` as a gather index ``[N, 1]``, and whether it is in it."""
    local = targets - start
    inside = (local >= 0) & (local < width)
    return local.clamp(0, width - 1).unsqueeze(1), inside


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: dist.ProcessGroup | None,
        temperature: float,
        with_entropy: bool,
        vocab_size: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits ``[n, V/TP]`` to log-probs ``[n]``, and entropy if asked; ``keep``: for a backward pass."""
        start, valid = shard_columns(logits.shape[1], group, vocab_size)
        dtype = compute_dtype(logits.dtype)
        local = logits.new_zeros((4 if with_entropy else 3, logits.shape[0]), dtype=dtype)
        # The exponentials are most of the work. Where they have the size of the gradient, they become it (`backward`).
        kept = None
        if keep and ctx.needs_input_grad[0] and logits.dtype == dtype and valid:
            kept = logits.new_empty(logits.shape)
        if valid:
            _shard_statistics(logits, valid, temperature, local, kept)
            columns, inside = target_columns(targets, start, valid)
            chosen = _scaled(logits.gather(1, columns), temperature, logits.new_empty(columns.shape, dtype=dtype))
            local[2] = torch.where(inside, chosen.squeeze(1), 0.0)
        else:
            local[0] = float("-inf")
        result = combine_shards(local, group)
        ctx.save_for_backward(logits, targets, result.logsumexp, result.entropy)
        ctx.constants = (start, valid, temperature)
        ctx.kept, ctx.of_shard = kept, local[0] + local[1].log()
        ctx.set_materialize_grads(False)
        return result.logprobs, result.entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradient of the logits ``[n, V/TP]`` from those of log-probs and entropy ``[n]``."""
        logits, targets, logsumexp, entropy = ctx.saved_tensors
        start, valid, temperature = ctx.constants
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(logsumexp)
        kept, ctx.kept = ctx.kept, None
        in_place = logits.dtype == logsumexp.dtype
        # A second backward pass, 16-bit logits or an entropy's gradient: the exponentials are computed again.
        grad = torch.empty_like(logits) if kept is None else kept
        grad[:, valid:].zero_()
        if in_place and grad_entropy is None and valid:
            if kept is None:
                _shard_statistics(logits, valid, temperature, logsumexp.new_empty(3, logsumexp.shape[0]), grad)
            target = target_columns(targets, start, valid)
            _gradient_of_kept(grad[:, :valid], ctx.of_shard, target, logsumexp, grad_logprobs / temperature)
            return grad, None, None, None, None, None, None
        chunks = _row_chunks(logits) if valid else []
        buffer = None if in_place else _buffer(logits, chunks, valid, logsumexp.dtype)
        for rows in chunks:
            out = grad[rows, :valid] if buffer is None else buffer[: rows.stop - rows.start]
            x = softmax_gradient(
                _scaled(logits[rows, :valid], temperature, out),
                target_columns(targets[rows], start, valid),
                logsumexp[rows],
                grad_logprobs[rows] / temperature,
                None if grad_entropy is None else (entropy[rows], grad_entropy[rows] / temperature),
            )
            if not in_place:
                grad[rows, :valid] = x
        return grad, None, None, None, None, None, None


def _shard_statistics(logits: Tensor, valid: int, temperature: float, local: Tensor, kept: Tensor | None) -> None:
    """Fill ``local [3 or 4, n]`` (see `combine_shards`) but for the target's logit, ``kept`` with the shard's softmax.

    torch's softmax passes over the cache once; the largest probability of a row is 1 over its sum of exp(x - m).
    """
    dtype, with_entropy = local.dtype, local.shape[0] == 4
    chunks = _row_chunks(logits)
    converted = temperature != 1 or logits.dtype != dtype
    # Buffers for all chunks: fresh memory for each costs more than the arithmetic.
    work = _buffer(logits, chunks, valid, dtype) if converted or with_entropy else None
    sums = _buffer(logits, chunks, valid, dtype) if kept is None else kept
    for rows in chunks:
        own = slice(0, rows.stop - rows.start)
        x = None if work is None else work[own]
        weights = sums[own if kept is None else rows, :valid]
        source = logits[rows, :valid]
        if converted and x is not None:
            source = _scaled(source, temperature, x)
        top = torch.amax(source, 1, out=local[0, rows])
        torch.softmax(source, 1, out=weights)
        total = torch.reciprocal(torch.amax(weights, 1), out=local[1, rows])
        # A row of nothing but -inf must give a sum of 0, not NaN. Looking for one would make a GPU wait.
        empty = top == float("-inf")
        if empty.is_cuda or bool(empty.any()):
            weights.masked_fill_(empty.unsqueeze(1), 0.0)
            total.masked_fill_(empty, 0.0)
        if with_entropy and x is not None:
            shift = top.clamp(min=torch.finfo(dtype).min).unsqueeze(1)
            terms = torch.sub(source, shift, out=x).clamp_(min=LOGIT_FLOOR).mul_(weights)
            torch.mul(terms.sum(1), total, out=local[3, rows])


def _gradient_of_kept(
    weights: Tensor, of_shard: Tensor, target: tuple[Tensor, Tensor], logsumexp: Tensor, grad_logprobs: Tensor
) -> Tensor:
    """`softmax_gradient` of log-probs alone where the shard's softmax is known; written over it.

    ``of_shard``: the logsumexp of the shard, ``[N]``.
    """
    columns, inside = target
    weights.mul_((-grad_logprobs * (of_shard - logsumexp).exp()).unsqueeze(1))
    return _finish_gradient(weights, columns, inside, grad_logprobs, grad_logprobs == 0)


def softmax_gradient(
    x: Tensor,
    target: tuple[Tensor, Tensor],
    logsumexp: Tensor,
    grad_logprobs: Tensor,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Gradient of log-probs (and entropy) in the scaled logits ``x [N, W]`` of one tile, written over ``x``.

    With p = softmax(x): d logp/dx = onehot - p and dH/dx = -p (log p + H).

    Args:
        x: scaled logits of the tile; overwritten by the result.
        target: `target_columns` of this tile.
        logsumexp: ``[N]`` over the whole vocabulary.
        grad_logprobs: ``[N]`` upstream gradient. Rows whose upstream gradients are all zero get exactly zero, so
            whatever a masked row holds (NaN too) stays without effect.
        entropy: H ``[N]`` and its upstream gradient ``[N]``, or None.
    """
    columns, inside = target
    idle = grad_logprobs == 0
    x.sub_(logsumexp.unsqueeze(1))
    if entropy is None:
        x.exp_().mul_(-grad_logprobs.unsqueeze(1))
    else:
        value, grad_value = entropy
        idle = idle & (grad_value == 0)
        probabilities = x.exp()
        x.clamp_(min=LOGIT_FLOOR).add_(value.unsqueeze(1)).mul_(-grad_value.unsqueeze(1))
        x.sub_(grad_logprobs.unsqueeze(1)).mul_(probabilities)
    return _finish_gradient(x, columns, inside, grad_logprobs, idle)


def _finish_gradient(x: Tensor, columns: Tensor, inside: Tensor, grad_logprobs: Tensor, idle: Tensor) -> Tensor:
    """The targets' own part, and zeros in the rows that are ``idle``."""
    x.scatter_add_(1, columns, torch.where(inside, grad_logprobs, 0.0).unsqueeze(1))
    # Asking first would make a GPU wait; a CPU it spares a pass over memory.
    return x if not x.is_cuda and not idle.any() else x.masked_fill_(idle.unsqueeze(1), 0.0)


def _buffer(logits: Tensor, chunks: list[slice], width: int, dtype: torch.dtype) -> Tensor:
    return logits.new_empty(max((c.stop - c.start for c in chunks), default=0), width, dtype=dtype)


def _scaled(logits: Tensor, temperature: float, out: Tensor) -> Tensor:
    """Logits over the temperature in ``out`` and its dtype: 16-bit ones are widened first."""
    out.copy_(logits)
    return out if temperature == 1 else out.mul_(1.0 / temperature)


def _row_chunks(logits: Tensor) -> list[slice]:
    step = max(1, (_CUDA_CHUNK if logits.is_cuda else _CPU_CHUNK) // max(logits.shape[1], 1))
    return [slice(i, min(i + step, logits.shape[0])) for i in range(0, logits.shape[0], step)]


def check_temperature(temperature: float) -> None:
    """Refuse a temperature that is not positive and finite (greedy choice takes its log-probs at 1).

    Raises:
        ValueError: naming the temperature.
    """
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be positive and finite, not {temperature}")


def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    vocab_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of ``targets`` under vocabulary-sharded logits, differentiable on every shard.

    One all-gather of 3 floats per token (4 with entropy) in the forward, no collective in the backward. Logits in fp32
    keep a second tensor of their size for the backward pass.

    Args:
        logits: ``[N, V/TP]``, any floating dtype; this rank's columns of the padded vocabulary.
        targets: ``[N]`` int64 token ids, the same on every rank of ``group``.
        group: the tensor-parallel group; None when the vocabulary is not sharded.
        temperature: the logits are divided by it, for log-probs and entropy alike.
        with_entropy: also return the entropy.
        vocab_size: true vocabulary size; columns at or beyond it take no part.

    Returns:
        Log-probs ``[N]`` and entropy ``[N]`` (or None), fp32 (fp64 for fp64 logits), the same on every rank.

    Raises:
        ValueError: wrong shapes, a temperature that is not positive, shards smaller than the vocabulary, or (on CPU)
            a target outside ``[0, vocab_size)``.
    """
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(f"need logits [N, V/TP] and targets [N], got {list(logits.shape)} and {list(targets.shape)}")
    check_temperature(temperature)
    check_targets(targets, vocab_size)
    result: tuple[Tensor, Tensor | None] = _VocabParallelLogprobs.apply(
        logits, targets, group, float(temperature), with_entropy, vocab_size, torch.is_grad_enabled()
    )
    return result
