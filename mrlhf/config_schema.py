"""The configuration of a PPO run: every key with its type, its default and what it does.

The objects are frozen and refuse unknown keys. Read one with `mrlhf.config.load_config`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mrlhf.config_algorithm import PPOAlgorithmConfig, PTXConfig
from mrlhf.config_rewards import RewardConfig, RewardModelSource
from mrlhf.config_sections import (
    AdamConfig,
    Dropout,
    Fp8Role,
    InferenceConfig,
    NaturalInt,
    NonNegativeFloat,
    OffloadConfig,
    OutputConfig,
    ParallelConfig,
    PositiveFloat,
    PositiveInt,
    RunConfig,
    Section,
    Temperature,
    template_file,
)

Semantics = Literal["standard", "deepspeed_chat"]


class ActorConfig(Section):
    """The model that is trained to answer."""

    path: str = Field(description="Hugging Face folder of the language model, or one written by `mrlhf convert import`")
    dropout: Dropout = Field(0.0, description="dropout of the actor's training passes only; 0 keeps the ratio exact")
    moe_aux_loss_coef: NonNegativeFloat = Field(
        0.0, description="weight of the load balancing loss of a mixture-of-experts actor's routers; 0: none"
    )


class CriticConfig(Section):
    """The model that predicts the return of every token; of no effect where ppo.advantage needs none."""

    path: str | None = Field(
        None, description="folder as for actor.path; null: the first reward model's, else the actor's"
    )
    head: Literal["auto", "loaded", "fresh"] = Field(
        "auto", description="value head: the checkpoint's, a new one, or auto: the checkpoint's where it has one"
    )
    parallel: ParallelConfig | None = Field(
        None, description="own layout on the same ranks (see placement), with parallel's keys; null: parallel"
    )


class ReferenceConfig(Section):
    """The frozen model that the actor must stay close to."""

    path: str | None = Field(None, description="folder as for actor.path; null: the actor's")


class DataConfig(Section):
    """The prompts."""

    prompts: str = Field(description="JSONL, Parquet or CSV file, one prompt a row")
    prompt_key: str = Field("prompt", min_length=1, description="field that holds the text or the chat messages")
    max_prompt_length: PositiveInt | None = Field(
        None, description="longest prompt in tokens; null: the models' length less rollout.max_response_length"
    )
    overlong: Literal["error", "drop", "keep_last"] = Field(
        "error", description="longer prompts: refuse, leave out and count, or keep the last tokens"
    )
    skip_bad_lines: bool = Field(False, description="leave malformed lines out and count them")
    shuffle: bool = Field(True, description="a new order of the prompts in every pass over the file")


class RolloutConfig(Section):
    """How responses are sampled."""

    prompts_per_iteration: PositiveInt = Field(description="prompts of one iteration, over all ranks")
    samples_per_prompt: PositiveInt = Field(1, description="responses to each prompt")
    max_response_length: PositiveInt = Field(description="longest response in tokens")
    temperature: Temperature = Field(1.0, description="softmax temperature, also of all log-probs; 0 is greedy")
    top_k: NaturalInt = Field(0, description="sample from the k likeliest tokens only; 0: from all")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="sample from the likeliest tokens of this mass")
    logprobs: bool = Field(False, description="log how far the sampler's log-probs are from the training passes'")
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = Field(
        1.0, description="positive logits of tokens that a row has already are divided by it, others multiplied; 1: off"
    )
    batch_size: PositiveInt = Field(32, description="most rows that one data-parallel rank generates at once")
    kv_cache_memory: PositiveFloat | None = Field(
        None, description="most GiB of a rank for keys and values; fewer rows at once where they do not fit; null: all"
    )
    stop_token_ids: tuple[NaturalInt, ...] = Field((), description="ids that end a response, besides the model's own")
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="texts that end a response, which keeps the token that completes one"
    )

    @property
    def kv_cache_bytes(self) -> int | None:
        """The limit of ``kv_cache_memory`` in bytes."""
        return None if self.kv_cache_memory is None else int(self.kv_cache_memory * 2**30)


class CriticAdamConfig(AdamConfig):
    """As for the actor, with a higher learning rate; of no effect where ppo.advantage needs no critic."""

    lr: NonNegativeFloat = Field(5e-6, description="highest learning rate")


class OptimizerConfig(Section):
    """The two optimizers."""

    actor: AdamConfig = Field(default_factory=AdamConfig, description="the actor's optimizer")
    critic: CriticAdamConfig = Field(default_factory=CriticAdamConfig, description="the critic's optimizer")
    distributed: bool = Field(False, description="divide optimizer states over data-parallel ranks")


class TrainerConfig(OutputConfig):
    """Length and output of the run."""

    iterations: PositiveInt = Field(description="rollouts, each followed by its updates")
    output_dir: str = Field("runs/ppo", min_length=1, description="folder for metrics, samples and exported models")
    sample_interval: NaturalInt = Field(10, description="iterations between sample tables; 0: none")
    max_bad_steps: NaturalInt = Field(
        10, description="steps in a row that are skipped for a gradient that is not finite; one more ends the run"
    )
    eval_interval: NaturalInt = Field(
        0, description="iterations between evaluations on evaluation.prompts, and one at the end; 0: none"
    )

    def evaluates_after(self, done: int) -> bool:
        """Whether an evaluation is due when so many iterations are done."""
        return bool(self.eval_interval) and (done % self.eval_interval == 0 or done == self.iterations)


class EvaluationConfig(Section):
    """Held-out prompts, answered by the actor and by the reference; used by `mrlhf eval` and trainer.eval_interval."""

    prompts: str | None = Field(None, description="file of held-out prompts; null: data.prompts, in `mrlhf eval` only")
    max_prompts: PositiveInt | None = Field(None, description="only the first so many prompts; null: all")
    samples_per_prompt: PositiveInt = Field(
        1, description="responses of each model to each prompt; the best of them is reported too (best-of-n)"
    )
    max_response_length: PositiveInt | None = Field(None, description="in tokens; null: rollout.max_response_length")
    temperature: Temperature = Field(0.0, description="softmax temperature; 0 is greedy")
    top_k: NaturalInt = Field(0, description="sample from the k likeliest tokens only; 0: from all")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="sample from the likeliest tokens of this mass")
    samples_shown: NaturalInt = Field(4, description="prompts in the table of samples")
    output_dir: str | None = Field(
        None, description="folder that `mrlhf eval` writes; null: eval/ in trainer.output_dir"
    )

    @model_validator(mode="after")
    def _no_copies(self) -> EvaluationConfig:
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError(
                f"samples_per_prompt {self.samples_per_prompt} would be copies of one greedy response; "
                "raise temperature above 0, or sample once"
            )
        return self


class PPOConfig(RunConfig):
    """Everything that defines a PPO run."""

    semantics: Semantics = Field("standard", description="conventions of masks, shaping and loss mean")
    actor: ActorConfig = Field(description="the trained model")
    critic: CriticConfig = Field(default_factory=CriticConfig, description="the value model")
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig, description="the frozen start")
    reward: RewardConfig = Field(description="the scores")
    placement: Literal["colocated", "split"] = Field(
        "colocated",
        description="critic and reward models: colocated: on all ranks, beside the actor; split: on ranks of their "
        "own, the last ones, which work while the actor's do",
    )
    critic_ranks: PositiveInt | None = Field(
        None, description="placement split: ranks of critic and reward models; null: one replica of them"
    )
    data: DataConfig = Field(description="the prompts")
    rollout: RolloutConfig = Field(description="sampling")
    ppo: PPOAlgorithmConfig = Field(description="the update")
    ptx: PTXConfig = Field(default_factory=PTXConfig, description="language modelling beside the updates")
    inference: InferenceConfig = Field(default_factory=InferenceConfig, description="passes without gradient")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="held-out prompts")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="the two optimizers")
    offload: OffloadConfig = Field(default_factory=OffloadConfig, description="host memory between phases")
    trainer: TrainerConfig = Field(description="length and output")

    @property
    def rows_per_iteration(self) -> int:
        """Sequences of one iteration over all ranks."""
        return self.rollout.prompts_per_iteration * self.rollout.samples_per_prompt

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response, in training or in an evaluation during it."""
        evaluated = self.evaluation.max_response_length if self.trainer.eval_interval else None
        return max(self.rollout.max_response_length, evaluated or 0)

    @property
    def reward_model_paths(self) -> tuple[str, ...]:
        """Folders of the reward models, in the order of ``reward.sources``."""
        return tuple(source.path for source in self.reward.sources if isinstance(source, RewardModelSource))

    def parallel_of(self, role: str) -> ParallelConfig:
        """See `RunConfig`; reward models are ``reward0``, ``reward1``, ... in the order of ``reward.sources``."""
        if role == "critic":
            return self.critic.parallel or self.parallel
        if role.startswith("reward"):
            models = [source for source in self.reward.sources if isinstance(source, RewardModelSource)]
            return models[int(role.removeprefix("reward") or 0)].parallel or self.parallel
        return self.parallel

    @property
    def on_critic_ranks(self) -> tuple[str, ...]:
        """Roles of the models that ``placement: split`` puts on ranks of their own; the first one's layout is theirs.

        Empty where it is ``colocated``.
        """
        if self.placement == "colocated":
            return ()
        rewards = tuple(f"reward{index}" for index in range(len(self.reward_model_paths)))
        return ("critic", *rewards) if self.ppo.needs_critic else rewards

    @property
    def trained_roles(self) -> tuple[Fp8Role, ...]:
        """See `RunConfig`."""
        return ("actor", "critic") if self.ppo.needs_critic else ("actor",)

    def critic_ranks_of(self, world_size: int) -> range:
        """The ranks of those models: the last ones of the world; none where all are ``colocated``."""
        roles = self.on_critic_ranks
        sizes = [self.parallel_of(role).sizes(1) for role in roles]
        # Replicas that share experts come together.
        replica = math.lcm(*(each.model_parallel_size * each.joined_replicas for each in sizes))
        count = (self.critic_ranks or replica) if roles else 0
        return range(max(world_size - count, 0), world_size)

    def ranks_of(self, role: str, world_size: int) -> range:
        """See `RunConfig`."""
        theirs = self.critic_ranks_of(world_size)
        return theirs if role in self.on_critic_ranks else range(theirs.start)

    @property
    def smallest_world(self) -> int:
        """See `RunConfig`."""
        return super().smallest_world + len(self.critic_ranks_of(10**9))

    @property
    def critic_path(self) -> str:
        """The folder that the critic starts from."""
        return self.critic.path or next(iter(self.reward_model_paths), self.actor.path)

    @property
    def ptx_batch_size(self) -> int:
        """Rows of a language modelling step, over all ranks."""
        return self.ptx.batch_size or self.ppo.minibatch_size

    @property
    def keeps_rollout_logprobs(self) -> bool:
        """Whether the sampler's log-probs are kept with its rows."""
        return self.rollout.logprobs or self.ppo.importance_cap is not None

    @property
    def needs_reference(self) -> bool:
        """Whether the run has a reference: for its updates, for the KL that is logged, or for evaluations."""
        return self.ppo.uses_reference or bool(self.trainer.eval_interval)

    @property
    def reference_path(self) -> str:
        """The folder of the reference."""
        return self.reference.path or self.actor.path

    @property
    def tokenizer_path(self) -> str:
        """The folder or file of the tokenizer."""
        return self.tokenizer.path or self.actor.path

    @property
    def output_dir(self) -> Path:
        """The run's folder."""
        return Path(self.trainer.output_dir)

    def model_folders(self) -> dict[str, str]:
        """Folders that must hold a model, by key."""
        folders = {"actor.path": self.actor.path, "reference.path": self.reference_path}
        if self.ppo.needs_critic:
            folders["critic.path"] = self.critic_path
        for index, source in enumerate(self.reward.sources):
            if isinstance(source, RewardModelSource):
                folders[f"reward.sources[{index}].path"] = source.path
        return folders

    def data_files(self) -> dict[str, str | None]:
        """Files that must exist where they are given, by key."""
        return {
            "data.prompts": self.data.prompts,
            "evaluation.prompts": self.evaluation.prompts,
            "ptx.path": self.ptx.path,
            "tokenizer.chat_template": template_file(self.tokenizer.chat_template),
        }

    def with_derived_paths(self) -> Self:
        """The same configuration with the paths that follow from others written out."""
        update: dict[str, Section] = {"reference": self.reference.model_copy(update={"path": self.reference_path})}
        if self.ppo.needs_critic:
            update["critic"] = self.critic.model_copy(update={"path": self.critic_path})
        return super().with_derived_paths().model_copy(update=update)

    @model_validator(mode="after")
    def _fits_together(self) -> PPOConfig:
        problems = self.ppo.problems(
            semantics=self.semantics,
            samples_per_prompt=self.rollout.samples_per_prompt,
            iterations=self.trainer.iterations,
        )
        for role, adam in (("actor", self.optimizer.actor), ("critic", self.optimizer.critic)):
            waits = self.ppo.critic_warmup_iterations if role == "actor" else 0
            if adam.warmup_iterations > self.trainer.iterations - waits:
                less = f" less ppo.critic_warmup_iterations {waits}" if waits else ""
                problems.append(
                    f"optimizer.{role}.warmup_iterations {adam.warmup_iterations} are over "
                    f"trainer.iterations {self.trainer.iterations}{less}"
                )
        problems += self._placement_problems() + self._old_logprob_problems()
        if self.ptx.path is None:
            fields = type(self.ptx).model_fields
            given = [name for name, field in fields.items() if getattr(self.ptx, name) != field.default]
            problems += [f"ptx.{name} has no meaning without ptx.path" for name in given]
        if self.trainer.eval_interval and self.evaluation.prompts is None:
            problems.append("trainer.eval_interval needs evaluation.prompts, a file of held-out prompts")
        if self.rollout.temperature == 0 and self.rollout.samples_per_prompt > 1:
            problems.append(
                f"rollout.samples_per_prompt {self.rollout.samples_per_prompt} would be copies of one greedy response; "
                "raise rollout.temperature above 0, or sample once"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _old_logprob_problems(self) -> list[str]:
        if not self.ppo.skip_old_logprobs:
            return []
        return self.ppo.old_logprob_problems(
            semantics=self.semantics,
            rows=self.rows_per_iteration,
            dropout=self.actor.dropout,
            sampled=self.keeps_rollout_logprobs,
        )

    def _placement_problems(self) -> list[str]:
        if self.placement == "colocated":
            if self.critic_ranks is None:
                return []
            return [
                f"critic_ranks {self.critic_ranks} has no meaning with placement colocated; set placement=split, or "
                "leave it out"
            ]
        if self.on_critic_ranks:
            return []
        return [
            f"placement split puts critic and reward models on ranks of their own, but ppo.advantage "
            f"{self.ppo.advantage} needs no critic and reward.sources names no model; set placement=colocated"
        ]
