"""The plain settings that parts of the trainer take, read from a configuration."""

from __future__ import annotations

from mrlhf.config_schema import PPOConfig
from mrlhf.config_sections import InferenceConfig
from mrlhf.roles.actor import PolicyLossSettings
from mrlhf.roles.micro_batches import Cut
from mrlhf.rollout.sampling import SamplingParams
from mrlhf.trainer.experience import ShapingSettings
from mrlhf.trainer.updates import UpdateSettings


def inference_cut(settings: InferenceConfig) -> Cut:
    """Of the passes without gradient."""
    return Cut(settings.micro_batch_size, settings.micro_batch_tokens, settings.packing)


def shaping_settings(config: PPOConfig) -> ShapingSettings:
    """Of reward shaping and advantages."""
    ppo = config.ppo
    return ShapingSettings(
        semantics=config.semantics,
        estimator=ppo.advantage,
        grpo_normalize_std=ppo.grpo_normalize_std,
        kl_coef=ppo.kl_coef,
        kl_kind=ppo.kl_kind,
        score_clip=ppo.score_clip,
        gamma=ppo.gamma,
        gae_lambda=ppo.gae_lambda,
        whiten_rewards=ppo.whiten_rewards,
        whiten_advantages=ppo.whiten_advantages,
        bootstrap_truncated=ppo.bootstrap_truncated,
        missing_eos_penalty=config.reward.missing_eos_penalty,
        temperature=config.rollout.temperature,
    )


def update_settings(config: PPOConfig) -> UpdateSettings:
    """Of the optimizer steps."""
    ppo = config.ppo
    policy = PolicyLossSettings(
        clip_eps=ppo.clip_eps,
        dual_clip=ppo.dual_clip,
        importance_cap=ppo.importance_cap,
        entropy_coef=ppo.entropy_coef,
        log_entropy=ppo.log_entropy,
        kl_loss_coef=ppo.kl_loss_coef,
        kl_loss_kind=ppo.kl_loss_kind,
        temperature=config.rollout.temperature,
        fixed_length=_fixed_length(config),
        on_policy=ppo.skip_old_logprobs,
    )
    return UpdateSettings(
        policy=policy,
        semantics=config.semantics,
        epochs=ppo.epochs,
        minibatch_size=ppo.minibatch_size,
        micro_batch_size=ppo.micro_batch_size,
        micro_batch_tokens=ppo.micro_batch_tokens,
        packing=ppo.packing,
        shuffle=ppo.shuffle,
        value_clip=ppo.value_clip,
        ds_group_size=ppo.ds_group_size or ppo.minibatch_size,
        loss_aggregation=ppo.loss_aggregation,
        max_response_length=config.rollout.max_response_length,
        target_approx_kl=ppo.target_approx_kl,
        max_bad_steps=config.trainer.max_bad_steps,
        seed=config.seed,
    )


def _fixed_length(config: PPOConfig) -> int | None:
    return config.rollout.max_response_length if config.ppo.loss_aggregation == "fixed_length" else None


def sampling_params(config: PPOConfig) -> SamplingParams:
    """Of the rollout."""
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        repetition_penalty=rollout.repetition_penalty,
    )
