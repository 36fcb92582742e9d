"""The configuration: merged, strict, and every mistake named with its key."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from mrlhf.config import PPOConfig, check_files, check_run, layout_problems, load_config, option_table, to_yaml
from mrlhf.errors import ConfigError
from mrlhf.model_config import ModelConfig

VALID = """
actor: {path: models/actor}
data: {prompts: prompts.jsonl}
reward:
  sources:
    - {kind: model, path: models/reward}
    - {kind: function, target: "package.module:score", weight: 0.5}
rollout: {prompts_per_iteration: 8, samples_per_prompt: 2, max_response_length: 16}
ppo: {minibatch_size: 4}
trainer: {iterations: 3}
optimizer: {actor: {lr: 1e-6}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(VALID)
    return path


def refusal(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_defaults_and_derived_paths(file: Path) -> None:
    config = load_config(file)
    assert config.rows_per_iteration == 16
    assert config.critic_path == config.critic.path == "models/reward"
    assert config.reference_path == config.tokenizer_path == "models/actor"
    assert (config.optimizer.actor.lr, config.optimizer.critic.lr) == (1e-6, 5e-6)
    ppo = config.ppo
    assert (ppo.kl_coef, ppo.score_clip, ppo.clip_eps, ppo.value_clip) == (0.1, 5, 0.2, 0.2)
    assert (ppo.gamma, ppo.gae_lambda) == (1, 0.95)
    only_function = load_config(file, ["reward.sources=[{kind: function, target: 'a.b:c'}]"])
    assert only_function.critic_path == "models/actor"


def test_overrides_win_and_reach_into_lists(file: Path) -> None:
    config = load_config(
        file,
        [
            "ppo.epochs=2",
            "reward.sources[0].weight=2",
            "rollout.stop_token_ids=[1,2]",
            "optimizer.critic.lr=1e-4",
            "critic.path=${actor.path}",
            "ppo.dual_clip=null",
        ],
    )
    assert config.ppo.epochs == 2
    assert config.reward.sources[0].weight == 2
    assert config.rollout.stop_token_ids == (1, 2)
    assert config.optimizer.critic.lr == 1e-4
    assert config.critic.path == "models/actor"
    assert config.ppo.dual_clip is None


def test_yaml_round_trip(file: Path, tmp_path: Path) -> None:
    config = load_config(file, ["seed=7", "optimizer.actor.eps=1e-9"])
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load_config(again) == config


def test_frozen(file: Path) -> None:
    config = load_config(file)
    with pytest.raises(ValidationError):
        config.seed = 3


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("ppo.epoch=2", "ppo.epoch: unknown key; did you mean ppo.epochs?"),
        ("ppo.lr=1", "did you mean optimizer.actor.lr or optimizer.critic.lr?"),
        ("tensor_model_parallel_size=2", "did you mean parallel.tensor_model_parallel_size?"),
        ("reward.sources[1].weigth=1", "reward.sources[1].weigth: unknown key; did you mean reward.sources[1].weight?"),
        ("parallel.zzzzzzzzzzzz=1", "the keys here are tensor_model_parallel_size"),
    ],
)
def test_unknown_keys_name_the_nearest(file: Path, override: str, suggestion: str) -> None:
    assert suggestion in refusal(file, override)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("ppo.gamma=abc", ["ppo.gamma: given 'abc'", "number"]),
        ("ppo.gamma=1.5", ["ppo.gamma: given 1.5", "at most 1"]),
        ("ppo.gamma=.nan", ["ppo.gamma: given nan"]),
        ("ppo.clip_eps=.inf", ["ppo.clip_eps: given inf", "finite"]),
        ("ppo.epochs=true", ["ppo.epochs: given True", "integer"]),
        ("ppo.epochs=1.5", ["ppo.epochs: given 1.5", "integer"]),
        ("ppo.epochs=0", ["ppo.epochs: given 0", "at least 1"]),
        ("semantics=trl", ["semantics: given 'trl'", "'standard' or 'deepspeed_chat'"]),
        ("rollout=3", ["rollout: given 3", "a mapping of keys to values"]),
        ("reward.sources[0].kind=foo", ["reward.sources[0].kind: given 'foo'", "'model', 'function'"]),
        ("reward.sources=[{path: x}]", ["reward.sources[0]: given {'path': 'x'}", "kind: model"]),
        ("reward.sources=[]", ["reward: sources is empty"]),
        ("reward.sources[1].target=nocolon", ["reward.sources[1].target: given 'nocolon'"]),
        ("optimizer.critic.min_lr=1", ["optimizer.critic: min_lr 1.0 is over lr 5e-06"]),
        ("optimizer.actor.warmup_iterations=9", ["optimizer.actor.warmup_iterations 9", "trainer.iterations 3"]),
        ("ppo.ds_group_size=2", ["ppo.ds_group_size 2", "semantics=deepspeed_chat"]),
        ("rollout.temperature=0", ["samples_per_prompt 2", "greedy"]),
        ("ppo", ["'ppo'", "expected key=value"]),
        ("seed=[1", ["'seed=[1'", "not valid YAML"]),
        ("reward.sources[7].weight=1", ["reward.sources[7].weight=1"]),
        ("actor.path=${nowhere}", ["nowhere"]),
        ("actor.path=???", ["actor.path"]),
    ],
)
def test_bad_values_name_key_value_and_expectation(file: Path, override: str, parts: list[str]) -> None:
    message = refusal(file, override)
    for part in parts:
        assert part in message


