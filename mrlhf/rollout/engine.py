"""Generation on the actor's own sharded weights.

The interface is narrow on purpose: requests in, generations out, in the same order. Requests run in batches of
``slots`` rows; prompts are prefilled packed, without padding; rows that have ended leave the decoding steps. All ranks
of a model-parallel replica hold the same requests and see the same tokens, so they stay in step; replicas do not
communicate, so one that ends early waits for nobody here, unless they share experts: then it follows the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mrlhf.megatron.attention import CacheContext
from mrlhf.megatron.decode import follow_others, layer_numbers, packed_forward
from mrlhf.megatron.fp8 import read_weights_again, token_multiple
from mrlhf.megatron.joined import filler_width
from mrlhf.rollout.kv_cache import KVCache
from mrlhf.rollout.sampling import SamplingParams, sample_tokens, uniform_for

PREFILL_TOKENS = 8192
"""Prompt tokens that go through the model at once; bounds the memory of a prefill."""


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to continue.

    Attributes:
        sample_id: decides, with seed and step, the random numbers of this sequence.
        prompt: its token ids, at least one.
        max_new_tokens: the limit of the response, at least 1.
    """

    sample_id: int
    prompt: Sequence[int]
    max_new_tokens: int


@dataclass(frozen=True)
class Generation:
    """A response: its tokens (with the stop id that ended it, if one did) and whether the length limit cut it off."""

    sample_id: int
    tokens: list[int]
    truncated: bool


class RolloutEngine:
    """Continues prompts with a (sharded) language model."""

    def __init__(
        self,
        chunks: Sequence[Any],
        groups: Any,
        *,
        vocab_size: int,
        kv_heads: int,
        head_dim: int,
        max_length: int,
        slots: int,
    ) -> None:
        """Keep references; nothing is allocated before `generate`.

        Args:
            chunks: this rank's stages, not wrapped.
            groups: object with the process groups ``tp`` and ``pp``.
            vocab_size: true vocabulary; ids beyond it are never sampled.
            kv_heads: key-value heads of the whole model.
            head_dim: size of one head.
            max_length: longest sequence the model takes.
            slots: rows generated at once.
        """
        self.chunks = list(chunks)
        self.groups = groups
        self.vocab_size = vocab_size
        self.kv_heads = max(kv_heads // groups.tp.size(), 1)
        self.head_dim = head_dim
        self.max_length = max_length
        self.slots = slots
        self.device = next(chunks[0].parameters()).device
        # Sequence parallelism divides the tokens of a pass over the tensor ranks, and FP8 takes them by 16 or 32.
        tensor = groups.tp.size() if chunks[0].config.sequence_parallel else 1
        self.multiple = tensor * token_multiple(chunks[0])

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParams,
        *,
        stop_ids: Sequence[int],
        seed: int,
        step: int,
    ) -> list[Generation]:
        """Continue every request until a stop id or its limit.

        Args:
            requests: the same on every rank of the replica.
            sampling: temperature, top-k, top-p.
            stop_ids: every id that ends a response; it belongs to the response.
            seed: of the run.
            step: of the rollout; with ``seed``, ``sample_id`` and the position it decides each random number.

        Returns:
            One `Generation` for each request, in the order given.

        Raises:
            ValueError: an empty prompt, a limit below 1, or prompt and limit together over ``max_length``.
        """
        for request in requests:
            self._check(request)
        # Rows of like length together: a batch ends with its longest row.
        order = sorted(range(len(requests)), key=lambda i: (-len(requests[i].prompt), i))
        done: dict[int, Generation] = {}
        read_weights_again(self.chunks)
        with _evaluation(self.chunks), torch.no_grad():
            for start in range(0, len(order), self.slots):
                places = order[start : start + self.slots]
                batch = SlotBatch([requests[i] for i in places], frozenset(stop_ids), self.device)
                self._run(batch, sampling, seed, step)
                done.update(zip(places, batch.results(), strict=True))
            nothing = self._cache(0, filler_width(self.chunks[0], self.groups))
            follow_others(self.chunks, nothing, nothing.scratch, groups=self.groups)
        return [done[i] for i in range(len(requests))]

    def _check(self, request: GenerationRequest) -> None:
        if not request.prompt:
            raise ValueError(f"sample {request.sample_id}: the prompt is empty")
        if request.max_new_tokens < 1:
            raise ValueError(f"sample {request.sample_id}: max_new_tokens is {request.max_new_tokens}, expected >= 1")
        total = len(request.prompt) + request.max_new_tokens
        if total > self.max_length:
            raise ValueError(
                f"sample {request.sample_id}: prompt {len(request.prompt)} + max_new_tokens {request.max_new_tokens} "
                f"= {total} exceeds the model's length {self.max_length}"
            )

    def _run(self, batch: SlotBatch, sampling: SamplingParams, seed: int, step: int) -> None:
        cache = self.new_cache(batch)
        for rows in batch.prefill_groups(PREFILL_TOKENS):
            logits = self.prefill(cache, batch, rows)
            batch.append(rows, self.choose(logits, batch, rows, sampling, seed, step))
        while rows := batch.active():
            logits = self.decode(cache, batch, rows)
            batch.append(rows, self.choose(logits, batch, rows, sampling, seed, step))

    def new_cache(self, batch: SlotBatch) -> KVCache:
        """Room for the keys and values of a batch."""
        # The filler takes positions up to the multiple less 1.
        return self._cache(len(batch.requests), max(batch.length, self.multiple))

    def _cache(self, slots: int, length: int) -> KVCache:
        return KVCache(
            layer_numbers(self.chunks),
            slots,
            length,
            self.kv_heads,
            self.head_dim,
            dtype=self.chunks[0].config.params_dtype,
            device=self.device,
        )

    def prefill(self, cache: KVCache, batch: SlotBatch, rows: list[int]) -> torch.Tensor | None:
        """Put the prompts of ``rows`` into the cache; the logits after each, on the last stage."""
        tokens: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        segments: list[tuple[int, int]] = []
        for row in rows:
            prompt = batch.requests[row].prompt
            segments.append((len(tokens), len(tokens) + len(prompt)))
            tokens += prompt
            slots += [row] * len(prompt)
            positions += range(len(prompt))
        ends = [end - 1 for _, end in segments]
        filler = self._filler(len(tokens))
        if filler:
            segments.append((len(tokens), len(tokens) + filler))
            tokens += [0] * filler
            slots += [cache.scratch] * filler
            positions += range(filler)
        context = CacheContext(
            cache,
            self._ids(slots),
            self._ids(positions),
            max_sequence_length=max(batch.length, self.multiple),
            segments=segments,
        )
        return packed_forward(self.chunks, self._ids(tokens), context, self._ids(ends), groups=self.groups)

    def decode(self, cache: KVCache, batch: SlotBatch, rows: list[int]) -> torch.Tensor | None:
        """Put the last token of each of ``rows`` into the cache; the logits after each, on the last stage."""
        filler = self._filler(len(rows))
        tokens = [batch.responses[row][-1] for row in rows] + [0] * filler
        positions = [batch.written(row) - 1 for row in rows] + [0] * filler
        whole = len(rows) == len(batch.requests)
        context = CacheContext(
            cache,
            self._ids(rows + [cache.scratch] * filler),
            self._ids(positions),
            max_sequence_length=batch.length,
            segments=None,
            rows=slice(0, len(rows)) if whole else None,
            filler=filler,
        )
        return packed_forward(self.chunks, self._ids(tokens), context, self._ids(range(len(rows))), groups=self.groups)

    def choose(
        self,
        logits: torch.Tensor | None,
        batch: SlotBatch,
        rows: list[int],
        sampling: SamplingParams,
        seed: int,
        step: int,
    ) -> list[int]:
        """Sample on the last stage; the ids, and nothing else, go back to the others."""
        pp = self.groups.pp
        if logits is not None:
            samples = self._ids([batch.requests[row].sample_id for row in rows])
            uniforms = uniform_for(seed, step, samples, self._ids([batch.written(row) for row in rows]))
            ids = sample_tokens(logits, uniforms, sampling, group=self.groups.tp, vocab_size=self.vocab_size)
        else:
            ids = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        if pp.size() > 1:
            ids = ids.contiguous()
            dist.broadcast(ids, src=dist.get_process_group_ranks(pp)[-1], group=pp)
        chosen: list[int] = ids.tolist()
        return chosen

    def _filler(self, count: int) -> int:
        """Tokens that fill ``count`` up to the multiple."""
        return -count % self.multiple

    def _ids(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)


