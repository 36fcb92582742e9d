"""The configuration of supervised fine-tuning, and what is refused before any process group exists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from mrlhf.config import check_files, load_config, to_yaml
from mrlhf.config_supervised import SFTConfig
from mrlhf.errors import CheckpointError, ConfigError, DataError
from mrlhf.trainer.sft import build_trainer
from tests.sft_run import make_config, make_inputs

REQUIRED = ["model.path=m", "data.train=t.jsonl", "train.batch_size=8"]


def load(*overrides: str) -> SFTConfig:
    return load_config(None, [*REQUIRED, *overrides], SFTConfig)


def test_one_file_or_several() -> None:
    assert load().data.train == ("t.jsonl",)
    several = load("data.train=[a.jsonl,b.jsonl]", "data.validation=c.jsonl")
    assert several.data.train == ("a.jsonl", "b.jsonl")
    assert several.data_files() == {
        "data.train[0]": "a.jsonl",
        "data.train[1]": "b.jsonl",
        "data.validation": "c.jsonl",
        "tokenizer.chat_template": None,
    }


def test_it_reads_back_what_it_writes(tmp_path: Path) -> None:
    config = load("data.validation_fraction=0.1", "trainer.epochs=2.5", "tokenizer.chat_template=chat.jinja")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "config.yaml", (), SFTConfig) == config
    assert config.tokenizer.path == "m"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train=[]"], "data: train names no file"),
        (["data.validation=v", "data.validation_fraction=0.1"], "validation_fraction 0.1 and validation files exclude"),
        (["data.validation_fraction=1.0"], "data.validation_fraction: given 1.0"),
        (["data.max_length=1"], "data.max_length: given 1, expected at least 2|expected greater than or equal to 2"),
        (["trainer.eval_interval=5"], "eval_interval 5 needs held-out examples; set data.validation"),
        (
            ["trainer.iterations=3", "optimizer.warmup_iterations=4"],
            "warmup_iterations 4 are over trainer.iterations 3",
        ),
        (["train.micro_batch_tokens=64", "data.max_length=64"], "raise it to at least 65"),
        (["model.init=zero"], "model.init: given 'zero', expected 'loaded' or 'random'"),
        (["data.learn_on=prompt"], "data.learn_on: given 'prompt'"),
        (["trainer.epochs=0"], "trainer.epochs: given 0"),
        (["train.bach_size=4"], r"train.bach_size: unknown key; did you mean train.batch_size\?"),
        (["actor.path=x"], "actor: unknown key"),
    ],
)
def test_what_cannot_be_is_refused_by_key(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*overrides)


def test_missing_files_are_listed_together() -> None:
    with pytest.raises(ConfigError) as caught:
        check_files(load("data.validation=[v1.jsonl,v2.jsonl]", "tokenizer.chat_template=none.jinja"))
    for key in (
        "model.path: m",
        "data.train: t.jsonl",
        "data.validation[1]: v2.jsonl",
        "tokenizer.chat_template: none",
    ):
        assert key in str(caught.value)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("sft"), max_position_embeddings=128)


PP2 = "parallel.pipeline_model_parallel_size=2"
VPP2 = "parallel.virtual_pipeline_model_parallel_size=2"


@pytest.mark.parametrize(
    ("world", "overrides", "message"),
    [
        (2, ["train.micro_batch_size=4"], "train.batch_size 4 is not a multiple of DP 2 x micro_batch_size 4 = 8"),
        (3, [], "train.batch_size 4 is not a multiple of DP 3"),
        (3, ["parallel.tensor_model_parallel_size=2"], "world size 3 is not a multiple of TP 2"),
        (2, ["parallel.context_parallel_size=2", "train.packing=true"], "context_parallel_size 2 exclude each other"),
        (2, ["parallel.expert_model_parallel_size=2"], "a dense model has no experts to share over EP 2"),
        (2, [PP2, VPP2], "2 layers do not split into PP 2 x VPP 2"),
        (1, ["data.max_length=129"], "model: data.max_length 129 is over the model's length of 128; lower it"),
        (1, ["trainer.iterations=null", "optimizer.warmup_iterations=9"], "warmup_iterations 9 are over .* 3 steps"),
        (1, ["data.validation=[]", "trainer.eval_interval=0", "data.validation_fraction=0.5", "data.train={one}"],
         "example.s. with 1 prompt.s. cannot be divided"),
        (1, ["trainer.output_dir={inputs}", "model.path={inputs}/model"], "holds a run already .model."),
        (1, ["data.max_length=10"], r"train.jsonl:1: the row has \d+ tokens, data.max_length is 10"),
        (1, ["data.train={bad}"], "bad.jsonl:2: expected the fields 'prompt' and 'response'.*the fields are: 'prompt'"),
        (1, ["model.path={classifier}"], "is a sequence classifier; sft trains a language model"),
        (1, ["tokenizer.path={large}"], "has 300 ids, the model's vocabulary is 97; use the tokenizer of the model"),
        (1, ["model.path={empty}", "tokenizer.path={inputs}/model"], "empty"),
    ],
)  # fmt: skip
def test_hostile_runs_are_refused_before_ranks_meet(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, overrides: list[str], message: str
) -> None:
    from tools.make_tiny_model import make_tiny_model

    names = {name: str(tmp_path / name) for name in ("one", "bad.jsonl", "classifier", "large", "empty")}
    Path(names["one"]).write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    Path(names["bad.jsonl"]).write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a"}\n')
    text = " ".join(overrides)
    tiny = {"hidden_size": 32, "num_layers": 2, "ffn_hidden_size": 64}
    if "{classifier}" in text:
        make_tiny_model(names["classifier"], classifier=True, **tiny)
    if "{large}" in text:
        make_tiny_model(names["large"], vocab_size=300, **tiny)
    if "{empty}" in text:
        Path(names["empty"]).mkdir()
        (Path(names["empty"]) / "config.json").write_text((inputs / "model" / "config.json").read_text())
    for key, value in {"RANK": 0, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": world}.items():
        monkeypatch.setenv(key, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    places = {**names, "bad": names["bad.jsonl"], "inputs": str(inputs)}
    filled = [o.format(**places) if "{" in o else o for o in overrides]
    config = make_config(inputs, tmp_path / "out", *filled, "trainer.overwrite=false")
    with pytest.raises((ConfigError, DataError, CheckpointError), match=message):
        build_trainer(config)
    assert not dist.is_initialized()
    assert not (tmp_path / "out").exists()