def test_deepspeed_chat_rules(file: Path) -> None:
    assert load_config(file, ["semantics=deepspeed_chat", "ppo.ds_group_size=2"]).ppo.ds_group_size == 2
    assert "not a multiple of ppo.ds_group_size 3" in refusal(file, "semantics=deepspeed_chat", "ppo.ds_group_size=3")
    assert "whiten_advantages" in refusal(file, "semantics=deepspeed_chat", "ppo.whiten_advantages=true")


def test_all_mistakes_in_one_message(file: Path) -> None:
    message = refusal(file, "ppo.epoch=2", "ppo.gamma=abc", "rollout.max_response_length=0")
    assert str(file) in message
    assert message.count("\n") == 3


def test_nothing_given_names_what_is_required() -> None:
    message = refusal(None)
    for key in ("actor.path", "reward.sources", "data.prompts", "ppo.minibatch_size", "trainer.iterations"):
        assert f"{key}: required" in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a: 1\nb: {c: 1\nd: 2\n", [":3:", "not valid YAML"]),
        ("a: 1\na: 2\n", [":2:", "duplicate key a"]),
        ("- 1\n", ["a mapping of keys to values", "list"]),
        ("", ["actor.path: required"]),
    ],
)
def test_bad_files_name_file_and_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    message = refusal(path)
    assert str(path) in message
    for part in parts:
        assert part in message


