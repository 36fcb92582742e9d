"""Attention with a key-value cache, over packed tokens that extend sequences in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.inference.contexts.base_context import BaseInferenceContext

from mrlhf.megatron.cpu_products import attention

_WORTH_A_CUT = 1 << 20
"""Bytes of keys and values that a cut must save: one more call takes about 50 us on a CPU."""


class LayerCache(Protocol):
    """What the attention needs of a key-value cache: the tensors of one layer."""

    def layer(self, layer_number: int) -> torch.Tensor:
        """Keys and values of a layer (global, from 1), ``[2, slots, kv_heads / TP, length, head_dim]``, contiguous."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence in a pass.

    Attributes:
        start: place of its first token among the tokens of the pass.
        end: place after the last.
        slot: of the sequence.
        position: of the first token in its sequence; the tokens before it are in the cache already.
        wanted: whether the logits after its last token are.
    """

    start: int
    end: int
    slot: int
    position: int
    wanted: bool

    @property
    def length(self) -> int:
        """Tokens."""
        return self.end - self.start


class CacheContext(BaseInferenceContext):
    """One pass of the actor over packed tokens that extend sequences in a key-value cache.

    The ``T`` tokens of all sequences lie one after the other in the sequence dimension of a batch of one, so that no
    padding is computed and sequence parallelism can split them. The first ``steps`` tokens extend one sequence each;
    the others are segments: prompts, or pieces of them.

    Attributes:
        steps: tokens at the beginning that extend one sequence each.
        longest: tokens of the longest sequence among these.
    """

    def __init__(
        self,
        cache: LayerCache,
        slots: torch.Tensor,
        positions: torch.Tensor,
        *,
        max_sequence_length: int,
        lengths: Sequence[int],
        segments: Sequence[Segment],
        first_slot: int | None = None,
    ) -> None:
        """Describe the pass.

        Args:
            cache: the cache of this stage's layers.
            slots: ``[T]`` int64, the slot of each token's sequence.
            positions: ``[T]`` int64, its position there.
            max_sequence_length: length of the rotary table; positions are below it.
            lengths: one for each token at the beginning that is alone in its sequence: the tokens of the sequence, the
                new one included.
            segments: what the tokens after them are, in order, without gaps.
            first_slot: of the first ones, where they are in slots that follow each other (the cache is then read in
                place).
        """
        super().__init__(materialize_only_last_token_logits=False)
        self.cache = cache
        self.slots = slots
        self.positions = positions
        self.max_sequence_length = max_sequence_length
        self.lengths = lengths
        self.steps = len(lengths)
        self.segments = segments
        self.longest = max(lengths, default=0)
        self.first_slot = first_slot
        self.rotary: tuple[torch.Tensor, torch.Tensor] | None = None
        """Cosines and sines of the positions, kept by the first layer for the others."""
        self._rows: torch.Tensor | None = None
        self._reach: torch.Tensor | None = None
        self._reach_of_heads: torch.Tensor | None = None
        self._runs: list[tuple[int, int, int]] | None = None
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def is_static_batching(self) -> bool:
        """Always; Megatron's dynamic batching needs flash-attention."""
        return True

    def is_decode_only(self) -> bool:
        """Never; Megatron's own decode path is not used."""
        return False

    def rows(self, cache: torch.Tensor) -> torch.Tensor:
        """Where keys and values go in a layer's cache seen as ``[2 * slots * kv_heads * length, head_dim]``.

        ``[T * kv_heads * 2]`` int64; the values of all slots lie behind the keys of all slots.
        """
        if self._rows is None:
            slots, heads, length = cache.shape[1:4]
            first = self.slots * (heads * length) + self.positions
            head, value = (torch.arange(n, device=first.device) for n in (heads, 2))
            offsets = head[:, None] * length + value * (slots * heads * length)
            self._rows = (first[:, None, None] + offsets).flatten()
        return self._rows

    def reach(self, dtype: torch.dtype) -> torch.Tensor:
        """What is added to the scores of the first ``steps`` tokens: ``[steps, 1, 1, longest]``, 0 or -inf."""
        if self._reach is None:
            places = torch.arange(self.longest, device=self.positions.device)
            hidden = places[None, :] > self.positions[: self.steps, None]
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._reach = zeros.masked_fill_(hidden, float("-inf"))[:, None, None, :]
        return self._reach

    def reach_of_heads(self, dtype: torch.dtype, heads: int) -> torch.Tensor:
        """`reach` for every key head by itself: ``[steps * heads, 1, longest]``."""
        if self._reach_of_heads is None:
            reach = self.reach(dtype).view(self.steps, 1, self.longest)
            self._reach_of_heads = reach.repeat_interleave(heads, 0)
        return self._reach_of_heads

    def runs(self, bytes_per_token: int) -> list[tuple[int, int, int]]:
        """The first ``steps`` tokens cut by `runs_alike`, by the bytes of keys and values (the same in all layers)."""
        if self._runs is None:
            self._runs = runs_alike(self.lengths, _WORTH_A_CUT // bytes_per_token)
        return self._runs

    def ends(self, select: torch.Tensor) -> CacheContext:
        """The last tokens of the segments that are ``wanted``, each a step, once all others are in the cache.

        Args:
            select: ``[n]`` int64 in rising order, the places of the first ``steps`` tokens and of these.

        Raises:
            ValueError: the segments do not say what ``select`` says.
        """
        ends = [segment for segment in self.segments if segment.wanted]
        if self.steps + len(ends) != select.numel():
            raise ValueError(f"{select.numel()} logits are wanted after {self.steps} steps and {len(ends)} segments")
        slots = [segment.slot for segment in ends]
        places = select[self.steps :]
        return CacheContext(
            self.cache,
            self.slots[places],
            self.positions[places],
            max_sequence_length=self.max_sequence_length,
            lengths=[segment.position + segment.length for segment in ends],
            segments=(),
            first_slot=slots[0] if slots and slots == list(range(slots[0], slots[0] + len(slots))) else None,
        )

    def mask(self, segment: Segment) -> torch.Tensor:
        """Which keys a segment in the middle of its sequence sees: bool ``[length, position + length]``."""
        key = (segment.position, segment.length)
        if key not in self._masks:
            total = segment.position + segment.length
            ones = torch.ones(segment.length, total, dtype=torch.bool, device=self.positions.device)
            self._masks[key] = ones.tril_(segment.position)
        return self._masks[key]


def runs_alike(lengths: Sequence[int], least: int) -> list[tuple[int, int, int]]:
    """Cut sequences into runs, so that each run is as long as its own longest and not as the longest of all.

    Time and again the run that saves most is cut out, as long as that is worth the cuts.

    Args:
        lengths: of the sequences, in order.
        least: tokens that a cut must save.

    Returns:
        ``(first, last + 1, longest)`` of every run, in order.
    """
    count, longest = len(lengths), max(lengths, default=0)
    if not count:
        return []
    saved, start, end = _largest_gap(lengths, longest)
    cuts = (start > 0) + (end < count)
    if saved < max(cuts * least, 1):
        return [(0, count, longest)]
    runs = []
    for first, behind in ((0, start), (start, end), (end, count)):
        for begin, stop, size in runs_alike(lengths[first:behind], least):
            runs.append((first + begin, first + stop, size))
    return runs


def _largest_gap(lengths: Sequence[int], longest: int) -> tuple[int, int, int]:
    """The most tokens that a run of its own saves, its first sequence and the one behind its last.

    This is the largest rectangle in the histogram of what the sequences are shorter than the longest.
    """
    best, rising = (0, 0, 0), list[tuple[int, int]]()
    for place, length in enumerate((*lengths, longest)):
        start, missing = place, longest - length
        while rising and rising[-1][1] >= missing:
            start, height = rising.pop()
            best = max(best, ((place - start) * height, start, place))
        rising.append((start, missing))
    return best


def cached_attention(
    query: torch.Tensor,
    entries: torch.Tensor,
    context: CacheContext,
    layer_number: int,
    scale: float | None,
    select: torch.Tensor | None = None,
) -> torch.Tensor:
    """Put keys and values into the cache and attend to what each token's sequence has there.

    Args:
        query: ``[T, kv_heads / TP, queries of a key head, head_dim]`` after the rotary embedding.
        entries: ``[T, kv_heads / TP, 2, head_dim]``, the keys after the rotary embedding, and the values.
        context: the pass.
        layer_number: global, from 1.
        scale: of the scores; None for ``head_dim ** -0.5``.
        select: ``[n]`` places of the tokens that attend, as for `CacheContext.ends`; None for all.

    Returns:
        ``[T, heads / TP * head_dim]``, or ``[n, heads / TP * head_dim]``.
    """
    cache = context.cache.layer(layer_number)
    size = cache.size(-1)
    cache.view(-1, size).index_copy_(0, context.rows(cache), entries.reshape(-1, size).to(cache.dtype))
    parts = []
    if context.steps:
        parts.append(_step(query[: context.steps], cache, context, scale))
    if select is None:
        parts += [_prompts(query, entries, run, cache, context, scale) for run in _prompts_alike(context.segments)]
    elif (ends := context.ends(select)).steps:
        parts.append(_step(query[select[context.steps :]], cache, ends, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _step(query: torch.Tensor, cache: torch.Tensor, context: CacheContext, scale: float | None) -> torch.Tensor:
    """One token per slot against its cached keys.

    The query heads of a group stand as query positions of their one key head, so that neither keys nor values are
    repeated.
    """
    first, count = context.first_slot, context.steps
    if first is not None and cache.dtype is torch.float32 and cache.device.type == "cpu":
        return _products(query, cache, first, context, scale)
    slots: Any = context.slots[:count] if first is None else slice(first, first + count)
    k, v = cache[0][slots, :, : context.longest], cache[1][slots, :, : context.longest]
    out = attention(query.to(k.dtype), k, v, mask=context.reach(k.dtype), scale=scale)
    return out.reshape(count, -1).to(query.dtype)


def _products(
    query: torch.Tensor, cache: torch.Tensor, first: int, context: CacheContext, scale: float | None
) -> torch.Tensor:
    """The same as two batched products a run: on a CPU faster than the fused kernel, which is made for many queries."""
    heads, size = cache.size(2), cache.size(-1)
    slots = cache.view(2, -1, cache.size(3), size)[:, first * heads : (first + context.steps) * heads]
    q = query.to(cache.dtype).reshape(slots.size(1), -1, size)
    reach = context.reach_of_heads(cache.dtype, heads)
    scale = size**-0.5 if scale is None else scale
    parts = []
    for start, end, longest in context.runs(2 * heads * size * cache.element_size()):
        run = slice(start * heads, end * heads)
        k, v = slots[:, run, :longest].unbind(0)
        scores = torch.baddbmm(reach[run, :, :longest], q[run], k.transpose(1, 2), alpha=scale)
        parts.append(torch.bmm(torch.softmax(scores, -1), v))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.view(context.steps, -1).to(query.dtype)


def _prompts_alike(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Whole prompts of one length that follow each other are one call; every other segment is alone."""
    runs: list[list[Segment]] = []
    for segment in segments:
        last = runs[-1][-1] if runs else None
        alike = last is not None and last.position == segment.position == 0 and last.length == segment.length
        if alike:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return runs


def _prompts(
    query: torch.Tensor,
    entries: torch.Tensor,
    run: list[Segment],
    cache: torch.Tensor,
    context: CacheContext,
    scale: float | None,
) -> torch.Tensor:
    """Causal attention inside every segment of ``run``, and to what its sequence has in the cache before it."""
    start, count, length = run[0].start, len(run), run[0].length
    q = query[start : start + count * length].unflatten(0, (count, length)).flatten(2, 3).transpose(1, 2)
    if run[0].position == 0:
        new = entries[start : start + count * length].unflatten(0, (count, length)).transpose(1, 2)
        k, v = new.unbind(3)
        out = attention(q, k, v, scale=scale)
    else:
        slot, end = run[0].slot, run[0].position + length
        k, v = cache[:, slot : slot + 1, :, :end].to(q.dtype)
        out = attention(q, k, v, mask=context.mask(run[0]), scale=scale)
    return out.transpose(1, 2).reshape(count * length, -1)
