"""The part of a PPO run's configuration that says how advantages become updates.

The objects are frozen and refuse unknown keys.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mrlhf.config_sections import Fraction, NaturalInt, NonNegativeFloat, PositiveFloat, PositiveInt, Section

KLKind = Literal["k1", "k2", "k3", "abs"]
Estimator = Literal["gae", "grpo", "rloo", "reinforce_plus_plus"]
Aggregation = Literal["token", "sequence", "fixed_length"]


class PPOAlgorithmConfig(Section):
    """The update: how advantages are estimated, and what is done with them."""

    advantage: Estimator = Field(
        "gae", description="estimator of advantages; all but gae, which is PPO's, train without a critic"
    )
    epochs: PositiveInt = Field(1, description="passes over each iteration's rows")
    minibatch_size: PositiveInt = Field(description="rows of one optimizer step, over all ranks")
    micro_batch_size: PositiveInt = Field(1, description="rows of one forward and backward pass on one rank")
    micro_batch_tokens: PositiveInt | None = Field(
        None,
        description="tokens of one forward and backward pass, padding included, instead of micro_batch_size rows; a "
        "longer row is passed alone",
    )
    packing: bool = Field(
        False,
        description="lay the rows of a micro-batch one after the other without padding; changes speed only, and what "
        "actor.moe_aux_loss_coef balances",
    )
    skip_old_logprobs: bool = Field(
        False,
        description="no pass for the log-probs before the updates: with epochs 1 and one minibatch they are those of "
        "the update itself, and the KL in the reward is the sampler's (rollout.logprobs)",
    )
    shuffle: bool = Field(True, description="a new order of the rows in every epoch")
    kl_coef: NonNegativeFloat = Field(
        0.1, description="weight of the KL penalty inside the reward; with advantage grpo 0 where it is not given"
    )
    kl_target: PositiveFloat | None = Field(
        None, description="KL of a whole response that kl_coef is steered towards; null: kl_coef stays"
    )
    kl_horizon: PositiveFloat = Field(10000, description="responses over which kl_coef is steered; fewer: faster")
    kl_kind: KLKind = Field("k1", description="estimator of that KL")
    score_clip: PositiveFloat | None = Field(
        5.0, description="scores are clamped to plus and minus this; null: they are not"
    )
    importance_cap: PositiveFloat | None = Field(
        None,
        description="weigh each token's policy loss by exp(old log-prob - the sampler's), at most this; null: do not",
    )
    clip_eps: PositiveFloat = Field(0.2, description="the ratio is clipped to 1 plus and minus this")
    value_clip: PositiveFloat | None = Field(
        0.2, description="values are clipped to the old ones plus and minus this; null: they are not"
    )
    gamma: Fraction = Field(1.0, description="discount of later rewards")
    gae_lambda: Fraction = Field(0.95, description="discount of later temporal differences")
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = Field(
        None, description="bound on the loss of tokens with negative advantage, as a ratio"
    )
    entropy_coef: NonNegativeFloat = Field(0.0, description="weight of the entropy bonus")
    kl_loss_coef: NonNegativeFloat = Field(
        0.0, description="weight of the KL as a term of the loss; with advantage grpo 0.04 where it is not given"
    )
    kl_loss_kind: KLKind = Field("k3", description="estimator of that KL")
    whiten_advantages: bool = Field(False, description="advantages of mean 0 and variance 1 over all ranks")
    whiten_rewards: bool = Field(False, description="rewards of variance 1 over all ranks, mean kept")
    bootstrap_truncated: bool = Field(False, description="value after the last token of a response cut off by length")
    grpo_normalize_std: bool = Field(True, description="grpo: divide by the group's deviation; false: Dr. GRPO")
    loss_aggregation: Aggregation = Field(
        "token",
        description="mean over tokens, mean over rows of their token means, or sum over rows x max_response_length",
    )
    target_approx_kl: PositiveFloat | None = Field(
        None, description="the actor's updates of an iteration stop where approx_kl of a minibatch is above this"
    )
    critic_warmup_iterations: NaturalInt = Field(0, description="first iterations, in which only the critic is trained")
    ema_decay: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="keep an average of the actor with this decay and export it as ema; DeepSpeed-Chat's is 0.992"
    )
    log_entropy: bool = Field(False, description="log the entropy also when entropy_coef is 0")
    ds_group_size: PositiveInt | None = Field(
        None,
        description="deepspeed_chat only: rows whose token mean is taken; null: minibatch_size, whatever the layout",
    )

    @property
    def needs_critic(self) -> bool:
        """Whether advantages come from a value model."""
        return self.advantage == "gae"

    @property
    def uses_reference(self) -> bool:
        """Whether sampled rows go through the reference: always where the KL to it can be logged."""
        return not self.skip_old_logprobs or self.kl_coef != 0 or self.kl_loss_coef != 0

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_estimator(cls, data: Any) -> Any:
        """GRPO has its KL in the loss (DeepSeekMath's coefficient), the others have it in the reward."""
        if isinstance(data, dict) and data.get("advantage") == "grpo":
            return {"kl_coef": 0.0, "kl_loss_coef": 0.04, **data}
        return data

    def problems(self, *, semantics: str, samples_per_prompt: int, iterations: int) -> list[str]:
        """What does not go together inside this section and with the rest of the configuration."""
        found = self._chat_problems() if semantics == "deepspeed_chat" else []
        if semantics != "deepspeed_chat" and self.ds_group_size is not None:
            found.append(f"ppo.ds_group_size {self.ds_group_size} has a meaning only with semantics=deepspeed_chat")
        if self.kl_target is not None and not self.kl_coef:
            found.append("ppo.kl_target steers ppo.kl_coef by factors, so that must be above 0 to begin with")
        if self.kl_target is None and self.kl_horizon != type(self).model_fields["kl_horizon"].default:
            found.append("ppo.kl_horizon has no meaning without ppo.kl_target; leave it out")
        if self.critic_warmup_iterations >= iterations:
            found.append(
                f"ppo.critic_warmup_iterations {self.critic_warmup_iterations} leave nothing for the actor of "
                f"trainer.iterations {iterations}; lower the one or raise the other"
            )
        return found + self._estimator_problems(samples_per_prompt)

    def old_logprob_problems(self, *, semantics: str, rows: int, dropout: float, sampled: bool) -> list[str]:
        """Why the pass of ``skip_old_logprobs`` cannot be left out.

        Args:
            semantics: of the run.
            rows: of one iteration, over all ranks.
            dropout: the actor's.
            sampled: whether the sampler's log-probs are kept.
        """
        found = []
        if self.epochs > 1:
            found.append(f"ppo.epochs is {self.epochs}, and later passes need the log-probs before the first; set 1")
        if rows > self.minibatch_size:
            found.append(
                f"the {rows} rows of an iteration (rollout.prompts_per_iteration x samples_per_prompt) are more than "
                f"one minibatch; set ppo.minibatch_size={rows}"
            )
        if dropout:
            found.append(
                f"actor.dropout is {dropout:g}, and a pass with dropout does not have the log-probs of the policy that "
                "sampled; set 0"
            )
        if semantics == "deepspeed_chat":
            found.append(
                "semantics is deepspeed_chat, whose KL has a position after the response, and whose rows may be those "
                "of an earlier rollout; set semantics=standard"
            )
        if self.kl_coef and not sampled:
            found.append(
                f"ppo.kl_coef {self.kl_coef:g} puts the policy's log-probs into the reward; set rollout.logprobs=true "
                "(the sampler's are taken), or ppo.kl_coef=0"
            )
        advice = "or set ppo.skip_old_logprobs=false"
        return [f"ppo.skip_old_logprobs: {problem}, {advice}" for problem in found]

    def _chat_problems(self) -> list[str]:
        found = []
        if self.whiten_advantages:
            found.append("ppo.whiten_advantages must be false: semantics deepspeed_chat never whitens them")
        if not self.needs_critic:
            found.append(f"ppo.advantage {self.advantage} needs semantics=standard; DeepSpeed-Chat knows gae only")
        if self.loss_aggregation != "token":
            found.append("ppo.loss_aggregation must be token: semantics deepspeed_chat has a mean of its own")
        group = self.ds_group_size
        if group is not None and self.minibatch_size % group:
            found.append(f"ppo.minibatch_size {self.minibatch_size} is not a multiple of ppo.ds_group_size {group}")
        return found

    def _estimator_problems(self, samples_per_prompt: int) -> list[str]:
        found, foreign = [], []
        if self.advantage in ("grpo", "rloo"):
            if samples_per_prompt < 2:
                found.append(
                    f"ppo.advantage {self.advantage} compares responses to the same prompt: "
                    f"rollout.samples_per_prompt must be at least 2, not {samples_per_prompt}"
                )
            foreign += ["gamma", "whiten_rewards"]
        if not self.needs_critic:
            foreign += ["gae_lambda", "value_clip", "bootstrap_truncated", "critic_warmup_iterations"]
        if self.advantage != "grpo":
            foreign.append("grpo_normalize_std")
        for name in foreign:
            if getattr(self, name) != type(self).model_fields[name].default:
                found.append(f"ppo.{name} has no meaning with ppo.advantage {self.advantage}; leave it out")
        return found


class PTXConfig(Section):
    """Language modelling beside the updates (PPO-ptx), against forgetting: a step of its own after each of PPO's."""

    path: str | None = Field(None, description="file of texts to learn from, as for `mrlhf sft`; null: no such steps")
    unsup_coef: PositiveFloat = Field(27.8, description="weight of the language modelling loss (InstructGPT's)")
    batch_size: PositiveInt | None = Field(None, description="rows of a step, over all ranks; null: ppo.minibatch_size")
    max_length: PositiveInt | None = Field(None, description="longest row in tokens; null: what the actor takes")
    overlong: Literal["error", "drop", "truncate"] = Field(
        "error", description="longer rows: refuse, leave out and count, or keep the first tokens"
    )
    skip_bad_lines: bool = Field(False, description="leave malformed rows out and count them")