def test_unreadable_files(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "none.yaml")
    assert "is a folder" in refusal(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00a")
    assert "cannot be read as YAML" in refusal(tmp_path / "binary.yaml")


def test_option_table_is_complete_and_described(file: Path) -> None:
    options = {option.name: option for option in option_table(PPOConfig)}
    assert all(option.description and option.type for option in options.values())
    assert options["ppo.kl_coef"][1:3] == ("float", "0.1")
    assert options["actor.path"][1:3] == ("str", "required")
    assert options["critic.head"].type == "auto|loaded|fresh"
    assert options["optimizer.critic.lr"].default == "5e-06"
    assert options["parallel.virtual_pipeline_model_parallel_size"][1:3] == ("int or null", "null")

    def leaves(tree: object, prefix: str = "") -> set[str]:
        if isinstance(tree, dict):
            return {name for key, value in tree.items() for name in leaves(value, f"{prefix}.{key}" if prefix else key)}
        return {prefix}

    assert leaves(yaml.safe_load(to_yaml(load_config(file)))) == {name for name in options if "[]" not in name}


def test_missing_files_are_named_together(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "actor"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    prompts = tmp_path / "prompts.jsonl"
    overrides = [f"actor.path={folder}", f"data.prompts={prompts}", f"reward.sources[0].path={tmp_path}"]
    config = load_config(file, overrides)
    with pytest.raises(ConfigError) as caught:
        check_files(config)
    message = str(caught.value)
    assert f"data.prompts: {prompts} is not a file" in message
    assert f"reward.sources[0].path: {tmp_path} has no config.json" in message
    assert "actor.path" not in message
    prompts.write_text("{}\n")
    check_files(config, sections=("actor", "data", "tokenizer"))
    with pytest.raises(ConfigError, match="reward"):
        check_files(config)


def test_check_run_needs_no_process_group(file: Path) -> None:
    model = ModelConfig("llama", 64, 4, 4, 2, 16, 128, 97, 256)
    config = load_config(file, ["parallel.tensor_model_parallel_size=4", "data.max_prompt_length=250"])
    with pytest.raises(ConfigError) as caught:
        check_run(config, 6, {"actor": model, "reward": model})
    message = str(caught.value)
    for part in ("world size 6", "actor: 2 key-value heads", "250 prompt + 16 response", "reward: "):
        assert part in message
    check_run(load_config(file, ["data.max_prompt_length=240"]), 4, {"actor": model})


def test_a_cache_that_holds_no_row_is_refused_before_the_run(file: Path) -> None:
    model = ModelConfig("llama", 64, 4, 4, 2, 16, 128, 97, 256)
    layout = ["parallel.pipeline_model_parallel_size=2", "data.max_prompt_length=48"]
    # Three rows of 64 tokens, in two layers of each stage 2 x 2 heads x 16 numbers a token: 3 x 32 KiB.
    needed = 3 * 2 * 2 * 64 * 2 * 16 * 4
    check_run(load_config(file, [*layout, f"rollout.kv_cache_memory={needed / 2**30}"]), 2, {"actor": model})
    with pytest.raises(ConfigError, match=r"rollout.kv_cache_memory .* 3 rows .* 64 tokens, .* lower") as caught:
        check_run(load_config(file, [*layout, f"rollout.kv_cache_memory={(needed - 1) / 2**30}"]), 2, {"actor": model})
    advice = str(caught.value).split("set it to ")[1].split()[0]
    check_run(load_config(file, [*layout, f"rollout.kv_cache_memory={advice}"]), 2, {"actor": model})
    half = [*layout, f"rollout.kv_cache_memory={needed / 2**31}", "precision.dtype=bf16"]
    check_run(load_config(file, half), 2, {"actor": model})


def test_stop_strings_and_penalty_are_checked(file: Path) -> None:
    config = load_config(file, ["rollout.stop_strings=['a b', '###']", "rollout.repetition_penalty=1.2"])
    assert config.rollout.stop_strings == ("a b", "###")
    assert "rollout.stop_strings" in refusal(file, "rollout.stop_strings=['']")
    assert "rollout.repetition_penalty" in refusal(file, "rollout.repetition_penalty=0")
    assert "rollout.kv_cache_memory" in refusal(file, "rollout.kv_cache_memory=0")


@pytest.mark.parametrize("training", [True, False])
def test_models_are_checked_under_their_own_layout(file: Path, training: bool) -> None:
    """Also where nothing is trained: two key-value heads do not go over the actor's TP 4, but over the own TP 2."""
    actor = ModelConfig("llama", 64, 4, 4, 4, 16, 128, 97, 256)
    models = {"actor": actor, "reward0": ModelConfig("llama", 64, 4, 4, 2, 16, 128, 97, 256)}

    def problems(*overrides: str) -> list[str]:
        config = load_config(file, ["parallel.tensor_model_parallel_size=4", *overrides])
        return layout_problems(config, 4, models, max_response_length=16, training=training)

    assert len(problems()) == 1
    assert problems()[0].startswith("reward0: 2 key-value heads cannot be divided over TP 4")
    own = "reward.sources[0].parallel={{tensor_model_parallel_size: {}}}"
    assert problems(own.format(2)) == []
    (refused,) = problems(own.format(3))[:1]
    assert refused.startswith("layout of reward0: world size 4 is not a multiple of TP 3")


def test_packing_needs_whole_rows(file: Path) -> None:
    model = ModelConfig("llama", 64, 4, 4, 4, 16, 128, 97, 256)
    models = dict.fromkeys(("actor", "reference", "critic", "reward0"), model)

    def problems(*overrides: str, training: bool = True) -> list[str]:
        config = load_config(file, ["inference.packing=true", "ppo.packing=true", *overrides])
        return layout_problems(config, 2, models, max_response_length=16, training=training)

    assert problems() == []
    assert problems("critic.parallel={context_parallel_size: 2}") == [
        f"{key} cannot go with a context_parallel_size above 1, and that of critic is 2; set {key}=false"
        for key in ("inference.packing", "ppo.packing")
    ]
    assert len(problems("parallel.context_parallel_size=2", training=False)) == 1
    assert problems("parallel.context_parallel_size=2", "inference.packing=false", "ppo.packing=false") == []


def test_progress_off_needs_no_quotes(file: Path) -> None:
    """YAML 1.1 reads a bare ``off`` as false."""
    assert load_config(file, ["trainer.progress=off"]).trainer.progress == "off"
    assert "trainer.progress: given True" in refusal(file, "trainer.progress=on")


def test_what_is_computed_again(file: Path) -> None:
    def parallel(*overrides: str) -> Any:
        """The section with ``overrides``."""
        return load_config(file, overrides).parallel

    assert (parallel().recompute, parallel().recomputed_modules) == ("none", ())
    # What earlier versions had.
    assert parallel("parallel.recompute=true").recompute == "full"
    assert parallel("parallel.recompute=false").recompute == "none"
    assert parallel("parallel.recompute=selective").recomputed_modules == ("layernorm", "mlp", "moe")
    parts = ["parallel.recompute=selective", "parallel.recompute_modules=[core_attn]"]
    assert parallel(*parts).recomputed_modules == ("core_attn",)
    assert parallel("parallel.recompute=full", parts[1]).recomputed_modules == ()
    for wrong in ("parallel.recompute=some", "parallel.recompute_modules=[router]"):
        with pytest.raises(ConfigError, match=r"parallel\.recompute.*expected"):
            parallel(wrong)
    with pytest.raises(ConfigError, match="recompute_modules is empty; name some"):
        parallel("parallel.recompute=selective", "parallel.recompute_modules=[]")
    fp8 = ["precision.dtype=bf16", "precision.fp8=hybrid", "precision.fp8_recipe=delayed"]
    shared, own = "parallel.recompute=selective", "critic.parallel.recompute=selective"
    assert refusal(file, shared, *fp8).endswith(
        "layernorm of actor, critic cannot be computed again with precision.fp8_recipe delayed; "
        "set parallel.recompute_modules=[mlp,moe], or choose another recipe"
    )
    assert "layernorm of critic cannot" in refusal(file, own, *fp8)
    alone = refusal(file, own, "critic.parallel.recompute_modules=[layernorm]", *fp8)
    assert "set critic.parallel.recompute=none" in alone
    for others in (
        (shared, "parallel.recompute_modules=[mlp]"),
        (shared, "precision.fp8_emulation=true"),
        (shared, "critic.parallel.recompute=none", "precision.fp8_roles=[critic]"),
        (own, "precision.fp8_roles=[actor]"),
        (own, "ppo.advantage=rloo"),
    ):
        assert load_config(file, [*fp8, *others]).recompute_problems() == [], others
