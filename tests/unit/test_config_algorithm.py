"""Which options of the update go together, and which defaults depend on the estimator."""

from __future__ import annotations

import pytest

from mrlhf.config import PPOConfig, load_config, option_table, to_yaml
from mrlhf.config_inference import EvalConfig
from mrlhf.errors import ConfigError

BASE = (
    "actor.path=actor",
    "reward.sources=[{kind: function, target: 'rewards:score'}]",
    "data.prompts=prompts.jsonl",
    "rollout.prompts_per_iteration=8",
    "rollout.max_response_length=16",
    "ppo.minibatch_size=8",
    "trainer.iterations=4",
)
GROUPS = "rollout.samples_per_prompt=4"
SKIP = "ppo.skip_old_logprobs=true"


def load(*overrides: str) -> PPOConfig:
    return load_config(None, [*BASE, *overrides])


@pytest.mark.parametrize(
    ("overrides", "kl_coef", "kl_loss_coef"),
    [
        ([], 0.1, 0.0),
        (["ppo.advantage=rloo", GROUPS], 0.1, 0.0),
        (["ppo.advantage=reinforce_plus_plus"], 0.1, 0.0),
        (["ppo.advantage=grpo", GROUPS], 0.0, 0.04),
        (["ppo.advantage=grpo", GROUPS, "ppo.kl_coef=0.01", "ppo.kl_loss_coef=0"], 0.01, 0.0),
    ],
)
def test_where_the_kl_goes(overrides: list[str], kl_coef: float, kl_loss_coef: float) -> None:
    ppo = load(*overrides).ppo
    assert (ppo.kl_coef, ppo.kl_loss_coef) == (kl_coef, kl_loss_coef)


def test_without_a_critic_none_is_looked_for(tmp_path: object) -> None:
    config = load("ppo.advantage=grpo", GROUPS)
    assert "critic.path" not in config.model_folders()
    assert config.critic.path is None
    assert "critic.path" in load().model_folders()
    # One file serves PPO and the estimators without a critic.
    load("ppo.advantage=grpo", GROUPS, "critic.path=reward", "critic.head=fresh", "optimizer.critic.lr=0.1")
    # What a run writes down can be read again.
    assert load_config(None, [*BASE, "ppo.advantage=grpo", GROUPS]) == config
    from pathlib import Path

    written = Path(str(tmp_path)) / "config.yaml"
    written.write_text(to_yaml(config))
    assert load_config(written) == config


REFUSED = {
    "grpo compares responses to the same prompt: rollout.samples_per_prompt must be at least 2, not 1": [
        "ppo.advantage=grpo"
    ],
    "rloo compares responses": ["ppo.advantage=rloo"],
    "ppo.value_clip has no meaning with ppo.advantage rloo": ["ppo.advantage=rloo", GROUPS, "ppo.value_clip=0.3"],
    "ppo.gae_lambda has no meaning": ["ppo.advantage=reinforce_plus_plus", "ppo.gae_lambda=0.9"],
    "ppo.gamma has no meaning with ppo.advantage grpo": ["ppo.advantage=grpo", GROUPS, "ppo.gamma=0.9"],
    "ppo.bootstrap_truncated has no meaning": ["ppo.advantage=rloo", GROUPS, "ppo.bootstrap_truncated=true"],
    "ppo.critic_warmup_iterations has no meaning": ["ppo.advantage=rloo", GROUPS, "ppo.critic_warmup_iterations=1"],
    "ppo.whiten_rewards has no meaning": ["ppo.advantage=rloo", GROUPS, "ppo.whiten_rewards=true"],
    "ppo.grpo_normalize_std has no meaning with ppo.advantage gae": ["ppo.grpo_normalize_std=false"],
    "ppo.critic_warmup_iterations 4 leave nothing": ["ppo.critic_warmup_iterations=4"],
    "ppo.kl_target steers ppo.kl_coef by factors": ["ppo.kl_target=6", "ppo.kl_coef=0"],
    "ppo.advantage rloo needs semantics=standard": ["ppo.advantage=rloo", GROUPS, "semantics=deepspeed_chat"],
    "ppo.loss_aggregation must be token": ["ppo.loss_aggregation=sequence", "semantics=deepspeed_chat"],
    "ppo.ema_decay": ["ppo.ema_decay=1.0"],
    "ppo.skip_old_logprobs: ppo.epochs is 2, and later passes": [SKIP, "ppo.kl_coef=0", "ppo.epochs=2"],
    "set ppo.minibatch_size=8, or set ppo.skip_old_logprobs=false": [SKIP, "ppo.kl_coef=0", "ppo.minibatch_size=7"],
    "ppo.skip_old_logprobs: actor.dropout is 0.1": [SKIP, "ppo.kl_coef=0", "actor.dropout=0.1"],
    "ppo.skip_old_logprobs: semantics is deepspeed_chat": [SKIP, "ppo.kl_coef=0", "semantics=deepspeed_chat"],
    "ppo.kl_coef 0.1 puts the policy's log-probs into the reward; set rollout.logprobs=true": [SKIP],
}


@pytest.mark.parametrize("message", REFUSED)
def test_nonsense_is_refused_by_key(message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*REFUSED[message])
    assert message in str(caught.value)


def test_what_needs_the_reference() -> None:
    """Without the pass for old log-probs the KL is logged only where it is used."""
    assert load().needs_reference
    assert load("ppo.kl_coef=0").needs_reference
    assert not load(SKIP, "ppo.kl_coef=0").needs_reference
    for used in (["rollout.logprobs=true"], ["ppo.importance_cap=2"], ["ppo.kl_coef=0", "ppo.kl_loss_coef=0.1"]):
        config = load(SKIP, *used)
        assert config.needs_reference
        assert config.ppo.uses_reference
    # Held-out prompts are answered by both.
    config = load(SKIP, "ppo.kl_coef=0", "trainer.eval_interval=2", "evaluation.prompts=held_out.jsonl")
    assert config.needs_reference
    assert not config.ppo.uses_reference
    # A minibatch may be larger than the rows that there are.
    assert load(SKIP, "ppo.kl_coef=0", "ppo.minibatch_size=16").ppo.skip_old_logprobs


def test_an_evaluation_takes_the_configuration_of_a_run_as_it_is() -> None:
    config = load_config(None, [*BASE, SKIP, "rollout.prompts_per_iteration=64"], EvalConfig)
    assert config.needs_reference


def test_clips_can_be_turned_off() -> None:
    ppo = load("ppo.score_clip=null", "ppo.value_clip=null").ppo
    assert ppo.score_clip is None
    assert ppo.value_clip is None
    assert load("ppo.gamma=0.9", "ppo.advantage=reinforce_plus_plus").ppo.gamma == 0.9


def test_the_size_of_a_text_batch_is_checked_with_the_others() -> None:
    from mrlhf.config import check_run

    config = load("ptx.path=texts.jsonl", "ptx.batch_size=3")
    with pytest.raises(ConfigError, match=r"ptx\.batch_size 3 is not a multiple of DP 2"):
        check_run(config, 2, {})
    check_run(load("ptx.path=texts.jsonl"), 2, {})
    assert load("ptx.path=texts.jsonl").ptx_batch_size == 8


def test_every_option_is_described() -> None:
    options = {option.name: option for option in option_table(PPOConfig)}
    for name in ("ppo.advantage", "ppo.loss_aggregation", "ppo.kl_target", "ppo.ema_decay", "ptx.unsup_coef"):
        assert options[name].description
    assert options["ppo.advantage"].type == "gae|grpo|rloo|reinforce_plus_plus"
    assert options["ptx.unsup_coef"].default == "27.8"
