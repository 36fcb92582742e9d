"""Jobs that cannot work are refused in one message with the numbers, before any process group exists."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mrlhf.checkpoint.hf import read_model_config
from mrlhf.config import check_files, load_config
from mrlhf.errors import MrlhfError
from mrlhf.trainer import job as jobs
from mrlhf.trainer import ppo
from tests.end_to_end.jobs import ROOT, TinyJob, function_reward, run_command
from tests.end_to_end.launching import of_70b
from tools.make_tiny_model import make_tiny_model

TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch, tiny_job: TinyJob) -> Any:
    """Runs ``mrlhf ppo`` in this process as rank 0 of a world that does not exist; gives the message."""

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("a process group was about to be made")

    monkeypatch.setattr(jobs, "initialize", started)
    monkeypatch.setattr(jobs, "build_groups", started)
    monkeypatch.setattr(dist, "init_process_group", started)
    monkeypatch.setattr(dist, "new_group", started)
    monkeypatch.syspath_prepend(str(tiny_job.folder))

    def run(*overrides: str, world: int = 1, config: Path = tiny_job.config) -> str:
        if world > 1:
            for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", world)):
                monkeypatch.setenv(name, str(value))
            monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
            monkeypatch.setenv("MASTER_PORT", "1")
        with pytest.raises(MrlhfError) as caught:
            _train(config, list(overrides))
        assert not dist.is_initialized()
        return str(caught.value)

    return run


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Actors that do not fit: 6 heads with 3 KV heads, and another vocabulary."""
    root = tmp_path_factory.mktemp("models")
    size: dict[str, Any] = {"hidden_size": 48, "num_layers": 2, "ffn_hidden_size": 96, "max_position_embeddings": 64}
    make_tiny_model(root / "kv3", num_heads=6, num_kv_heads=3, **size)
    make_tiny_model(root / "vocab", vocab_size=103, **size)
    make_tiny_model(root / "vocab_reward", vocab_size=103, classifier=True, **size)
    return {path.name: str(path) for path in root.iterdir()}


def _train(file: Path, overrides: list[str]) -> None:
    """The steps of ``mrlhf ppo``."""
    config = load_config(file, overrides)
    check_files(config)
    ppo.run(config)


def _says(message: str, *parts: str) -> None:
    missing = [part for part in parts if part not in message]
    assert not missing, f"{missing} not in:\n{message}"


def test_f1_world_size(refuse: Any) -> None:
    message = refuse(f"{TP}=4", world=6)
    _says(message, "world size 6 is not a multiple of TP 4 x PP 1 x CP 1 = 4", "start 4 or 8 ranks")


def test_f1_world_size_with_both(refuse: Any) -> None:
    _says(refuse(f"{TP}=2", f"{PP}=2", world=6), "world size 6 is not a multiple of TP 2 x PP 2 x CP 1 = 4")


def test_the_70b_example_on_a_machine_without_transformer_engine(refuse: Any, tiny_job: TinyJob) -> None:
    emulated = "precision.fp8_emulation=true"
    overrides = [override for override in of_70b(tiny_job) if override != emulated]
    example = ROOT / "examples" / "configs" / "ppo_70b.yaml"
    message = refuse(*overrides, world=4, config=example)
    _says(message, "precision.fp8=hybrid with fp8_recipe tensorwise needs CUDA and Transformer Engine", "no CUDA here")
    _says(message, f"set {emulated} to round to FP8 values in ordinary kernels, or precision.fp8=null")
    # Either way out leads on to the process groups.
    for way_out in (emulated, "precision.fp8=null"):
        with pytest.raises(AssertionError, match="a process group was about to be made"):
            _train(example, [*overrides, way_out])


def test_heads(refuse: Any) -> None:
    message = refuse(f"{TP}=3", world=3)
    _says(message, "actor: 4 attention heads and 2 key-value heads", "cannot be divided over TP 3")


def test_b7_two_kv_heads_over_four(refuse: Any) -> None:
    message = refuse(f"{TP}=4", world=4)
    _says(message, "actor: 2 key-value heads cannot be divided over TP 4", "must be one of 1, 2")
    assert "attention heads" not in message.splitlines()[1]


def test_b7_three_kv_heads_over_two(refuse: Any, models: dict[str, str]) -> None:
    message = refuse(f"{TP}=2", f"actor.path={models['kv3']}", function_reward("tinyrewards:vowels"), world=2)
    _says(message, "actor: 3 key-value heads cannot be divided over TP 2", "must be one of 1, 3")


def test_layers(refuse: Any) -> None:
    message = refuse(f"{PP}=4", world=4)
    _says(message, "actor: 2 layers do not split into PP 4 equal stages", "must be one of 1, 2")