class SlotBatch:
    """The rows of one static batch and what has been written for them."""

    def __init__(self, requests: list[GenerationRequest], stop_ids: frozenset[int], device: torch.device) -> None:
        self.requests = requests
        self.stop_ids = stop_ids
        self.device = device
        self.responses: list[list[int]] = [[] for _ in requests]
        self.length = max(len(r.prompt) + r.max_new_tokens for r in requests)

    def written(self, row: int) -> int:
        """Tokens of the row so far: also the position of its next token."""
        return len(self.requests[row].prompt) + len(self.responses[row])

    def stopped(self, row: int) -> bool:
        """Whether a row has ended."""
        return bool(self.responses[row]) and self.responses[row][-1] in self.stop_ids

    def active(self) -> list[int]:
        """Rows that go on."""
        return [
            row
            for row, request in enumerate(self.requests)
            if not self.stopped(row) and len(self.responses[row]) < request.max_new_tokens
        ]

    def append(self, rows: list[int], tokens: list[int]) -> None:
        """Add one token to each of the rows."""
        for row, token in zip(rows, tokens, strict=True):
            self.responses[row].append(token)

    def prefill_groups(self, limit: int) -> Iterator[list[int]]:
        """Rows whose prompts fit into ``limit`` tokens together (one row at least)."""
        group: list[int] = []
        tokens = 0
        for row, request in enumerate(self.requests):
            if group and tokens + len(request.prompt) > limit:
                yield group
                group, tokens = [], 0
            group.append(row)
            tokens += len(request.prompt)
        yield group

    def results(self) -> list[Generation]:
        """What was generated, row by row."""
        return [
            Generation(request.sample_id, self.responses[row], truncated=not self.stopped(row))
            for row, request in enumerate(self.requests)
        ]


@contextmanager
def _evaluation(chunks: Sequence[Any]) -> Iterator[None]:
    modes = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, mode in zip(chunks, modes, strict=True):
            chunk.train(mode)
