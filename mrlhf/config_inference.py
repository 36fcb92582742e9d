"""The configurations of `mrlhf generate` and `mrlhf eval`: a PPO run's, of which the training part may be left out."""

from __future__ import annotations

from pydantic import Field

from mrlhf.config_rewards import RewardConfig, RewardFunctionSource
from mrlhf.config_schema import PPOAlgorithmConfig, PPOConfig, RolloutConfig, TrainerConfig
from mrlhf.config_sections import PositiveInt


class InferenceRolloutConfig(RolloutConfig):
    """How responses are sampled."""

    prompts_per_iteration: PositiveInt = Field(1, description="of no effect here; part of a PPO run's configuration")


class InferenceAlgorithmConfig(PPOAlgorithmConfig):
    """The PPO update: of no effect here."""

    minibatch_size: PositiveInt = Field(1, description="of no effect here; part of a PPO run's configuration")


class InferenceTrainerConfig(TrainerConfig):
    """Output."""

    iterations: PositiveInt = Field(1, description="of no effect here; part of a PPO run's configuration")


class EvalConfig(PPOConfig):
    """Everything that defines an evaluation; any configuration of a PPO run is one."""

    rollout: InferenceRolloutConfig = Field(description="sampling")
    ppo: InferenceAlgorithmConfig = Field(
        default_factory=lambda: InferenceAlgorithmConfig(), description="of no effect here"
    )
    trainer: InferenceTrainerConfig = Field(default_factory=lambda: InferenceTrainerConfig(), description="output")

    def model_folders(self) -> dict[str, str]:
        """Folders that must hold a model, by key; there is no critic."""
        return {key: path for key, path in super().model_folders().items() if key != "critic.path"}

    @property
    def on_critic_ranks(self) -> tuple[str, ...]:
        """None: without a critic there is little to do at the same time, so that all models are on all ranks."""
        return ()

    @property
    def needs_reference(self) -> bool:
        """Always: it answers beside the actor."""
        return True

    def _placement_problems(self) -> list[str]:
        return []

    def _old_logprob_problems(self) -> list[str]:
        return []


class GenerateConfig(EvalConfig):
    """Everything that defines a generation; any configuration of a PPO run is one."""

    reward: RewardConfig = Field(
        default_factory=lambda: RewardConfig(sources=(RewardFunctionSource(target="none:none"),)),
        description="of no effect here; part of a PPO run's configuration",
    )

    def model_folders(self) -> dict[str, str]:
        """Folders that must hold a model, by key: the actor's."""
        return {"actor.path": self.actor.path}
