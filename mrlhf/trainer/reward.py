"""Training of a reward model: scores that put the chosen answer of a pair above the rejected one."""

from __future__ import annotations

import torch

from mrlhf.checkpoint.hf import read_head
from mrlhf.config_preferences import RewardLossConfig, RewardTrainingConfig
from mrlhf.errors import ConfigError
from mrlhf.megatron.attention import padded_causal_mask
from mrlhf.rl import LossTerms, diverging_pairwise_loss, lengths_before_padding, pairwise_loss
from mrlhf.roles.model import LossFunction, TrainedModel, Update, in_label_frame
from mrlhf.trainer import supervised, supervised_inputs
from mrlhf.trainer.job import join
from mrlhf.trainer.preferences import Inputs, PreferenceTrainer, pair_count, pair_plan, read_inputs
from mrlhf.trainer.stopping import run_to_end
from mrlhf.types import Metric, RolloutBatch, gather_rows


def run(config: RewardTrainingConfig) -> int:
    """Train as configured, export, and leave the process group; every rank of the job calls this.

    Returns:
        The exit status: 0, or that of a run that was asked to stop early.

    Raises:
        MrlhfError: anything the user can mend: configuration, data, checkpoints.
    """
    return run_to_end(build_trainer(config), export=config.trainer.export)


def build_trainer(config: RewardTrainingConfig) -> PreferenceTrainer:
    """Read everything the configuration names, check it, join the other ranks and build the model.

    Raises:
        MrlhfError: as `run`.
    """
    if config.model.head == "loaded" and read_head(config.model.path) != "value":
        raise ConfigError(
            f"model.path: {config.model.path} is a language model without a value head; set model.head to fresh or auto"
        )
    models = {supervised_inputs.MODEL: supervised_inputs.read_start_model(config)}
    inputs = read_inputs(config, models)
    _check_margins(config, inputs)
    job = join(config, models, inputs.env)
    masked = config.reward.loss == "deepspeed_chat"
    model = supervised.build_trained(job, "value", inputs.steps, head_init=config.model.head, masked=masked)
    return inputs.trainer(job, RewardObjective(config, model), "value")


def _check_margins(config: RewardTrainingConfig, inputs: Inputs) -> None:
    if config.reward.loss != "deepspeed_chat" or not config.reward.use_margin:
        return
    for key, pairs in (("train", inputs.train), ("validation", inputs.validation)):
        line = next((pair.line for pair in (pairs.examples if pairs else []) if pair.margin), None)
        if line is not None:
            raise ConfigError(
                f"data.{key}: line {line} has a margin, which reward.loss=deepspeed_chat has no place for; set "
                "reward.use_margin=false to leave margins out, or reward.loss=bradley_terry"
            )


class RewardObjective:
    """The mean loss of a pair."""

    def __init__(self, config: RewardTrainingConfig, model: TrainedModel) -> None:
        """Keep references, and give the model its attention mask where the loss needs one.

        Args:
            config: the loss, and how pairs are cut into micro-batches.
            model: with a value head; built ``masked`` for DeepSpeed-Chat's loss.
        """
        self.config = config
        self.model = model
        self.loss = reward_loss(config.reward)
        if config.reward.loss == "deepspeed_chat":
            model.attention_mask = lambda batch: padded_causal_mask(batch.lengths, batch.width)

    def prepare(self, batch: RolloutBatch) -> RolloutBatch:
        """The batch itself."""
        return batch

    def denominator(self, batch: RolloutBatch) -> float:
        """The number of pairs."""
        return pair_count(batch)

    def step(self, batch: RolloutBatch, denominator: float) -> Update:
        """One optimizer step."""
        plan = pair_plan(self.config, batch, self.model, training=True)
        return self.model.update(batch, plan, self.loss, denominator, packed=self.config.train.packing)

    def evaluate(self, batch: RolloutBatch) -> dict[str, Metric]:
        """Loss, accuracy, scores and their margin."""
        plan = pair_plan(self.config, batch, self.model, training=False)
        scores = self.model.per_token(batch, plan, packed=self.config.train.packing)
        if not self.model.counts_metrics or not batch.size:
            return {}
        return _with_loss(pair_terms(self.config.reward, batch, scores))[1]


def reward_loss(settings: RewardLossConfig) -> LossFunction:
    """The loss of a micro-batch of pairs and the value head's output ``[b, S]``, as a sum over pairs."""

    def loss(batch: RolloutBatch, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Metric]]:
        """From a micro-batch and the value head's output."""
        return _with_loss(pair_terms(settings, batch, in_label_frame(output)))

    return loss


def pair_terms(settings: RewardLossConfig, batch: RolloutBatch, scores: torch.Tensor) -> LossTerms:
    """The loss of pairs from the scores after each of their tokens, ``[2 N, S-1]``."""
    if settings.loss == "deepspeed_chat":
        tokens = batch.tokens[:, : scores.shape[1]]
        ends = lengths_before_padding(
            batch.tokens, batch.lengths, batch.pad_id, padding_at_beginning=settings.num_padding_at_beginning
        )
        return diverging_pairwise_loss(*(x[side::2] for x in (scores, tokens, ends) for side in (0, 1)))
    end_scores = gather_rows(scores, batch.lengths - 1)
    margin = batch.margins[::2] if settings.use_margin and batch.margins is not None else None
    return pairwise_loss(end_scores[::2], end_scores[1::2], margin, centering_coef=settings.centering_coef)


def _with_loss(terms: LossTerms) -> tuple[torch.Tensor, dict[str, Metric]]:
    return terms.loss_sum, {"loss": Metric("mean", terms.loss_sum.detach().clone(), terms.count), **terms.metrics}
