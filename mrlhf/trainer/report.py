"""What an iteration reports: numbers for the log, rows for the sample table."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from mrlhf.data.tokenizer import Tokenizer
from mrlhf.megatron.optimizer import peak_memory_bytes
from mrlhf.parallel.collectives import all_reduce_metrics
from mrlhf.parallel.heartbeat import Heartbeat
from mrlhf.progress import Display
from mrlhf.rl import kl_estimate, masked_mean, masked_moments, masked_sum, sampler_gap
from mrlhf.trainer.experience import logprobs_before_updates
from mrlhf.trainer.updates import Step
from mrlhf.types import Metric, RolloutBatch

SAMPLES = 8
PHASE_PREFIX = "phase: "
"""Of the names under which profiler traces show the phases."""


class PhaseTimer:
    """Seconds spent in each phase of an iteration."""

    def __init__(self, display: Display, heartbeat: Heartbeat | None = None) -> None:
        """Begin the iteration.

        Args:
            display: shows the phases.
            heartbeat: of this rank, so that others find out where it is.
        """
        self._display, self._heartbeat = display, heartbeat
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] = []
        """Name, begin and end of each part, in seconds since the epoch."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show ``name`` and time what runs inside. Every phase ends in a collective, so the device is idle then."""
        self._display.phase(name)
        if self._heartbeat is not None:
            self._heartbeat.phase(name)
        start = time.perf_counter()
        with torch.profiler.record_function(PHASE_PREFIX + name):
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        self._seconds[name] = time.perf_counter() - start

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add up the time of something within a phase that is done several times, or by some ranks only."""
        start = time.time()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        end = time.time()
        self.spans.append((name, start, end))
        self._seconds[name] = self._seconds.get(name, 0.0) + end - start

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, and of the whole iteration so far."""
        return {**self._seconds, "iteration": time.perf_counter() - self._start}


def iteration_metrics(
    batch: RolloutBatch,
    reduced: dict[str, float],
    steps: list[Step],
    measured: Mapping[str, float],
    *,
    passes: float,
    epoch: int,
) -> dict[str, float]:
    """Every number of an iteration under its name in the log, the same on every rank.

    Args:
        batch: rows of all ranks with all fields.
        reduced: metrics of the losses after the reduction over ranks.
        steps: in order.
        measured: of `worst_of_ranks`.
        passes: how often each row was trained on.
        epoch: passes over the prompts so far.
    """
    sources = {name: value for name, value in reduced.items() if name.startswith("score/")}
    metrics = {**_batch_metrics(batch), **sources, **_loss_metrics(reduced, steps)}
    tokens = float(batch.lengths.sum())
    responses = float(batch.response_lengths.sum())
    rates = {
        "rollout_tokens_per_second": responses / measured["time_rollout"],
        "inference_tokens_per_second": tokens / measured["time_inference"],
        "train_tokens_per_second": tokens * passes / measured["time_train"],
        "tokens_per_second": tokens / measured["time_iteration"],
    }
    return {**metrics, **measured, **rates, "epoch": float(epoch)}


def worst_of_ranks(seconds: Mapping[str, float]) -> dict[str, float]:
    """``time_...`` and memory: ranks disagree, so the slowest and the largest count; all ranks of the job call this.

    Args:
        seconds: by phase.
    """
    worst = {f"time_{name}": Metric("max", value, 1.0) for name, value in seconds.items()}
    worst["peak_memory_gib"] = Metric("max", peak_memory_bytes() / 2**30, 1.0)
    return {name: metric.result() for name, metric in all_reduce_metrics(worst).items()}


def _batch_metrics(batch: RolloutBatch) -> dict[str, float]:
    assert batch.raw_scores is not None
    assert batch.rewards is not None
    assert batch.response_mask is not None
    assert batch.gae_mask is not None
    mask, scores = batch.response_mask, batch.raw_scores.double()
    lengths = batch.response_lengths.double()
    return {
        "score_mean": float(scores.mean()),
        "score_std": float(scores.std(correction=0)),
        "score_min": float(scores.min()),
        "score_max": float(scores.max()),
        "reward_mean": float(masked_sum(batch.rewards, batch.gae_mask, dim=1).mean()),
        **_kl_metrics(batch, mask),
        **_value_metrics(batch, mask),
        **_sampler_gap(batch, mask),
        "response_length_mean": float(lengths.mean()),
        "response_length_min": float(lengths.min()),
        "response_length_max": float(lengths.max()),
        "truncated_fraction": float(batch.truncated.double().mean()),
    }


