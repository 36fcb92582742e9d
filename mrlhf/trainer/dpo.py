"""Direct preference optimisation: a policy learns from preference pairs, beside a frozen reference."""

from __future__ import annotations

import torch

from mrlhf.checkpoint.hf import read_head
from mrlhf.config_preferences import DPOConfig, DPOLossConfig
from mrlhf.errors import ConfigError
from mrlhf.model_config import ModelConfig
from mrlhf.rl import dpo_loss, nll_loss, sequence_logprobs
from mrlhf.roles.language_model import learned_request
from mrlhf.roles.model import LossFunction, RoleModel, TrainedModel, Update, in_label_frame
from mrlhf.roles.reference import Reference
from mrlhf.trainer import supervised, supervised_inputs
from mrlhf.trainer.job import Job, join, load_model, read_architectures
from mrlhf.trainer.preferences import PreferenceTrainer, pair_count, pair_plan, read_inputs
from mrlhf.trainer.stopping import run_to_end
from mrlhf.types import Metric, RolloutBatch

REFERENCE = "reference"


def run(config: DPOConfig) -> int:
    """Train as configured, export, and leave the process group; every rank of the job calls this.

    Returns:
        The exit status: 0, or that of a run that was asked to stop early.

    Raises:
        MrlhfError: anything the user can mend: configuration, data, checkpoints.
    """
    return run_to_end(build_trainer(config), export=config.trainer.export)


def build_trainer(config: DPOConfig) -> PreferenceTrainer:
    """Read everything the configuration names, check it, join the other ranks and build both models.

    Raises:
        MrlhfError: as `run`.
    """
    models = read_models(config)
    inputs = read_inputs(config, models)
    job = join(config, models, inputs.env)
    model = supervised.build_trained(job, "lm", inputs.steps)
    return inputs.trainer(job, DPOObjective(config, model, build_reference(job)), "lm")


def read_models(config: DPOConfig) -> dict[str, ModelConfig]:
    """The architectures of policy and reference.

    Raises:
        CheckpointError: a folder has no readable configuration or weights.
        ConfigError: a folder holds a classifier.
    """
    for key, path in config.model_folders().items():
        if read_head(path) != "lm":
            raise ConfigError(f"{key}: {path} is a sequence classifier; dpo trains a language model")
    models = {supervised_inputs.MODEL: supervised_inputs.read_start_model(config)}
    if config.reference.path is None:
        return {**models, REFERENCE: models[supervised_inputs.MODEL]}
    return {**models, **read_architectures({REFERENCE: config.reference.path})}


def build_reference(job: Job[DPOConfig]) -> Reference:
    """The frozen reference; without a path of its own it starts as the policy does."""
    config = job.config
    init = config.model.init if config.reference.path is None else "loaded"
    chunks = load_model(job, REFERENCE, config.reference_path, "lm", init=init)
    return Reference(REFERENCE, job.models[REFERENCE], chunks, job.groups)


class DPOObjective:
    """The mean DPO loss of a pair."""

    def __init__(self, config: DPOConfig, model: TrainedModel, reference: RoleModel) -> None:
        """Keep references.

        Args:
            config: the loss, and how pairs are cut into micro-batches.
            model: the policy.
            reference: frozen; laid out as the policy.
        """
        self.config = config
        self.model = model
        self.reference = reference
        self.loss = policy_loss(config.dpo)

    def prepare(self, batch: RolloutBatch) -> RolloutBatch:
        """Add the reference's log-probs."""
        return batch.replace(ref_logprobs=self._logprobs(self.reference, batch))

    def denominator(self, batch: RolloutBatch) -> float:
        """The number of pairs."""
        return pair_count(batch)

    def step(self, batch: RolloutBatch, denominator: float) -> Update:
        """One optimizer step."""
        plan = pair_plan(self.config, batch, self.model, training=True)
        return self.model.update(batch, plan, self.loss, denominator, learned_request, packed=self.config.train.packing)

    def evaluate(self, batch: RolloutBatch) -> dict[str, Metric]:
        """Loss, accuracy, rewards and their margin."""
        logprobs = self._logprobs(self.model, batch)
        if not self.model.counts_metrics or not batch.size:
            return {}
        return pair_loss(self.config.dpo, batch, logprobs)[1]

    def _logprobs(self, model: RoleModel, batch: RolloutBatch) -> torch.Tensor:
        # The rows that an update puts together too, so that policy and reference agree to the last bit at the start.
        plan = pair_plan(self.config, batch, model, training=False)
        return model.per_token(batch, plan, learned_request, packed=self.config.train.packing)


def policy_loss(settings: DPOLossConfig) -> LossFunction:
    """The loss of a micro-batch of pairs and the head's log-probs ``[b, S]``, as a sum over pairs."""

    def loss(batch: RolloutBatch, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Metric]]:
        """From a micro-batch and the head's output."""
        return pair_loss(settings, batch, in_label_frame(output))

    return loss


def pair_loss(
    settings: DPOLossConfig, batch: RolloutBatch, logprobs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """The loss of pairs from the policy's log-probs ``[2 N, S-1]``, and its metrics."""
    assert batch.response_mask is not None
    assert batch.ref_logprobs is not None
    # IPO compares log-probs per token, as TRL does: its fixed target would otherwise depend on the answers' lengths.
    average = settings.loss == "ipo"
    policy = sequence_logprobs(logprobs, batch.response_mask, average=average)
    reference = sequence_logprobs(batch.ref_logprobs, batch.response_mask, average=average)
    terms = dpo_loss(
        policy[::2],
        policy[1::2],
        reference[::2],
        reference[1::2],
        beta=settings.beta,
        label_smoothing=settings.label_smoothing,
        kind=settings.loss,
        margin=batch.margins[::2] if settings.use_margin and batch.margins is not None else None,
    )
    total, metrics = terms.loss_sum, dict(terms.metrics)
    if settings.sft_coef:
        metrics["dpo_loss"] = Metric("mean", total.detach().clone(), terms.count)
        nll = nll_loss(sequence_logprobs(logprobs[::2], batch.response_mask[::2], average=True))
        metrics |= nll.metrics
        total = total + settings.sft_coef * nll.loss_sum
    return total, {"loss": Metric("mean", total.detach().clone(), terms.count), **metrics}