def test_virtual_stages(refuse: Any) -> None:
    message = refuse(f"{PP}=2", "parallel.virtual_pipeline_model_parallel_size=2", world=2)
    _says(message, "2 layers do not split into PP 2 x VPP 2 = 4 equal stages")


def test_minibatch(refuse: Any) -> None:
    message = refuse("ppo.micro_batch_size=4", world=4)
    _says(message, "minibatch_size 4 is not a multiple of DP 4 x micro_batch_size 4 = 16", "use 16")


def test_rows_of_an_iteration(refuse: Any) -> None:
    _says(refuse("ppo.minibatch_size=6"), "8 rows per iteration are not a multiple of minibatch_size 6")


def test_prompts_over_replicas(refuse: Any) -> None:
    message = refuse("rollout.prompts_per_iteration=6", "ppo.minibatch_size=6", "ppo.micro_batch_size=1", world=4)
    _says(message, "prompts_per_iteration 6 is not a multiple of DP 4", "use 4 or 8")


def test_d11_length(refuse: Any) -> None:
    message = refuse("rollout.max_response_length=20")
    for role in ("actor", "critic", "reference", "reward0"):
        _says(message, f"{role}: 48 prompt + 20 response tokens = 68 are over the model's length of 64")
    _says(message, "by 4")


def test_d11_overlong_prompt(refuse: Any, tiny_job: TinyJob) -> None:
    message = refuse("data.max_prompt_length=20")
    _says(message, f"{tiny_job.prompts}:1: the prompt has", "data.max_prompt_length is 20", "drop or keep_last")


@pytest.mark.parametrize("section", ["data", "evaluation"])
def test_a_cache_too_small_for_the_longest_prompt(refuse: Any, tiny_job: TinyJob, tmp_path: Path, section: str) -> None:
    """Without a limit of its own a prompt is as long as it is, which is known when the prompts are read."""
    short, both = tmp_path / "short.jsonl", 2 * 256
    short.write_text('{"prompt": "a"}\n' * 8)
    settings = ["data.max_prompt_length=null", "trainer.eval_interval=1", f"{section}.prompts={tiny_job.prompts}"]
    settings.append(f"{'evaluation' if section == 'data' else 'data'}.prompts={short}")
    # Keys and values of a token are 256 bytes, two rows of 12 tokens too few for any of the job's own prompts.
    message = refuse(*settings, f"rollout.kv_cache_memory={both * 12 / 2**30}")
    _says(message, "rollout.kv_cache_memory", "does not hold 2 rows", "lower data.max_prompt_length")
    advice = message.split("set it to ")[1].split()[0]
    with pytest.raises(AssertionError, match="process group"):
        refuse(*settings, f"rollout.kv_cache_memory={advice}")


def test_end_ids_outside_the_vocabulary(refuse: Any) -> None:
    _says(
        refuse("rollout.stop_token_ids=[7,5000]"), "rollout.stop_token_ids: [5000] are outside the actor's vocabulary"
    )


def test_vocabularies(refuse: Any, models: dict[str, str]) -> None:
    message = refuse(f"reward.sources=[{{kind: model, path: '{models['vocab_reward']}'}}]")
    _says(message, "vocabularies of different size", "actor 97", "reward0 103", "critic 103")


def test_tokenizer_larger_than_the_vocabulary(refuse: Any, models: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(models["vocab"], folder)
    (folder / "model.safetensors").unlink()
    tokens = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(tokens) > 97
    message = refuse(f"tokenizer.path={folder}")
    _says(message, f"tokenizer.path: {folder} has {len(tokens)} ids", "the actor's vocabulary is 97")


def test_tokenizers_of_one_size_with_other_pieces(refuse: Any, tiny_job: TinyJob, tmp_path: Path) -> None:
    folder = tmp_path / "reward"
    shutil.copytree(tiny_job.reward, folder)
    content = (folder / "tokenizer.json").read_text()
    vocabulary = json.loads(content)["model"]["vocab"]
    (folder / "tokenizer.json").write_text(
        content.replace('"a":', '"@@":').replace('"b":', '"a":').replace('"@@":', '"b":')  # a and b change places
    )
    message = refuse(f"reward.sources=[{{kind: model, path: '{folder}'}}]")
    first = min(vocabulary["a"], vocabulary["b"])
    _says(
        message,
        f"reward.sources[0].path: {folder} reads other token ids than tokenizer.path",
        f"id {first} is",
        "(2 ids differ)",
    )


def test_unknown_keys(refuse: Any) -> None:
    message = refuse("ppo.epoch=2", "paralel.tensor_model_parallel_size=2", "learning_rate=1")
    _says(message, "ppo.epoch: unknown key; did you mean ppo.epochs?", "paralel: unknown key; did you mean parallel?")
    _says(message, "learning_rate: unknown key")


def test_missing_files(refuse: Any, tmp_path: Path) -> None:
    message = refuse(f"actor.path={tmp_path}/a", f"critic.path={tmp_path}", f"data.prompts={tmp_path}/p.jsonl")
    _says(message, f"actor.path: {tmp_path}/a is not a folder", f"critic.path: {tmp_path} has no config.json")
    _says(message, f"reference.path: {tmp_path}/a", f"data.prompts: {tmp_path}/p.jsonl is not a file")


def test_missing_weights(refuse: Any, tiny_job: TinyJob, tmp_path: Path) -> None:
    folder = tmp_path / "no_weights"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_job.actor / name, folder / name)
    _says(refuse(f"actor.path={folder}"), str(folder), "safetensors")


