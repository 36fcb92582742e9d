"""Configuration reading, name tables, interleaving and the safetensors files, without any process group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from mrlhf.checkpoint.families import FAMILIES, Weight
from mrlhf.checkpoint.hf_config import (
    model_config_from_dict,
    model_config_to_dict,
    read_head,
    read_model_config,
)
from mrlhf.checkpoint.hf_folder import FolderWriter
from mrlhf.checkpoint.names import OUTPUT_BIAS, OUTPUT_WEIGHT, whole_model
from mrlhf.checkpoint.safetensors_io import SafetensorsReader, SafetensorsWriter
from mrlhf.checkpoint.transforms import TensorRanks, interleave_qkv, join_shards, read_shard, split_qkv
from mrlhf.errors import CheckpointError
from mrlhf.model_config import ModelConfig, RopeScaling
from mrlhf.planner import padded_vocab_size

DATA = Path(__file__).parents[1] / "data"

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 97,
    "eos_token_id": 2,
}


def _read(folder: Path, generation: dict[str, Any] | None = None, /, **changes: Any) -> ModelConfig:
    values = {key: value for key, value in (LLAMA | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(folder)


def test_recorded_models() -> None:
    actor = read_model_config(DATA / "standard_trajectory" / "actor")
    assert actor == ModelConfig(
        family="llama", hidden_size=64, num_layers=4, num_attention_heads=4, num_query_groups=2, head_dim=16,
        ffn_hidden_size=128, vocab_size=97, max_position_embeddings=256, norm_epsilon=1e-5, init_std=0.1,
        bos_token_id=1, eos_token_ids=(2,), pad_token_id=0,
    )  # fmt: skip
    assert read_head(DATA / "standard_trajectory" / "actor") == "lm"
    assert read_head(DATA / "standard_trajectory" / "reward") == "value"
    assert model_config_from_dict(json.loads(json.dumps(model_config_to_dict(actor))), "x") == actor


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig, MistralConfig

    for reference, architecture in ((LlamaConfig, "LlamaForCausalLM"), (MistralConfig, "MistralForCausalLM")):
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 16, "intermediate_size": 128}
        expected = reference(**sizes, vocab_size=97)
        absent = dict.fromkeys(("num_key_value_heads", "eos_token_id"), "absent")
        config = _read(tmp_path, **sizes, **absent, architectures=[architecture], sliding_window=None)
        assert config.num_query_groups == expected.num_key_value_heads
        assert config.max_position_embeddings == expected.max_position_embeddings
        assert config.norm_epsilon == expected.rms_norm_eps
        assert config.rope_theta == expected.rope_parameters["rope_theta"]
        assert config.tie_word_embeddings == expected.tie_word_embeddings
        assert config.init_std == expected.initializer_range


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({}, 10000.0, RopeScaling()),
        ({"rope_theta": 5e5}, 5e5, RopeScaling()),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, RopeScaling()),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 10000.0, RopeScaling("linear", 4.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 10000.0, RopeScaling("linear", 4.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 5e5,
         RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, 5e5,
         RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, RopeScaling()),
    ],
)  # fmt: skip
def test_rope_keys_old_and_new(tmp_path: Path, changes: Any, theta: float, scaling: RopeScaling) -> None:
    config = _read(tmp_path, **changes)
    assert config.rope_theta == theta
    assert config.rope_scaling == scaling


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["BertModel"]}, ["BertModel", "LlamaForCausalLM", "MistralForSequenceClassification"]),
        ({"architectures": "absent"}, ["config.json", "architectures"]),
        ({"hidden_size": "absent"}, ["config.json", "hidden_size", "missing"]),
        ({"vocab_size": "absent"}, ["vocab_size"]),
        ({"hidden_size": "many"}, ["config.json", "many"]),
        ({"num_key_value_heads": 3}, ["4", "3", "num_key_value_heads"]),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, ["64", "6"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["yarn", "linear, llama3"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic"]),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ["rope_parameters.low_freq_factor"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"attention_bias": True}, ["attention_bias", "mlp_bias"]),
        ({"dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"eos_token_id": "two"}, ["eos_token_id", "two"]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096, "max_position_embeddings": 8192},
         ["sliding_window 4096", "8192"]),
        ({"architectures": ["MistralForCausalLM"]}, ["sliding_window 4096", "131072"]),
    ],
)  # fmt: skip
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as error:
        _read(tmp_path, **changes)
    for word in words:
        assert word in str(error.value)


def test_mistral_without_a_shorter_window(tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 4096}
    assert _read(tmp_path, **mistral, sliding_window=None).family == "mistral"
    assert _read(tmp_path, **mistral, sliding_window=4096).family == "mistral"
    with pytest.raises(CheckpointError, match="sliding_window 4095"):
        _read(tmp_path, **mistral, sliding_window=4095)


def test_all_end_ids_come_from_the_generation_config(tmp_path: Path) -> None:
    assert _read(tmp_path, eos_token_id=[5, 6]).eos_token_ids == (5, 6)
    config = _read(tmp_path, {"eos_token_id": [2, 7, 9], "pad_token_id": 4}, eos_token_id=2, pad_token_id=-1)
    assert config.eos_token_ids == (2, 7, 9)
    assert config.pad_token_id == 4
    assert _read(tmp_path, {}, pad_token_id=-1).pad_token_id is None


def test_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such model folder"):
        read_model_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read as JSON"):
        read_model_config(tmp_path)


def test_c1_query_groups_are_interleaved_by_hand() -> None:
    q, k, v = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])
    fused = interleave_qkv(q, k, v, num_groups=2)
    assert fused.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert [part.tolist() for part in split_qkv(fused, 2, head_dim=1)] == [q.tolist(), k.tolist(), v.tolist()]


def _config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "family": "llama", "hidden_size": 3, "num_layers": 1, "num_attention_heads": 4, "num_query_groups": 2,
        "head_dim": 1, "ffn_hidden_size": 4, "vocab_size": 5, "max_position_embeddings": 8,
    }  # fmt: skip
    return ModelConfig(**(values | changes))


def _shard(
    weight: Weight, tensors: dict[str, torch.Tensor], config: ModelConfig, shape: Any, rank: int, size: int
) -> Any:
    param = torch.full(shape, float("nan"))

    def read(name: str, dim: int, start: int, stop: int | None) -> torch.Tensor:
        tensor = tensors[name]
        return tensor.narrow(dim, start, (tensor.shape[dim] if stop is None else stop) - start)

    read_shard(weight, read, config, param, TensorRanks(rank, size, rank, size))
    return param


def test_c1_c2_tensor_parallel_shards_are_halves() -> None:
    config = _config(qkv_bias=True, attention_output_bias=True, mlp_bias=True)
    weight = whole_model(config, "lm")["decoder.layers.0.self_attention.linear_qkv.bias"]
    values = ([0.0, 1, 2, 3], [10.0, 11], [20.0, 21])
    tensors = {name: torch.tensor(value) for name, value in zip(weight.sources, values, strict=True)}
    shards = [_shard(weight, tensors, config, (4,), rank, 2) for rank in range(2)]
    assert [shard.tolist() for shard in shards] == [[0, 1, 10, 20], [2, 3, 11, 21]]
    for name, tensor in zip(weight.sources, join_shards(weight, shards, config), strict=True):
        assert torch.equal(tensor, tensors[name])


def test_c5_vocabulary_padding_by_hand() -> None:
    assert padded_vocab_size(5, 2, divisor=4) == 8
    config = _config()
    weights = whole_model(config, "lm")
    for name in ("embedding.word_embeddings.weight", OUTPUT_WEIGHT):
        weight = weights[name]
        table = torch.arange(15.0).reshape(5, 3) + 1
        shards = [_shard(weight, {weight.sources[0]: table}, config, (4, 3), rank, 2) for rank in range(2)]
        assert torch.equal(shards[0], table[:4])
        assert torch.equal(shards[1], torch.cat([table[4:], torch.zeros(3, 3)]))
        assert torch.equal(join_shards(weight, shards, config)[0], table)
    # A shard that is padding alone.
    shard = _shard(weights[OUTPUT_WEIGHT], {"lm_head.weight": torch.ones(5, 3)}, config, (4, 3), 2, 3)
    assert not shard.any()


@settings(max_examples=40, deadline=None)
@given(
    groups=st.sampled_from([1, 2, 4, 6]), per_group=st.integers(1, 3), head_dim=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2, 3]), vocab=st.integers(5, 20), tied=st.booleans(),
)  # fmt: skip
def test_every_tensor_survives_sharding(
    groups: int, per_group: int, head_dim: int, tp: int, vocab: int, tied: bool
) -> None:
    config = _config(
        num_query_groups=groups, num_attention_heads=groups * per_group, head_dim=head_dim, ffn_hidden_size=6,
        vocab_size=vocab, tie_word_embeddings=tied, qkv_bias=True, attention_output_bias=True, mlp_bias=True,
    )  # fmt: skip
    for weight in whole_model(config, "lm").values():
        tensors = {name: torch.randn(shape) for name, shape in zip(weight.sources, weight.shapes, strict=True)}
        rows = sum(shape[0] for shape in weight.shapes)
        if weight.kind == "qkv" and groups % tp:
            with pytest.raises(CheckpointError, match=f"{groups} cannot be split .* {tp}"):
                _shard(weight, tensors, config, (1,), 0, tp)
            continue
        shape = [rows, *weight.shapes[0][1:]]
        if weight.kind == "vocab":
            shape[0] = padded_vocab_size(vocab, tp, divisor=4) // tp
        elif weight.kind == "row":
            if shape[1] % tp:
                continue
            shape[1] //= tp
        elif weight.kind != "replicated":
            shape[0] //= tp
        shards = [_shard(weight, tensors, config, shape, rank, tp) for rank in range(tp)]
        for name, tensor in zip(weight.sources, join_shards(weight, shards, config), strict=True):
            assert torch.equal(tensor, tensors[name]), name


MOE_SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 3},
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "mlp_only_layers": [1]},
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_table_names_every_tensor_of_transformers(tmp_path: Path, family: str) -> None:
    """Names and shapes of the whole table equal those in a folder that transformers writes."""
    import transformers

    table = FAMILIES[family]
    for head, architecture in (("lm", table.lm_architecture), ("value", table.value_architecture)):
        prefix = architecture.split("For")[0]
        reference = getattr(transformers, f"{prefix}Config")(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
            vocab_size=50, num_labels=1, sliding_window=None, **MOE_SIZES.get(family, {}),
        )  # fmt: skip
        model = getattr(transformers, architecture)(reference)
        model.save_pretrained(tmp_path)
        config = read_model_config(tmp_path)
        found = {
            name: shape
            for weight in whole_model(config, head).values()
            for name, shape in zip(weight.sources, weight.shapes, strict=True)
        }
        with safe_open(tmp_path / "model.safetensors", framework="pt") as handle:
            assert found == {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118


def test_value_head_is_replicated_and_may_have_a_bias() -> None:
    weights = whole_model(_config(), "value", value_bias=True)
    assert (weights[OUTPUT_WEIGHT].kind, weights[OUTPUT_WEIGHT].shapes) == ("replicated", ((1, 3),))
    assert weights[OUTPUT_BIAS].sources == ("score.bias",)
    assert OUTPUT_BIAS not in whole_model(_config(), "value")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limit", [1, 100, 10**9])
def test_written_files_are_read_by_the_library(tmp_path: Path, dtype: torch.dtype, limit: int) -> None:
    tensors = {"b": torch.randn(3, 5), "a.long.name": torch.randn(7), "c": torch.randn(2, 2)}
    tensors["one"] = torch.randn(1, 9)[:, 4]  # a single element with a stride
    with SafetensorsWriter(tmp_path, {name: t.shape for name, t in tensors.items()}, dtype, limit) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == {1: 4, 100: 2 if dtype is torch.float32 else 1, 10**9: 1}[limit]
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}
            found.update({name: handle.get_tensor(name) for name in handle.keys()})  # noqa: SIM118 - not a dict
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor.to(dtype))
    if len(files) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.numel() for t in tensors.values()) * dtype.itemsize
    with SafetensorsReader(tmp_path) as reader:
        assert reader.names() == tensors.keys()
        assert reader.shape("b") == (3, 5)
        assert torch.equal(reader.read("b", 1, 1, 3), tensors["b"].to(dtype)[:, 1:3])
        assert torch.equal(reader.read("a.long.name", 0, 2, 9), tensors["a.long.name"].to(dtype)[2:])


def test_writer_refuses_wrong_order_shape_and_an_early_end(tmp_path: Path) -> None:
    shapes = {"a": (2,), "b": (2,)}
    with pytest.raises(ValueError, match="expected"), SafetensorsWriter(tmp_path, shapes, torch.float32, 99) as writer:
        writer.write("b", torch.ones(2))
    with (
        pytest.raises(CheckpointError, match="shape"),
        SafetensorsWriter(tmp_path, shapes, torch.float32, 99) as writer,
    ):
        writer.write("a", torch.ones(3))
    with (
        pytest.raises(RuntimeError, match="1 tensors"),
        SafetensorsWriter(tmp_path, shapes, torch.float32, 99) as writer,
    ):
        writer.write("a", torch.ones(2))


def test_reader_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        SafetensorsReader(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="save_pretrained"):
        SafetensorsReader(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a readable"):
        SafetensorsReader(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors: no such file"):
        SafetensorsReader(tmp_path)
    save_file({"b": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    with SafetensorsReader(tmp_path) as reader, pytest.raises(CheckpointError, match="tensor a cannot be read"):
        reader.read("a")
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map"):
        SafetensorsReader(tmp_path)


def test_a_half_written_folder_is_never_in_place(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "out")
    (writer.begin() / "left").write_text("from a killed run")
    assert not (tmp_path / "out").exists()
    (writer.begin() / "config.json").write_text("{}")
    writer.commit()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]
    assert FolderWriter.problem(tmp_path / "out", overwrite=False)
    assert FolderWriter.problem(tmp_path / "out", overwrite=True) is None
    assert FolderWriter.problem(tmp_path / "new", overwrite=False) is None
