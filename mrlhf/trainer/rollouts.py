"""The rollout phase: prompts in, a batch of sampled rows with scores out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mrlhf.data.prompts import Sample
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import MrlhfError, RewardError
from mrlhf.parallel.collectives import Group, all_gather_objects
from mrlhf.rl import Semantics
from mrlhf.roles.micro_batches import Cut
from mrlhf.roles.reward import RewardModel, ScoreSource
from mrlhf.rollout.engine import GenerationRequest, RolloutEngine
from mrlhf.rollout.sampling import SamplingParams
from mrlhf.rollout.scheduler import Ends
from mrlhf.types import Metric, RolloutBatch


class Sampler:
    """Turns prompts into rows with the actor's weights."""

    def __init__(
        self,
        engine: RolloutEngine,
        sampling: SamplingParams,
        *,
        semantics: Semantics,
        stop_ids: Sequence[int],
        pad_id: int,
        max_response_length: int,
        pad_to_multiple: int,
        seed: int,
        dp_group: Group,
        device: torch.device,
        complete: Ends | None = None,
        with_logprobs: bool = False,
    ) -> None:
        """Keep the settings.

        Args:
            engine: generation on the actor.
            sampling: temperature, top-k, top-p, repetition penalty.
            semantics: decides whether an end id that is also the pad id belongs to the response.
            stop_ids: all ids that end a response.
            pad_id: fills rows.
            max_response_length: limit of a response.
            pad_to_multiple: row widths are multiples of it.
            seed: of the run.
            dp_group: the data-parallel group.
            device: where batches live.
            complete: told a response after every token: whether a stop string ends it.
            with_logprobs: keep the log-probs that the sampler saw as ``rollout_logprobs``.
        """
        self.engine = engine
        self.with_logprobs = with_logprobs
        self.complete = complete
        self.sampling = sampling
        self.semantics = semantics
        self.stop_ids = list(stop_ids)
        self.pad_id = pad_id
        self.max_response_length = max_response_length
        self.pad_to_multiple = pad_to_multiple
        self.seed = seed
        self.dp_group = dp_group
        self.device = device
        self.previous: tuple[RolloutBatch, int, list[Sample]] | None = None
        """The last rollout of this rank: what `sample` returned."""

    def sample(self, samples: Sequence[Sample], iteration: int) -> tuple[RolloutBatch, int, list[Sample]]:
        """Generate a response to every sample of this data-parallel rank.

        Returns:
            The rows, the response width over all ranks (see `mrlhf.rl.response_masks`), and the samples they belong
            to. In ``deepspeed_chat``, when every response of all ranks has at most one token, the rows of the previous
            rollout come again.

        Raises:
            MrlhfError: all responses are that short in the first rollout.
        """
        requests = [GenerationRequest(s.sample_id, s.prompt.ids, self.max_response_length) for s in samples]
        made = self.engine.generate(
            requests,
            self.sampling,
            stop_ids=self.stop_ids,
            seed=self.seed,
            step=iteration,
            complete=self.complete,
            with_logprobs=self.with_logprobs,
        )
        responses = [counted_response(g.tokens, self.semantics, self.pad_id, self.stop_ids) for g in made]
        logprobs = [g.logprobs or [] for g in made] if self.with_logprobs else None
        batch = self.to_batch(samples, responses, [g.truncated for g in made], logprobs)
        width, longest = self._over_ranks(
            max((len(g.tokens) for g in made), default=0), max(map(len, responses), default=0)
        )
        rollout = (batch, width, list(samples))
        if self.semantics == "deepspeed_chat" and longest <= 1:
            if self.previous is None:
                raise MrlhfError(
                    "every response of the first rollout has at most one token, so there is nothing to learn from; "
                    "check the prompts' chat template and the end ids, or raise rollout.temperature"
                )
            return self.previous
        self.previous = rollout
        return rollout

    def to_batch(
        self,
        samples: Sequence[Sample],
        responses: Sequence[list[int]],
        truncated: Sequence[bool],
        logprobs: Sequence[Sequence[float]] | None = None,
    ) -> RolloutBatch:
        """Rows of samples and what was answered to them; ``logprobs`` are the sampler's, of at least these tokens."""
        batch = answered(samples, responses, truncated, pad_id=self.pad_id, pad_to_multiple=self.pad_to_multiple)
        if logprobs is not None:
            batch = batch.replace(rollout_logprobs=_in_label_frame(logprobs, batch))
        return batch.to(self.device)

    def _over_ranks(self, *values: int) -> list[int]:
        return [max(column) for column in zip(*all_gather_objects(values, self.dp_group), strict=True)]


def _in_label_frame(logprobs: Sequence[Sequence[float]], batch: RolloutBatch) -> torch.Tensor:
    """``[B, S-1]``: numbers of the response tokens that count, 0 elsewhere."""
    frame = torch.zeros(batch.size, batch.width - 1)
    places = zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True)
    for row, (numbers, (prompt, count)) in enumerate(zip(logprobs, places, strict=True)):
        frame[row, prompt - 1 : prompt - 1 + count] = torch.tensor(numbers[:count])
    return frame.to(batch.tokens.device)


