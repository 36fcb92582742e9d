"""Supervised fine-tuning: a language model learns the tokens of written responses."""

from __future__ import annotations

import math

from mrlhf.checkpoint.hf import read_head
from mrlhf.config_supervised import SFTConfig, SupervisedConfig
from mrlhf.data.sft import SFTExample, load_sft, sft_batch
from mrlhf.data.stream import ExampleSet
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import ConfigError
from mrlhf.roles.language_model import learned_nll, learned_request, nll_loss
from mrlhf.roles.model import TrainedModel, Update
from mrlhf.trainer import supervised, supervised_inputs
from mrlhf.trainer.job import join
from mrlhf.trainer.stopping import run_to_end
from mrlhf.trainer.supervised import SupervisedTrainer, micro_batch_plan
from mrlhf.types import Metric, RolloutBatch


def run(config: SFTConfig) -> int:
    """Train as configured, export, and leave the process group; every rank of the job calls this.

    Returns:
        The exit status: 0, or that of a run that was asked to stop early.

    Raises:
        MrlhfError: anything the user can mend: configuration, data, checkpoints.
    """
    return run_to_end(build_trainer(config), export=config.trainer.export)


def build_trainer(config: SFTConfig) -> SupervisedTrainer[SFTExample]:
    """Read everything the configuration names, check it, join the other ranks and build the model.

    Raises:
        MrlhfError: as `run`.
    """
    model = supervised_inputs.read_start_model(config)
    if read_head(config.model.path) != "lm":
        raise ConfigError(f"model.path: {config.model.path} is a sequence classifier; sft trains a language model")
    models = {supervised_inputs.MODEL: model}
    # Before the examples are encoded, which can take minutes.
    env = supervised_inputs.check_job(config, models)
    supervised_inputs.check_supervised_output(config)
    tokenizer, longest = supervised_inputs.read_start(config, models)
    train, validation = supervised_inputs.read_and_hold_out(
        config, lambda paths: read_examples(config, paths, tokenizer, longest), key=lambda example: example.context
    )
    steps = supervised_inputs.total_steps(config, len(train.examples))
    job = join(config, models, env)
    objective = SFTObjective(config, supervised.build_trained(job, "lm", steps))
    pad_id, multiple = tokenizer.pad_id, job.pad_to_multiple
    return SupervisedTrainer(
        job,
        objective,
        tokenizer,
        train,
        validation,
        lambda examples, first: sft_batch(examples, pad_id=pad_id, pad_to_multiple=multiple, first_id=first),
        steps=steps,
        derived=perplexity,
    )


def read_examples(
    config: SFTConfig, paths: tuple[str, ...], tokenizer: Tokenizer, max_length: int
) -> ExampleSet[SFTExample]:
    """Examples as the ``data`` section says. Raises `DataError` naming file and line."""
    data = config.data
    return load_sft(
        paths,
        tokenizer,
        max_length=max_length,
        learn_on=data.learn_on,
        prompt_key=data.prompt_key,
        response_key=data.response_key,
        messages_key=data.messages_key,
        text_key=data.text_key,
        overlong=data.overlong,
        skip_bad_lines=data.skip_bad_lines,
    )


def perplexity(metrics: dict[str, float]) -> dict[str, float]:
    """``exp`` of the mean loss of a token."""
    loss = metrics.get("loss", math.nan)
    # exp(709) is the end of fp64; a diverging run should not end in an OverflowError.
    return {"perplexity": math.exp(loss) if loss < 700 else math.inf}


class SFTObjective:
    """The mean negative log-likelihood of the learned tokens."""

    def __init__(self, config: SupervisedConfig, model: TrainedModel) -> None:
        """Keep references.

        Args:
            config: its ``train`` section says how rows are cut into micro-batches.
            model: a language model.
        """
        self.config = config
        self.model = model

    def prepare(self, batch: RolloutBatch) -> RolloutBatch:
        """The batch itself."""
        return batch

    def denominator(self, batch: RolloutBatch) -> float:
        """The learned tokens."""
        assert batch.response_mask is not None
        return float(batch.response_mask.sum())

    def step(self, batch: RolloutBatch, denominator: float) -> Update:
        """One optimizer step."""
        plan = micro_batch_plan(self.config, batch, self.model, training=True)
        return self.model.update(batch, plan, nll_loss, denominator, learned_request, packed=self.config.train.packing)

    def evaluate(self, batch: RolloutBatch) -> dict[str, Metric]:
        """The loss as a sum over learned tokens with their number."""
        plan = micro_batch_plan(self.config, batch, self.model, training=False)
        logprobs = self.model.per_token(batch, plan, learned_request, packed=self.config.train.packing)
        if not self.model.counts_metrics:
            return {}
        return learned_nll(logprobs, batch)[1]
