"""Hugging Face folders in and out of real Megatron stages, compared with transformers and with themselves."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlhf.checkpoint.convert import conversion_sizes
from mrlhf.errors import ConfigError
from mrlhf.model_config import ModelConfig
from tests.distributed.hf_tools import (
    DATA,
    TOKENS,
    assert_same_tensors,
    edit_copy,
    forward_stages,
    last_rank,
    load_message,
    load_stages,
    model_outputs,
    model_values,
    read_tensors,
    round_trip,
    transformers_logits,
    world_of,
    write_models,
)
from tests.ranks import RankFailure, run_ranks

LAYOUTS = [(1, 1, None), (2, 1, None), (1, 2, None), (1, 4, None), (2, 2, None), (1, 2, 2)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(models: dict[str, str]) -> dict[str, torch.Tensor]:
    return {name: transformers_logits(path) for name, path in models.items()}


def test_scaled_rope_matters_in_these_models(models: dict[str, str], tmp_path: Path) -> None:
    """Without scaling the logits are others, so the comparison below can see it."""
    for name in ("llama3_rope", "linear_rope"):
        folder = tmp_path / name
        folder.mkdir()
        values = json.loads((Path(models[name]) / "config.json").read_text())
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
        (folder / "config.json").write_text(json.dumps(values))
        (folder / "model.safetensors").symlink_to(Path(models[name]) / "model.safetensors")
        assert (transformers_logits(str(folder)) - transformers_logits(models[name])).abs().max() > 0.1


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_b4_b5_c2_logits_equal_transformers(models: dict[str, str], expected: Any, layout: Any) -> None:
    found = last_rank(run_ranks(model_outputs, world_of(layout), models, layout))
    for name, logits in found.items():
        # fp32 through four layers whose sums run in another order; logits reach about 4.
        assert (logits - expected[name]).abs().max() < 3e-5, name


def test_probe_of_the_recording(models: dict[str, str]) -> None:
    probe = json.loads((DATA / "standard_trajectory" / "expected.json").read_text())["probe"]
    found = last_rank(run_ranks(_probe, 2, models["recorded"], torch.tensor(probe["input_ids"])))
    assert (found[..., :8] - torch.tensor(probe["logits_first8"])).abs().max() < 2e-4
    assert (found.sum(-1) - torch.tensor(probe["logits_sum"])).abs().max() < 1e-3
    assert torch.equal(found.argmax(-1), torch.tensor(probe["logits_argmax"]))


def _probe(path: str, tokens: torch.Tensor) -> Any:
    return forward_stages(*load_stages(path, (1, 2, None)), tokens)


def _tied_copies(path: str, layout: Any) -> list[tuple[int, str, int]]:
    """(stage, tensor rank, hash) of every parameter that is the embedding."""
    from mrlhf.checkpoint.names import EMBEDDING, OUTPUT_WEIGHT, all_parameters

    _, groups, chunks = load_stages(path, layout)
    found = []
    for name, param in all_parameters(chunks).items():
        if name in (EMBEDDING, OUTPUT_WEIGHT):
            digest = hashlib.sha256(param.detach().numpy().tobytes()).hexdigest()
            assert not param[max(97 - groups.tp.rank() * param.shape[0], 0) :].any()
            found.append((name, groups.tp.rank(), digest))
    return found


def test_b4_tied_weight_is_on_first_and_last_stage(models: dict[str, str]) -> None:
    stages = run_ranks(_tied_copies, 4, models["tied"], (1, 4, None))
    assert [len(stage) for stage in stages] == [1, 0, 0, 1]
    assert stages[0][0][0] == "embedding.word_embeddings.weight"
    assert stages[3][0][0] == "output_layer.weight"
    assert stages[0][0][2] == stages[3][0][2]
    by_rank = {entry[1:] for rank in run_ranks(_tied_copies, 4, models["tied"], (2, 2, None)) for entry in rank}
    assert len(by_rank) == 2, "one value for each tensor rank, the same on both stages"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_c1_c6_round_trip_is_bitwise(models: dict[str, str], tmp_path: Path, layout: Any) -> None:
    run_ranks(_round_trips, world_of(layout), models, str(tmp_path), layout)
    for name, path in models.items():
        assert_same_tensors(path, tmp_path / name)
        before, after = (json.loads((Path(p) / "config.json").read_text()) for p in (path, tmp_path / name))
        assert before == after, name


def _round_trips(paths: dict[str, str], out: str, layout: Any) -> None:
    for name, path in paths.items():
        round_trip(path, f"{out}/{name}", layout, "lm", torch.float32, {"max_shard_size": 60_000})


def test_replicas_export_once(models: dict[str, str], tmp_path: Path) -> None:
    run_ranks(round_trip, 4, models["tied"], str(tmp_path / "out"), (2, 1, None), "lm", torch.float32, {})
    assert_same_tensors(models["tied"], tmp_path / "out")


def test_c8_export_is_complete_and_loads_in_transformers(models: dict[str, str], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    run_ranks(round_trip, 2, models["tied"], str(out), (1, 2, None), "lm", torch.float32, {"max_shard_size": 60_000})
    assert {path.name for path in out.iterdir()} >= {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "model.safetensors.index.json",
    }  # fmt: skip
    assert max(path.stat().st_size for path in out.glob("*.safetensors")) < 62_000
    assert not out.with_name("out.incomplete").exists()
    model = AutoModelForCausalLM.from_pretrained(out)
    original = AutoModelForCausalLM.from_pretrained(models["tied"])
    assert model.config.tie_word_embeddings
    assert model.config.vocab_size == 97
    assert model.generation_config.eos_token_id == 2
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters(), strict=True))
    chat = [{"role": "user", "content": "hello"}]
    assert AutoTokenizer.from_pretrained(out).apply_chat_template(chat, tokenize=False) == "user: hello\n"


def test_export_does_not_touch_an_existing_folder(models: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    arguments = (models["tied"], str(tmp_path), (1, 1, None), "lm", torch.float32)
    with pytest.raises(RankFailure, match="already exists"):
        run_ranks(round_trip, 1, *arguments, {})
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    run_ranks(round_trip, 1, *arguments, {"overwrite": True})
    assert_same_tensors(models["tied"], tmp_path)
    assert not (tmp_path / "mine").exists()


def test_c9_dtypes(models: dict[str, str], tmp_path: Path) -> None:
    bf16 = torch.bfloat16
    # fp32 file, bf16 model: cast on load, all of the export in two bytes.
    cast = tmp_path / "cast"
    run_ranks(round_trip, 2, models["tied"], str(cast), (2, 1, None), "lm", bf16, {})
    assert_same_tensors(models["tied"], cast, dtype=bf16)
    assert json.loads((cast / "config.json").read_text())["dtype"] == "bfloat16"
    # bf16 file, bf16 model and export: bitwise. bf16 file, fp32 model, export asked in bf16: the same again.
    for name, dtype, options in (("same", bf16, {}), ("back", torch.float32, {"dtype": bf16})):
        out = tmp_path / name
        run_ranks(round_trip, 2, str(cast), str(out), (2, 1, None), "lm", dtype, options)
        assert_same_tensors(cast, out, dtype=bf16)
    found = last_rank(run_ranks(model_outputs, 2, {"cast": str(cast)}, (1, 2, None), "lm", bf16))["cast"]
    reference = transformers_logits(str(cast), bf16)
    # bf16 keeps 8 bits: 4 * 2^-8 on logits of up to 4, through four layers.
    assert (found - reference).abs().max() < 0.1
    fp32 = last_rank(run_ranks(model_outputs, 1, {"cast": str(cast)}, (1, 1, None)))["cast"]
    assert (fp32 - transformers_logits(str(cast))).abs().max() < 3e-5


@pytest.mark.parametrize("layout", [(1, 1, None), (2, 1, None), (1, 2, None), (2, 2, None)], ids=str)
def test_b10_values_of_classifier_equal_transformers(tmp_path: Path, layout: Any) -> None:
    from transformers import AutoModelForSequenceClassification

    path = str(DATA / "ds_chat_trajectory" / "reward")
    found = run_ranks(model_values, world_of(layout), path, layout, {"head_init": "loaded"}, str(tmp_path / "out"))
    model = AutoModelForSequenceClassification.from_pretrained(path)
    with torch.no_grad():
        hidden = model.model(TOKENS).last_hidden_state
        expected = model.score(hidden).squeeze(-1)
    assert (found[-1] - expected).abs().max() < 3e-5
    assert all(value is None for value in found[: -layout[0]]), "values are on the last stage only"
    assert_same_tensors(path, tmp_path / "out")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config.num_labels == 1


@pytest.mark.parametrize("layout", [(1, 1, None), (2, 2, None), (1, 4, None)], ids=str)
def test_b10_critic_from_tied_language_model(models: dict[str, str], tmp_path: Path, layout: Any) -> None:
    from transformers import AutoModelForSequenceClassification

    out = tmp_path / "critic"
    found = last_rank(run_ranks(model_values, world_of(layout), models["tied"], layout, {"seed": 3}, str(out)))
    exported = read_tensors(out)
    head = exported.pop("score.weight")
    from mrlhf.checkpoint.hf import fresh_value_head

    assert torch.equal(head, fresh_value_head(64, 3)), "the head depends on the seed alone"
    assert not torch.equal(head, fresh_value_head(64, 4))
    assert "lm_head.weight" not in exported
    body = read_tensors(models["tied"])
    assert exported.keys() == body.keys()
    assert all(torch.equal(value, body[name]) for name, value in exported.items())
    model = AutoModelForSequenceClassification.from_pretrained(out)
    with torch.no_grad():
        expected = model.score(model.model(TOKENS).last_hidden_state).squeeze(-1)
    assert (found - expected).abs().max() < 3e-5
    again = last_rank(run_ranks(model_values, world_of(layout), str(out), layout, {"head_init": "loaded"}))
    assert torch.equal(again, found)


def _messages(cases: list[tuple[str, str, dict[str, Any]]], layout: Any) -> list[str]:
    return [load_message(path, layout, head, **options) for path, head, options in cases]


def test_c2_every_unused_or_missing_tensor_is_an_error(models: dict[str, str], tmp_path: Path) -> None:
    reward = str(DATA / "ds_chat_trajectory" / "reward")
    layer = "model.layers.3."

    def edit(name: str, base: str, change: Any) -> str:
        return edit_copy(base, tmp_path / name, change)

    cases = [
        (edit("bias", models["mha"], lambda t: t.update({f"{layer}self_attn.q_proj.bias": torch.ones(64)})),
         "lm", {}, f"not used: {layer}self_attn.q_proj.bias"),
        (edit("lost", models["mha"], lambda t: t.pop(f"{layer}mlp.up_proj.weight")),
         "lm", {}, f"missing: {layer}mlp.up_proj.weight"),
        (edit("no_head", models["mha"], lambda t: t.pop("lm_head.weight")), "lm", {}, "missing: lm_head.weight"),
        (edit("shape", models["mha"], lambda t: t.update({"model.norm.weight": torch.ones(63)})),
         "lm", {}, "model.norm.weight has shape (63,), config.json implies (64,)"),
        (edit("rotary", models["mha"], lambda t: t.update({f"{layer}self_attn.rotary_emb.inv_freq": torch.ones(8)})),
         "lm", {}, "loaded"),
        (edit("duplicate", models["tied"], lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]})),
         "lm", {}, "loaded"),
        (edit("renamed", models["tied"], lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")})),
         "lm", {}, "loaded"),
        (edit("differs", models["tied"], lambda t: t.update({"lm_head.weight": torch.ones(97, 64)})),
         "lm", {}, "lm_head.weight differs from model.embed_tokens.weight"),
        (edit("labels", reward, lambda t: t.update({"score.weight": torch.ones(2, 64)})),
         "value", {}, "score.weight has 2 labels"),
        (edit("fresh", reward, lambda t: t.update({"score.weight": torch.ones(2, 64)})),
         "value", {"head_init": "fresh"}, "loaded"),
        (models["mha"], "value", {"head_init": "loaded"}, "no value head (score.weight)"),
        (models["mha"], "value", {}, "loaded"),
    ]  # fmt: skip
    for layout in ((1, 1, None), (1, 4, None)):
        results = run_ranks(_messages, world_of(layout), [case[:3] for case in cases], layout)
        for rank, messages in enumerate(results):
            for case, message in zip(cases, messages, strict=True):
                assert case[3] in message, (rank, Path(case[0]).name, message)


def test_value_head_with_a_bias(tmp_path: Path) -> None:
    reward = str(DATA / "ds_chat_trajectory" / "reward")
    path = edit_copy(reward, tmp_path / "bias", lambda t: t.update({"score.bias": torch.tensor([0.75])}))
    for layout in ((1, 2, None), (2, 1, None)):
        out = tmp_path / f"out{layout}"
        with_bias = last_rank(run_ranks(model_values, 2, path, layout, {}, str(out)))
        without = last_rank(run_ranks(model_values, 2, reward, layout, {}))
        assert (with_bias - without - 0.75).abs().max() < 1e-5
        assert_same_tensors(path, out)


def _refused(path: str, tp: int) -> str:
    from mrlhf.checkpoint.convert import import_hf

    try:
        import_hf(path, path + "-megatron", tensor_model_parallel_size=tp)
    except ConfigError as error:
        return str(error)
    return "imported"


def test_b7_too_few_key_value_heads(models: dict[str, str]) -> None:
    message = run_ranks(_refused, 4, models["recorded"], 4)[0]
    assert "2" in message
    assert "4" in message
    assert "imported" not in message
    assert "conversion with TP 4 x PP 1 needs 4 processes, but 1" in _refused(models["recorded"], 4)


def test_f1_conversion_names_all_sizes() -> None:
    model = ModelConfig("llama", 64, 4, 4, 4, 16, 128, 97, 64)
    with pytest.raises(ConfigError, match="conversion with TP 4 x PP 4 needs 16 processes, but 4 were started"):
        conversion_sizes(model, 4, 4, 4)