def answered(
    samples: Sequence[Sample],
    responses: Sequence[list[int]],
    truncated: Sequence[bool],
    *,
    pad_id: int,
    pad_to_multiple: int,
) -> RolloutBatch:
    """Rows of samples and what was answered to them, on the CPU; see `RolloutBatch.from_sequences`."""
    return RolloutBatch.from_sequences(
        [s.prompt.ids for s in samples],
        responses,
        pad_id=pad_id,
        pad_to_multiple=pad_to_multiple,
        sample_ids=[s.sample_id for s in samples],
        group_ids=[s.group_id for s in samples],
        truncated=truncated,
    )


def counted_response(tokens: list[int], semantics: Semantics, pad_id: int, stop_ids: Sequence[int]) -> list[int]:
    """What counts of a generated response.

    DeepSpeed-Chat counts the tokens before the first pad: an end id that is the pad id is outside.
    """
    if semantics == "deepspeed_chat" and tokens[-1] == pad_id and pad_id in stop_ids:
        return tokens[:-1]
    return tokens


class ScoreGiver(Protocol):
    """Whoever gives rows their scores."""

    def scores(self, batch: RolloutBatch, cut: Cut, samples: Sequence[Sample]) -> torch.Tensor:
        """``[B]`` fp32 on every rank of the replica; raises `RewardError` on every rank."""


class Scorer:
    """The weighted sum of all reward sources."""

    def __init__(
        self,
        models: Sequence[tuple[RewardModel, float]],
        functions: Sequence[tuple[ScoreSource, float]],
        tokenizer: Tokenizer | None,
        replica_group: Group,
        job_group: Group,
        alone: Callable[[str], AbstractContextManager[None]] | None = None,
    ) -> None:
        """Keep the sources.

        Args:
            models: reward models with their weights.
            functions: Python functions and servers with their weights.
            tokenizer: turns responses into text for the functions; None where there are none.
            replica_group: all ranks of one replica, which must see the same scores.
            job_group: all ranks, which end together when a function fails.
            alone: told the name of each function around its call, see `mrlhf.parallel.heartbeat`.
        """
        self._alone = alone
        self.models = list(models)
        self.functions = list(functions)
        self.tokenizer = tokenizer
        self.replica_group, self.job_group = replica_group, job_group
        self._parts: dict[str, torch.Tensor] = {}

    def scores(self, batch: RolloutBatch, cut: Cut, samples: Sequence[Sample]) -> torch.Tensor:
        """``[B]`` fp32 on every rank of the replica; all ranks of the job call this together.

        Raises:
            RewardError: on every rank: a function or a server of some replica has failed.
        """
        parts = {f"reward_model{i}": model.scores(batch, cut) for i, (model, _) in enumerate(self.models)}
        weights = [weight for _, weight in (*self.models, *self.functions)]
        if self.functions:
            called = self._from_functions(batch, samples)
            for (function, _), values in zip(self.functions, called, strict=True):
                parts[_free_name(function.name, parts)] = torch.tensor(values, device=batch.tokens.device)
        self._parts = parts
        total = torch.zeros(batch.size, device=batch.tokens.device)
        for weight, part in zip(weights, parts.values(), strict=True):
            total += weight * part
        return total

    def source_metrics(self) -> dict[str, Metric]:
        """Mean score of each source in the last batch, before its weight, as ``score/NAME``."""
        return {
            f"score/{name}": Metric("mean", part.double().sum(), part.numel()) for name, part in self._parts.items()
        }

    def _from_functions(self, batch: RolloutBatch, samples: Sequence[Sample]) -> list[list[float]]:
        """One rank of the replica calls the functions, which may be slow, random or counted; the others get a copy."""
        scores: list[Any] = [None]
        failure: str | None = None
        if dist.get_rank(self.replica_group) == 0:
            assert self.tokenizer is not None
            prompts = [s.prompt.text for s in samples]
            responses = [self.tokenizer.decode(batch.response(row)) for row in range(batch.size)]
            keys = sorted({key for s in samples for key in s.prompt.meta})
            meta = {key: [s.prompt.meta.get(key) for s in samples] for key in keys}
            # A rank without rows (few held-out prompts, many replicas) has no fields either, and nothing to ask.
            try:
                scores[0] = [
                    self._called(function, prompts, responses, meta) if responses else []
                    for function, _ in self.functions
                ]
            except MrlhfError as error:
                failure = str(error)
        # The job ends as one, so that it can save first.
        failures = [text for text in all_gather_objects(failure, self.job_group) if text is not None]
        if failures:
            raise RewardError(failures[0])
        dist.broadcast_object_list(scores, src=dist.get_process_group_ranks(self.replica_group)[0],
                                   group=self.replica_group)  # fmt: skip
        result: list[list[float]] = scores[0]
        return result

    def _called(
        self, function: ScoreSource, prompts: list[str], responses: list[str], meta: dict[str, list[Any]]
    ) -> list[float]:
        with self._alone(f"reward {function.name}") if self._alone else nullcontext():
            return function.scores(prompts, responses, meta)


def _free_name(target: str, taken: Mapping[str, Any]) -> str:
    """The function's name, numbered where another source has that name."""
    name = target.rpartition(":")[2]
    return next(n for n in (name, *(f"{name}{i}" for i in range(1, len(taken) + 1))) if n not in taken)
