"""Generation on the actor's own sharded weights.

The interface is narrow on purpose: requests in, generations out, in the same order. Between the two, sequences share a
fixed number of slots of a key-value cache (`mrlhf.rollout.scheduler`): each pass takes the newest token of every
sequence in its slots and, packed behind them without padding, the prompts of those that have just got one. Under
pipeline parallelism there are as many groups of slots as stages, whose passes follow each other through the pipeline.

All ranks of a model-parallel replica hold the same requests and see the same tokens, so they stay in step; replicas do
not communicate, so one that ends early waits for nobody here, unless they share experts: then it follows the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mrlhf.megatron.decode import Pipeline, filler_tokens_of_round, layer_numbers
from mrlhf.megatron.fp8 import read_weights_again, token_multiple
from mrlhf.parallel.collectives import largest
from mrlhf.rollout.draw import Drawing
from mrlhf.rollout.kv_cache import KVCache
from mrlhf.rollout.rounds import Rounds
from mrlhf.rollout.sampling import SamplingParams
from mrlhf.rollout.scheduler import Ends, Row, Scheduler

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
    """A response.

    Attributes:
        sample_id: of its request.
        tokens: with those that ended it, if any did: a stop id, or the last token of a stop string.
        truncated: whether the length limit cut it off.
        logprobs: of its tokens at the temperature of sampling, where they were asked for: under the whole distribution,
            without top-k, top-p and repetition penalty.
    """

    sample_id: int
    tokens: list[int]
    truncated: bool
    logprobs: list[float] | None = None


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
        cache_bytes: int | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        """Keep references; nothing is allocated before `generate`.

        Args:
            chunks: this rank's stages, not wrapped.
            groups: object with the process groups ``tp`` and ``pp``.
            vocab_size: true vocabulary; ids beyond it are never sampled.
            kv_heads: key-value heads of the whole model.
            head_dim: size of one head.
            max_length: longest sequence the model takes.
            slots: most rows generated at once.
            cache_bytes: most memory of a rank for keys and values, which may allow fewer rows; None for no limit.
            prefill_tokens: most prompt tokens in one pass; longer prompts are cut.
        """
        self.chunks = list(chunks)
        self.groups = groups
        self.vocab_size = vocab_size
        self.kv_heads = max(kv_heads // groups.tp.size(), 1)
        self.head_dim = head_dim
        self.max_length = max_length
        self.slots = slots
        self.cache_bytes = cache_bytes
        self.prefill_tokens = prefill_tokens
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
        complete: Ends | None = None,
        with_logprobs: bool = False,
    ) -> list[Generation]:
        """Continue every request until a stop id or its limit.

        Args:
            requests: the same on every rank of the replica.
            sampling: temperature, top-k, top-p, repetition penalty.
            stop_ids: every id that ends a response; it belongs to the response.
            seed: of the run.
            step: of the rollout; with ``seed``, ``sample_id`` and the position it decides each random number.
            complete: told the response after every token: whether it ends there for another reason, a stop string
                (`mrlhf.rollout.stop_strings`). The answer must be the same on every rank.
            with_logprobs: also the log-prob of every token.

        Returns:
            One `Generation` for each request, in the order given.

        Raises:
            ValueError: an empty prompt, a limit below 1, prompt and limit together over ``max_length``, or a limit of
                the cache's memory that does not hold one row of each pipeline stage.
        """
        for request in requests:
            self._check(request)
        read_weights_again(self.chunks)
        draw = Drawing(
            sampling,
            [r.sample_id for r in requests],
            group=self.groups.tp,
            vocab_size=self.vocab_size,
            seed=seed,
            step=step,
            with_logprobs=with_logprobs,
        )
        with _evaluation(self.chunks), torch.no_grad():
            rounds = self.rounds(requests, draw, _ends(frozenset(stop_ids), complete))
            with rounds.pipeline.without_autograd():
                rounds.run()
                logprobs = rounds.logprobs() if with_logprobs else [None] * len(requests)
        return [
            Generation(request.sample_id, row.response, truncated=not row.stopped, logprobs=found)
            for request, row, found in zip(requests, rounds.rows, logprobs, strict=True)
        ]

    def rounds(self, requests: Sequence[GenerationRequest], draw: Drawing, ends: Ends) -> Rounds:
        """Slots and a schedule for the requests; nothing is computed yet.

        Args:
            requests: as for `generate`.
            draw: chooses tokens.
            ends: told a response after every token: whether it is complete.
        """
        rows = [Row(i, tuple(r.prompt), r.max_new_tokens) for i, r in enumerate(requests)]
        length = max((len(r.prompt) + r.max_new_tokens for r in requests), default=1)
        # Passes without meaning take positions up to the multiple less 1.
        filler = max(self.multiple, filler_tokens_of_round(self.chunks, self.groups))
        pipeline = Pipeline(self.chunks, self.groups)
        numbers, dtype = layer_numbers(self.chunks), pipeline.cache_dtype
        slots = self._slots(len(rows), max(length, filler), len(numbers) * dtype.itemsize)
        shared = filler_tokens_of_round(self.chunks, self.groups) > 0
        pp = int(self.groups.pp.size())
        cache = KVCache(
            numbers, slots, max(length, filler), self.kv_heads, self.head_dim, dtype=dtype, device=self.device
        )
        scheduler = Scheduler(
            rows,
            # Replicas that share experts make their passes in one order, so that they have as many groups.
            groups=pp if shared else max(min(pp, slots), 1),
            slots=slots,
            prefill_tokens=self.prefill_tokens,
            ends=ends,
        )
        return Rounds(pipeline, cache, scheduler, rows, draw, self.multiple, self.device)

    def _slots(self, rows: int, length: int, bytes_per_number: int) -> int:
        """Rows at once: as many as there are, as many as are wanted, as many as there is memory for."""
        wanted = min(self.slots, rows)
        if self.cache_bytes is None or not wanted:
            return wanted
        # Stages may have different numbers of layers, but must have the same slots.
        each = largest(2 * bytes_per_number * length * self.kv_heads * self.head_dim, self.groups.pp)
        fitting = self.cache_bytes // each - 1
        least = min(wanted, int(self.groups.pp.size()))
        if fitting < least:
            raise ValueError(
                f"{self.cache_bytes} bytes for keys and values hold {max(fitting, 0)} rows of {length} tokens "
                f"({each} bytes each, one more as scratch), at least {least} are needed: raise the limit "
                "(rollout.kv_cache_memory), or shorten prompts or responses"
            )
        return min(wanted, fitting)

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


def _ends(stop_ids: frozenset[int], complete: Ends | None) -> Ends:
    if complete is None:
        return lambda response: response[-1] in stop_ids
    return lambda response: response[-1] in stop_ids or complete(response)


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
