"""What reward model training and DPO share: the pairs, their micro-batches, and the loop around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from mrlhf.config_preferences import PreferenceConfig
from mrlhf.data.preferences import PreferenceExample, load_preferences, pair_batch
from mrlhf.data.stream import ExampleSet
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.data.vocabulary import check_same_vocabulary
from mrlhf.megatron.model import Head
from mrlhf.model_config import ModelConfig
from mrlhf.parallel.launch import LaunchEnv
from mrlhf.roles.micro_batches import Plan, make_pair_plan
from mrlhf.roles.model import RoleModel
from mrlhf.trainer import supervised_inputs
from mrlhf.trainer.job import Job
from mrlhf.trainer.supervised import Objective, SupervisedTrainer
from mrlhf.types import RolloutBatch

P = TypeVar("P", bound=PreferenceConfig)
Pairs = ExampleSet[PreferenceExample]
PreferenceTrainer = SupervisedTrainer[PreferenceExample]


@dataclass(frozen=True)
class Inputs:
    """What a run reads besides models, before any rank waits for another."""

    env: LaunchEnv
    tokenizer: Tokenizer
    train: Pairs
    validation: Pairs | None
    steps: int

    def trainer(self, job: Job[P], objective: Objective, head: Head) -> PreferenceTrainer:
        """The loop around ``objective``; the model is exported with ``head``."""
        pad_id, multiple = self.tokenizer.pad_id, job.pad_to_multiple

        def collate(examples: Sequence[PreferenceExample], first: int) -> RolloutBatch:
            """Rows of pairs, the first of which has this number."""
            return pair_batch(examples, pad_id=pad_id, pad_to_multiple=multiple, first_id=first)

        return SupervisedTrainer(
            job,
            objective,
            self.tokenizer,
            self.train,
            self.validation,
            collate,
            steps=self.steps,
            head=head,
        )


def read_inputs(config: PreferenceConfig, models: dict[str, ModelConfig]) -> Inputs:
    """Read and check everything that the configuration names; nothing is started.

    Args:
        config: of the run.
        models: the architectures that take part, by role.

    Raises:
        MrlhfError: anything the user can mend.
    """
    # Before the pairs are encoded, which can take minutes.
    env = supervised_inputs.check_job(config, models)
    supervised_inputs.check_supervised_output(config)
    tokenizer, longest = supervised_inputs.read_start(config, models)
    check_same_vocabulary(config.model_folders())
    train, validation = supervised_inputs.read_and_hold_out(
        config, lambda paths: read_pairs(config, paths, tokenizer, longest), key=lambda pair: tuple(pair.prompt_ids)
    )
    return Inputs(env, tokenizer, train, validation, supervised_inputs.total_steps(config, len(train.examples)))


def read_pairs(config: PreferenceConfig, paths: Sequence[str], tokenizer: Tokenizer, max_length: int) -> Pairs:
    """Pairs as the ``data`` section says. Raises `DataError` naming file and line."""
    data = config.data
    return load_preferences(
        paths,
        tokenizer,
        max_length=max_length,
        overlong=data.overlong,
        skip_bad_lines=data.skip_bad_lines,
        prompt_key=data.prompt_key,
        chosen_key=data.chosen_key,
        rejected_key=data.rejected_key,
        margin_key=data.margin_key,
    )


def pair_plan(config: PreferenceConfig, batch: RolloutBatch, model: RoleModel, *, training: bool) -> Plan:
    """The micro-batches of this rank's pairs as the ``train`` section says."""
    train = config.train
    return make_pair_plan(
        batch,
        pairs=train.micro_batch_size,
        tokens=train.micro_batch_tokens,
        multiple=model.micro_batch_multiple if training else 1,
        packed=train.packing,
    )


def pair_count(batch: RolloutBatch) -> float:
    """Pairs of a batch: what a sum over pairs is divided by."""
    return float(batch.size // 2)
