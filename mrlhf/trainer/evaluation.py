"""Evaluation on held-out prompts: the actor beside the reference."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mrlhf.data.prompts import Prompt, Sample
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.lines import LineFile
from mrlhf.parallel.batches import gather_batch
from mrlhf.parallel.layout import even_share
from mrlhf.rl import Semantics, kl_estimate, masked_mean, masked_sum
from mrlhf.roles.micro_batches import Cut
from mrlhf.roles.policy import PolicyModel
from mrlhf.rollout.engine import GenerationRequest
from mrlhf.rollout.sampling import SamplingParams
from mrlhf.rollout.scheduler import Ends
from mrlhf.trainer.experience import add_masks
from mrlhf.trainer.rollouts import ScoreGiver, answered, counted_response
from mrlhf.types import RolloutBatch

EVALUATION_FILES = ("eval.json", "eval_samples.jsonl")
EVALUATION_STEP = 2**31 - 1
"""The rollout step that evaluations draw their random numbers from: no iteration of a training run gets there."""


@dataclass(frozen=True)
class EvaluationSettings:
    """How responses are sampled and scored; see `mrlhf.config_schema.EvaluationConfig`."""

    sampling: SamplingParams
    samples_per_prompt: int
    max_response_length: int
    slots: int
    cut: Cut
    pad_to_multiple: int
    seed: int
    semantics: Semantics = "standard"
    cache_bytes: int | None = None
    complete: Ends | None = None


@dataclass(frozen=True)
class Evaluation:
    """Numbers by name, and one row per prompt with both responses."""

    metrics: dict[str, float]
    rows: list[dict[str, Any]]

    def summary(self) -> str:
        """One line: both mean scores, and how many standard errors they are apart."""
        m = self.metrics
        error = m["difference_stderr"]
        apart = f" ({m['difference'] / error:.1f} standard errors)" if error > 0 else ""
        return (
            f"mean score {m['score_mean']:.3f} ± {m['score_stderr']:.3f}, reference {m['reference_score_mean']:.3f} "
            f"± {m['reference_score_stderr']:.3f}; difference {m['difference']:+.3f} ± {error:.3f}{apart}; "
            f"win rate {m['win_rate']:.3f}; KL {m['kl_sequence']:.3f} a response"
        )


class Evaluator:
    """Answers held-out prompts with actor and reference and compares the scores.

    The random numbers are the same in every evaluation and under every layout. The reference's responses are made
    once and kept.
    """

    def __init__(
        self,
        actor: PolicyModel,
        reference: PolicyModel,
        scorer: ScoreGiver,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        settings: EvaluationSettings,
        *,
        stop_ids: Sequence[int],
        device: torch.device,
    ) -> None:
        """Keep references.

        Args:
            actor: the model that is judged.
            reference: what it is compared with.
            scorer: the reward.
            tokenizer: for the table of samples.
            prompts: held-out prompts, the same on every rank; at least one.
            settings: sampling.
            stop_ids: every id that ends a response.
            device: where batches live.
        """
        self.actor, self.reference, self.scorer, self.tokenizer = actor, reference, scorer, tokenizer
        self.settings = settings
        self.stop_ids = list(stop_ids)
        self.device = device
        count = settings.samples_per_prompt
        samples = [Sample(i * count + k, i, prompt) for i, prompt in enumerate(prompts) for k in range(count)]
        dp = actor.groups.dp
        self.prompts = list(prompts)
        self.samples = _share(samples, dp.rank(), dp.size(), count)
        self._baseline: RolloutBatch | None = None

    def run(self) -> Evaluation:
        """One evaluation; every rank of the job calls this and gets the same numbers."""
        if self._baseline is None:
            self._baseline = self._answer(self.reference, with_logprobs=False)
        ours = self._answer(self.actor, with_logprobs=True)
        return compare(ours, self._baseline, self.prompts, self.tokenizer)

    def _answer(self, policy: PolicyModel, *, with_logprobs: bool) -> RolloutBatch:
        """Responses of ``policy`` with scores, and log-probs of both models if asked; the rows of all ranks."""
        settings, samples = self.settings, self.samples
        requests = [GenerationRequest(s.sample_id, s.prompt.ids, settings.max_response_length) for s in samples]
        made = policy.engine(settings.slots, settings.cache_bytes).generate(
            requests,
            settings.sampling,
            stop_ids=self.stop_ids,
            seed=settings.seed,
            step=EVALUATION_STEP,
            complete=settings.complete,
        )
        pad_id = self.tokenizer.pad_id
        responses = [counted_response(g.tokens, settings.semantics, pad_id, self.stop_ids) for g in made]
        batch = answered(
            samples,
            responses,
            [g.truncated for g in made],
            pad_id=pad_id,
            pad_to_multiple=settings.pad_to_multiple,
        ).to(self.device)
        batch = add_masks(batch, "standard")
        batch = batch.replace(scores=self.scorer.scores(batch, settings.cut, samples))
        if with_logprobs:
            temperature = settings.sampling.temperature
            batch = batch.replace(
                old_logprobs=self.actor.logprobs(batch, settings.cut, temperature=temperature),
                ref_logprobs=self.reference.logprobs(batch, settings.cut, temperature=temperature),
            )
        return gather_batch(batch, self.actor.groups.dp)


def _share(samples: list[Sample], rank: int, size: int, samples_per_prompt: int) -> list[Sample]:
    """A run of whole groups; ranks may have different numbers of them, and none."""
    groups = even_share(len(samples) // samples_per_prompt, rank, size)
    return samples[groups.start * samples_per_prompt : groups.stop * samples_per_prompt]


def compare(batch: RolloutBatch, baseline: RolloutBatch, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> Evaluation:
    """Metrics and rows of two sets of responses to the same prompts.

    Standard errors are over prompts, after the mean over a prompt's samples; that of the difference is over the
    paired differences. ``win_rate`` is the share of pairs in which the actor's score is higher, ties counted half.

    Args:
        batch: the actor's responses, with scores and log-probs of both models.
        baseline: the reference's with scores, in the same order of samples.
        prompts: by group id.
        tokenizer: for the text of the rows.
    """
    assert batch.scores is not None
    assert baseline.scores is not None
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    assert batch.response_mask is not None
    ours, theirs = (x.scores.double().cpu().view(len(prompts), -1) for x in (batch, baseline))  # type: ignore[union-attr]
    difference = ours - theirs
    wins = (difference > 0).double() + 0.5 * (difference == 0).double()
    kl = {kind: kl_estimate(batch.old_logprobs, batch.ref_logprobs, kind) for kind in ("k1", "k3")}
    mask = batch.response_mask
    metrics = {
        **_mean_and_error("score", ours),
        **_mean_and_error("reference_score", theirs),
        "difference": float(difference.mean()),
        "difference_stderr": _standard_error(difference),
        "win_rate": float(wins.mean()),
        "kl_k1": float(masked_mean(kl["k1"], mask)),
        "kl_k3": float(masked_mean(kl["k3"], mask)),
        "kl_sequence": float(masked_sum(kl["k1"], mask, dim=1).mean()),
        "response_length_mean": float(batch.response_lengths.double().mean()),
        "reference_response_length_mean": float(baseline.response_lengths.double().mean()),
        "truncated_fraction": float(batch.truncated.double().mean()),
        "prompts": float(len(prompts)),
    }
    if ours.size(1) > 1:
        metrics["best_of_n_score_mean"] = float(ours.amax(dim=1).mean())
        metrics["reference_best_of_n_score_mean"] = float(theirs.amax(dim=1).mean())
        metrics["best_of_n"] = float(ours.size(1))
    return Evaluation(metrics, _rows(batch, baseline, ours, theirs, prompts, tokenizer))


def write_evaluation(evaluation: Evaluation, samples: LineFile, *, iteration: int | None = None) -> None:
    """Append the rows to ``samples`` and write the numbers to ``eval.json`` beside it; rank 0 calls this.

    Raises:
        OSError: from the file system, for the numbers; rows that could not be written stay pending.
    """
    folder = samples.path.parent
    label = {} if iteration is None else {"iteration": iteration}
    samples.write({**label, **row} for row in evaluation.rows)
    unfinished = folder / "eval.json.tmp"
    numbers = {name: value if math.isfinite(value) else None for name, value in evaluation.metrics.items()}
    unfinished.write_text(json.dumps({**label, **numbers}, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(folder / "eval.json")


def _mean_and_error(name: str, scores: torch.Tensor) -> dict[str, float]:
    return {f"{name}_mean": float(scores.mean()), f"{name}_stderr": _standard_error(scores)}


def _standard_error(values: torch.Tensor) -> float:
    """Of the mean over prompts (rows); NaN for a single one."""
    by_prompt = values.mean(dim=1)
    return float(by_prompt.std(correction=1)) / len(by_prompt) ** 0.5 if len(by_prompt) > 1 else float("nan")


def _rows(
    batch: RolloutBatch,
    baseline: RolloutBatch,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
) -> list[dict[str, Any]]:
    if dist.is_initialized() and dist.get_rank() != 0:
        return []
    samples = ours.size(1)
    return [
        {
            "prompt": prompts[row // samples].text,
            "reference_response": tokenizer.decode(baseline.response(row)),
            "reference_score": round(float(theirs.view(-1)[row]), 6),
            "response": tokenizer.decode(batch.response(row)),
            "score": round(float(ours.view(-1)[row]), 6),
        }
        for row in range(batch.size)
    ]