def _kl_metrics(batch: RolloutBatch, mask: torch.Tensor) -> dict[str, float]:
    logprobs = logprobs_before_updates(batch)
    if logprobs is None or batch.ref_logprobs is None:
        return {}
    k1, k3 = (kl_estimate(logprobs, batch.ref_logprobs, kind) for kind in ("k1", "k3"))
    return {
        "kl_k1": float(masked_mean(k1, mask)),
        "kl_k3": float(masked_mean(k3, mask)),
        "kl_sequence": float(masked_sum(k1, mask, dim=1).mean()),
    }


def _sampler_gap(batch: RolloutBatch, mask: torch.Tensor) -> dict[str, float]:
    if batch.rollout_logprobs is None or batch.old_logprobs is None:
        return {}
    gap = sampler_gap(batch.old_logprobs, batch.rollout_logprobs, mask)
    return {name: metric.result() for name, metric in gap.items()}


def _value_metrics(batch: RolloutBatch, mask: torch.Tensor) -> dict[str, float]:
    if batch.values is None or batch.returns is None:
        return {}
    return {
        "explained_variance": explained_variance(batch.values, batch.returns, mask),
        "value_mean": float(masked_mean(batch.values, mask)),
    }


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """``1 - Var(R - V) / Var(R)``: 1 is perfect, 0 no better than a constant; NaN where returns do not vary."""
    _, _, residual = masked_moments(returns - values, mask)
    _, _, total = masked_moments(returns, mask)
    return 1.0 - float(residual) / float(total) if float(total) > 0 else float("nan")


def _loss_metrics(reduced: dict[str, float], steps: list[Step]) -> dict[str, float]:
    names = {
        "policy_loss": "policy/policy_loss",
        "actor_loss": "policy/loss",
        "value_loss": "value/loss",
        "clip_fraction": "policy/clip_fraction",
        "dual_clip_fraction": "policy/dual_clip_fraction",
        "importance_weight_mean": "policy/importance_weight_mean",
        # Where log-probs before the updates were not computed; else they are measured on the batch.
        "rollout_logprob_gap_mean": "policy/rollout_logprob_gap_mean",
        "rollout_logprob_gap_max": "policy/rollout_logprob_gap_max",
        "rollout_logprob_gap_share": "policy/rollout_logprob_gap_share",
        "value_clip_fraction": "value/value_clip_fraction",
        "approx_kl_k1": "policy/approx_kl_k1",
        "approx_kl": "policy/approx_kl_k3",
        "ratio_mean": "policy/ratio_mean",
        "ratio_min": "policy/ratio_min",
        "ratio_max": "policy/ratio_max",
        "ratio_error_before_update": "ratio_error_before_update",
        "entropy": "policy/entropy",
        "kl_loss": "policy/kl_loss",
        "value_error": "value/value_error",
        "load_balancing_loss": "policy/load_balancing_loss",
        "ptx_loss": "ptx/loss",
    }
    metrics = {ours: reduced[theirs] for ours, theirs in names.items() if theirs in reduced}
    for role in ("actor", "critic", "ptx"):
        made = [update for step in steps if (update := getattr(step, role)) is not None]
        if made:
            norms = [update.grad_norm for update in made if update.updated]
            metrics[f"{role}_grad_norm"] = sum(norms) / max(len(norms), 1)
        if made or role == "actor":
            metrics[f"{role}_updates"] = float(sum(update.updated for update in made))
    # Actor and critic skip together.
    metrics["skipped_updates"] = float(sum(not step.updated for step in steps))
    return metrics


def sample_rows(batch: RolloutBatch, tokenizer: Tokenizer, iteration: int) -> list[dict[str, Any]]:
    """The first rows as text, for the sample table."""
    assert batch.raw_scores is not None
    assert batch.response_mask is not None
    kl = masked_sum(batch.kl, batch.response_mask, dim=1) if batch.kl is not None else None
    return [
        {
            "iteration": iteration,
            "sample_id": int(batch.sample_ids[row]),
            "prompt": tokenizer.decode(batch.prompt(row)),
            "response": tokenizer.decode(batch.response(row)),
            "score": round(float(batch.raw_scores[row]), 6),
            **({"kl": round(float(kl[row]), 6)} if kl is not None else {}),
            "response_length": int(batch.response_lengths[row]),
            "truncated": bool(batch.truncated[row]),
        }
        for row in range(min(batch.size, SAMPLES))
    ]