def test_weights_that_are_cut_off(refuse: Any, tiny_job: TinyJob, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(tiny_job.reward, folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    _says(refuse(f"critic.path={folder}"), f"{file}: not a readable safetensors file")


def test_e1_malformed_lines(refuse: Any, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "good"}\n\n{"prompt": "cut\n["a"]\n{"text": "b"}\n')
    message = refuse(f"data.prompts={file}")
    _says(message, f"{file}:3: not valid JSON", f"{file}:4: not an object", f"{file}:5: no field 'prompt'")


def test_e7_messages_without_a_chat_template(refuse: Any, tiny_job: TinyJob, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(tiny_job.actor, folder)
    (folder / "chat_template.jinja").unlink()
    _says(refuse(f"tokenizer.path={folder}"), "no chat template", "tokenizer.chat_template")


def test_a_language_model_as_reward_model(refuse: Any, tiny_job: TinyJob) -> None:
    message = refuse(f"reward.sources=[{{kind: model, path: '{tiny_job.actor}'}}]")
    _says(message, str(tiny_job.actor), "is a language model; a reward model is a one-label sequence classifier")


def test_a_classifier_as_actor_and_a_language_model_as_loaded_critic(refuse: Any, tiny_job: TinyJob) -> None:
    message = refuse(f"actor.path={tiny_job.reward}", f"critic.path={tiny_job.actor}", "critic.head=loaded")
    _says(message, f"actor.path: {tiny_job.reward} is a sequence classifier")
    _says(message, f"critic.path: {tiny_job.actor} is a language model without a value head")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("tinyrewards:vowel", "has no attribute 'vowel'"),
        ("tinyrewards:number", "number is a int, not callable"),
    ],
)
def test_reward_functions_that_do_not_exist(refuse: Any, target: str, words: str) -> None:
    _says(refuse(function_reward(target)), f"reward function {target}", words)


def test_a_reward_target_of_the_wrong_form(refuse: Any) -> None:
    _says(refuse(function_reward("tinyrewards.vowels")), "reward.sources[0]", "target", "tinyrewards.vowels")


def test_everything_in_one_message(refuse: Any, models: dict[str, str]) -> None:
    reward = f"reward.sources=[{{kind: model, path: '{models['vocab_reward']}'}}]"
    sizes = [f"{TP}=4", f"{PP}=3", "rollout.max_response_length=20", "ppo.minibatch_size=3"]
    message = refuse(*sizes, reward, world=6)
    _says(message, "world size 6 is not a multiple of TP 4 x PP 3 x CP 1 = 12", "2 key-value heads cannot be divided")
    _says(message, "2 layers do not split into PP 3", "different size", "= 68 are over", "multiple of minibatch_size 3")
    assert message.startswith("these sizes cannot work together:\n  - ")


def test_the_fixture_lets_a_good_job_through(refuse: Any, tiny_job: TinyJob) -> None:
    """The same job without a fault does reach the process group, so that the refusals above mean something."""
    assert read_model_config(tiny_job.actor).num_query_groups == 2
    with pytest.raises(AssertionError, match="a process group was about to be made"):
        refuse()


def test_a_whole_job_is_refused_within_seconds(tiny_job: TinyJob) -> None:
    """Under torchrun: the message once, exit status not 0, no rank left waiting."""
    done = run_command("ppo", tiny_job.config, f"{TP}=3", ranks=2)
    assert done.status != 0
    assert done.stderr.count("error: these sizes cannot work together:") == 1
    _says(done.stderr, "world size 2 is not a multiple of TP 3 x PP 1 x CP 1 = 3", "4 attention heads")
    assert done.stdout == ""


def test_the_exit_status_is_two(tiny_job: TinyJob) -> None:
    done = run_command("ppo", tiny_job.config, f"{PP}=2")
    assert done.status == 2
    assert done.stderr.startswith("error: these sizes cannot work together:\n  - world size 1 is not a multiple")
    assert "Traceback" not in done.stderr
