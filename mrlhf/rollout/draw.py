"""Draws the tokens of a rollout: random numbers by sequence and position, repetition penalty, log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.parallel.vocab import shard_columns, vocab_parallel_logprobs
from mrlhf.rollout.sampling import SamplingParams, sample_tokens, sample_with_logprobs
from mrlhf.rollout.scheduler import Row
from mrlhf.rollout.uniforms import uniform_for


class Drawing:
    """Chooses the next tokens of sequences on the last stage."""

    def __init__(
        self,
        sampling: SamplingParams,
        sample_ids: Sequence[int],
        *,
        group: dist.ProcessGroup,
        vocab_size: int,
        seed: int,
        step: int,
        with_logprobs: bool = False,
    ) -> None:
        """Keep the settings.

        Args:
            sampling: how tokens are drawn.
            sample_ids: of all sequences.
            group: the tensor-parallel group.
            vocab_size: true vocabulary.
            seed: of the run.
            step: of the rollout.
            with_logprobs: also keep the log-probs of what is drawn.
        """
        self.sampling, self.sample_ids = sampling, list(sample_ids)
        self.group, self.vocab_size = group, vocab_size
        self.seed, self.step = seed, step
        self.with_logprobs = with_logprobs
        self._uniforms: dict[int, list[float]] = {}
        self._kept: list[tuple[list[int], Tensor]] = []

    def __call__(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """The next token of each row ``[n]`` int64 from logits ``[n, padded vocabulary / TP]``."""
        sampling = self.sampling
        options: dict[str, Any] = {"group": self.group, "vocab_size": self.vocab_size}
        if sampling.is_greedy:
            uniforms = torch.zeros(len(rows), dtype=torch.float64, device=logits.device)
        else:
            uniforms = self._next_uniforms(rows, logits.device)
        penalized = self._penalized(logits, rows) if sampling.repetition_penalty != 1 else logits
        if not self.with_logprobs:
            return sample_tokens(penalized, uniforms, sampling, **options)
        if penalized is logits:
            tokens, found = sample_with_logprobs(logits, uniforms, sampling, **options)
        else:
            tokens = sample_tokens(penalized, uniforms, sampling, **options)
            temperature = sampling.temperature or 1.0
            found, _ = vocab_parallel_logprobs(logits, tokens, temperature=temperature, **options)
        self._kept.append(([row.index for row in rows], found))
        return tokens

    def logprobs(self, rows: Sequence[Row], out: Tensor) -> Tensor:
        """Of all tokens of ``rows``, one row after the other, into ``out`` fp32."""
        starts, start = {}, 0
        for row in rows:
            starts[row.index] = start
            start += len(row.response)
        for indices, values in self._kept:
            places = torch.tensor([starts[i] for i in indices], dtype=torch.int64, device=out.device)
            out[places] = values.to(out.dtype)
            for i in indices:
                starts[i] += 1
        return out

    def _next_uniforms(self, rows: Sequence[Row], device: torch.device) -> Tensor:
        fresh = [row for row in rows if row.index not in self._uniforms]
        if fresh:
            # All that a sequence will ever need, in one call.
            samples = [torch.full((row.limit,), self.sample_ids[row.index]) for row in fresh]
            positions = [torch.arange(row.limit) + len(row.prompt) for row in fresh]
            numbers = uniform_for(self.seed, self.step, torch.cat(samples), torch.cat(positions))
            for row, part in zip(fresh, numbers.split([row.limit for row in fresh]), strict=True):
                self._uniforms[row.index] = part.tolist()
        return torch.tensor(
            [self._uniforms[row.index][len(row.response)] for row in rows], dtype=torch.float64, device=device
        )

    def _penalized(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        start, valid = shard_columns(logits.shape[1], self.group, self.vocab_size)
        seen = [{t - start for t in (*row.prompt, *row.response) if start <= t < start + valid} for row in rows]
        return penalize_repetition(logits, seen, self.sampling.repetition_penalty)


def penalize_repetition(logits: Tensor, seen: Sequence[set[int]], penalty: float) -> Tensor:
    """Make tokens that a row has already less likely (Keskar et al. 2019, arXiv:1909.05858, as in transformers).

    Args:
        logits: ``[N, columns]``.
        seen: for each row the columns of tokens that are in its prompt or response.
        penalty: a positive logit is divided by it, a negative one multiplied.

    Returns:
        New logits, fp32.
    """
    out = logits.float().clone()
    rows = torch.tensor([i for i, columns in enumerate(seen) for _ in columns], dtype=torch.int64, device=out.device)
    columns = torch.tensor([c for found in seen for c in sorted(found)], dtype=torch.int64, device=out.device)
    values = out[rows, columns]
    out[rows, columns] = torch.where(values < 0, values * penalty, values / penalty)
    return out
