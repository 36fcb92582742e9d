"""What the actor's ranks and those of critic and reward models tell each other under ``placement: split``.

In an iteration four things go over (see `mrlhf.parallel.bridge`): the sampled rows to the critic's ranks; values and
scores back, which were computed while the actor's ranks computed log-probs; the returns to the critic's ranks; and at
every step of the updates a few numbers about both gradients, so that both models make their steps, or neither does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mrlhf.data.prompts import Prompt, Sample
from mrlhf.errors import RewardError
from mrlhf.parallel.batches import gather_batch
from mrlhf.parallel.bridge import Bridge
from mrlhf.parallel.collectives import Group, all_gather_objects, all_gather_rows, group_device
from mrlhf.parallel.layout import even_share
from mrlhf.rl import Semantics
from mrlhf.roles.critic import Critic
from mrlhf.roles.micro_batches import Cut
from mrlhf.roles.model import Gradients, Update
from mrlhf.trainer.experience import add_masks
from mrlhf.trainer.rollouts import Scorer
from mrlhf.types import RolloutBatch

ROWS = ("tokens", "prompt_lengths", "response_lengths", "sample_ids", "group_ids", "truncated")
"""Fields of a batch from which everything else can be computed."""
_ROLES = ("actor", "critic")


@dataclass(frozen=True)
class Question:
    """What the actor's ranks want to know about some rows.

    Attributes:
        values: whether the critic's values are wanted, besides scores.
        samples_per_prompt: that many rows one after the other have the same prompt.
        response_width: of the masks, see `mrlhf.rl.response_masks`.
        held_out: the prompts are those of evaluations.
    """

    values: bool
    samples_per_prompt: int
    response_width: int | None = None
    held_out: bool = False


class CriticRanks:
    """The critic's ranks as the actor's see them; every rank of the actor calls the same methods together.

    For an evaluation they are a source of scores like `mrlhf.trainer.rollouts.Scorer`.
    """

    def __init__(self, bridge: Bridge, dp_group: Group, *, evaluated_samples: int) -> None:
        """Keep references.

        Args:
            bridge: to them.
            dp_group: the actor's data-parallel group.
            evaluated_samples: responses to each prompt of an evaluation.
        """
        self.bridge, self.dp_group, self.evaluated_samples = bridge, dp_group, evaluated_samples
        self._device = torch.device("cpu")
        self._rows = slice(0, 0)

    def ask(self, batch: RolloutBatch, question: Question) -> None:
        """Hand over the rows of all data-parallel ranks; `answer` waits for what is said about them.

        Args:
            batch: this rank's rows; an even share of whole groups of ``question.samples_per_prompt``.
            question: what is wanted.
        """
        sizes = all_gather_objects(batch.size, self.dp_group)
        start = sum(sizes[: dist.get_rank(self.dp_group)])
        self._rows, self._device = slice(start, start + batch.size), batch.tokens.device
        bare = batch.replace(**{name: None for name in batch.tensors() if name not in ROWS})
        whole = gather_batch(bare, self.dp_group)
        self.bridge.send({"question": question, "pad_to_multiple": whole.pad_to_multiple}, whole.tensors())

    def answer(self, batch: RolloutBatch) -> RolloutBatch:
        """The rows that were handed over with their ``raw_scores``, and with ``values`` where these were asked for.

        Raises:
            RewardError: on every rank: a reward function or a server has failed.
        """
        said, tensors = self.bridge.receive(self._device)
        if said["failure"] is not None:
            raise RewardError(said["failure"])
        mine = {name: tensor[self._rows] for name, tensor in tensors.items()}
        if "values" in mine:
            mine["values"] = mine["values"][:, : batch.width - 1]
        return batch.replace(**mine)

    def scores(self, batch: RolloutBatch, cut: Cut, samples: Sequence[Sample]) -> torch.Tensor:
        """``[B]`` fp32 of an evaluation's rows. Raises `RewardError` on every rank."""
        self.ask(batch, Question(values=False, samples_per_prompt=self.evaluated_samples, held_out=True))
        found = self.answer(batch).raw_scores
        assert found is not None
        return found

    def no_more_questions(self) -> None:
        """The evaluation is over."""
        self.bridge.send({"question": None})

    def tell_returns(self, whole: RolloutBatch) -> None:
        """Hand over what the critic learns from: ``returns`` of the rows of all ranks, in the order of `ask`."""
        assert whole.returns is not None
        self.bridge.send({}, {"returns": whole.returns})


class Answerer:
    """The other end of `CriticRanks`, on the ranks of critic and reward models; they all call the same methods."""

    def __init__(
        self,
        bridge: Bridge,
        dp_group: Group,
        critic: Critic | None,
        scorer: Scorer,
        cut: Cut,
        prompt: Callable[[int, bool], Prompt] | None = None,
        *,
        semantics: Semantics,
        device: torch.device,
        working: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Keep references.

        Args:
            bridge: to the actor's ranks.
            dp_group: data-parallel group that shares out the rows here.
            critic: gives values.
            scorer: gives scores.
            cut: makes the micro-batches of inference.
            prompt: by group id, and whether it is one of an evaluation; needed for reward functions.
            semantics: of the masks of training rows.
            device: where batches live.
            working: entered while this rank computes, and does not wait for the others.
        """
        self.bridge, self.dp_group, self.critic, self.scorer = bridge, dp_group, critic, scorer
        self.cut, self.prompt, self.semantics, self.device, self.working = cut, prompt, semantics, device, working

    def listen(self) -> tuple[Question, RolloutBatch] | None:
        """The next question and the rows of all ranks that it is about; None where there are no more."""
        said, tensors = self.bridge.receive(self.device)
        if said["question"] is None:
            return None
        return said["question"], RolloutBatch(**tensors, pad_to_multiple=said["pad_to_multiple"])

    def answer(self, question: Question, whole: RolloutBatch) -> RolloutBatch:
        """Compute what was asked about ``whole`` and say it; returned are these rows with it and with masks.

        Raises:
            RewardError: on every rank, of the other part too.
        """
        each = question.samples_per_prompt
        groups = even_share(whole.size // each, dist.get_rank(self.dp_group), dist.get_world_size(self.dp_group))
        # Evaluations are always in standard semantics, see `mrlhf.trainer.evaluation`.
        whole = add_masks(whole, "standard" if question.held_out else self.semantics, question.response_width)
        mine = whole.select(slice(groups.start * each, groups.stop * each))
        values = None
        try:
            with self.working():
                if question.values and self.critic is not None:
                    values = self.critic.values(mine, self.cut)
                scores = self.scorer.scores(mine, self.cut, self._samples(mine, question))
        except RewardError as error:
            # All ranks of this part have got it.
            self.bridge.send({"failure": str(error)})
            raise
        found = {"raw_scores": torch.cat(all_gather_rows(scores, self.dp_group))}
        if values is not None:
            found["values"] = torch.cat(all_gather_rows(values, self.dp_group))
        self.bridge.send({"failure": None}, found)
        return whole.replace(**found)

    def returns(self) -> torch.Tensor:
        """``[B, S-1]`` of the rows of all ranks, once the actor's ranks know them."""
        return self.bridge.receive(self.device)[1]["returns"]

    def _samples(self, rows: RolloutBatch, question: Question) -> list[Sample]:
        if self.prompt is None:
            return []
        pairs = zip(rows.sample_ids.tolist(), rows.group_ids.tolist(), strict=True)
        return [Sample(sample, group, self.prompt(group, question.held_out)) for sample, group in pairs]


class Agreement:
    """Both parts make the step of a minibatch, or neither does; see `mrlhf.trainer.updates.OtherPart`."""

    def __init__(self, trains: str, *, texts: bool) -> None:
        """Keep the settings.

        Args:
            trains: what the other part trains: ``actor``, ``critic``, or nothing.
            texts: whether a step on texts follows each of the actor's.
        """
        self.trains, self.texts = trains, texts

    def agree(self, own: Mapping[str, Gradients], stop: bool) -> tuple[dict[str, Gradients], bool]:
        """Gradients of both parts by model, and whether the actor stops; all ranks of the job call this together."""
        numbers = [float(stop)]
        for role in _ROLES:
            numbers += _numbers(own.get(role))
        together = _largest(numbers)
        found = dict(own)
        for index, role in enumerate(_ROLES):
            taken, failed, exhausted, norm = together[1 + 4 * index : 5 + 4 * index]
            if taken and role not in found:
                found[role] = Gradients(not failed, float("nan") if failed else norm, {}, bool(exhausted))
        return {role: found[role] for role in _ROLES if role in found}, bool(together[0])

    def agree_on_texts(self, own: Update | None) -> Update | None:
        """The step on texts after the actor's one, where the run makes any; all ranks of the job call this together."""
        if not self.texts:
            return None
        made = None if own is None else Gradients(own.updated, own.grad_norm, {}, own.scale_exhausted)
        _, failed, exhausted, norm = _largest(_numbers(made))
        return own or Update(not failed, float("nan") if failed else norm, {}, bool(exhausted))


def _numbers(gradients: Gradients | None) -> list[float]:
    """Whether there are gradients, whether they are bad, whether fp16 is at its end, their norm."""
    if gradients is None:
        return [0.0, 0.0, 0.0, 0.0]
    bad = not gradients.finite
    return [1.0, float(bad), float(gradients.scale_exhausted), 0.0 if bad else gradients.norm]


def _largest(numbers: list[float]) -> list[float]:
    """Of all ranks of the job, number by number."""
    tensor = torch.tensor(numbers, dtype=torch.float64, device=group_device())
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [float(number) for number in tensor]


def share_metrics(own: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that rank 0 and the first critic's rank have, together on every rank; the others give none."""
    together: dict[str, Any] = {}
    for part in all_gather_objects(dict(own)):
        together |= part
    return together
