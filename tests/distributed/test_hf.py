"""Hugging Face folders in and out of real Megatron stages, compared with transformers and with themselves."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrlhf.errors import CheckpointError, ConfigError
from tests.ranks import RankFailure, run_ranks

DATA = Path(__file__).parents[1] / "data"
LAYOUTS = [(1, 1, None), (2, 1, None), (1, 2, None), (1, 4, None), (2, 2, None), (1, 2, 2)]
TOKENS = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(5))


def _build(path: str | Path, tp: int, pp: int, vpp: int | None, head: str = "lm", dtype: Any = torch.float32) -> Any:
    from mrlhf.checkpoint.hf import read_model_config
    from mrlhf.megatron.groups import build_groups
    from mrlhf.megatron.model import build_model
    from mrlhf.planner import ParallelSizes

    sizes = ParallelSizes(
        world_size=torch.distributed.get_world_size(),
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
    )
    config, groups = read_model_config(path), build_groups(sizes)
    return config, groups, build_model(config, sizes, groups, head=head, dtype=dtype)


def _load(path: str | Path, layout: Any, head: str = "lm", dtype: Any = torch.float32, **options: Any) -> Any:
    from mrlhf.checkpoint.convert import load_weights

    config, groups, chunks = _build(path, *layout, head=head, dtype=dtype)
    load_weights(chunks, config, path, groups=groups, head=head, **options)
    return config, groups, chunks


def _forward(config: Any, groups: Any, chunks: Any, tokens: torch.Tensor, head: str = "lm") -> torch.Tensor | None:
    """Whole logits ``[b, s, V]`` or values ``[b, s]``; None on the stages before the last."""
    from mrlhf.megatron.schedule import forward_only

    outputs = forward_only(
        chunks, [row[None] for row in tokens], lambda _, out: out, groups=groups, tokens=lambda row: row
    )
    if not outputs:
        return None
    mine = torch.cat([out.float() for out in outputs])
    if head == "value":
        return mine
    shards = [torch.empty_like(mine) for _ in range(groups.tp.size())]
    torch.distributed.all_gather(shards, mine.contiguous(), group=groups.tp)
    return torch.cat(shards, dim=-1)[..., : config.vocab_size]


def _outputs(paths: dict[str, str], layout: Any, head: str = "lm", dtype: Any = torch.float32) -> dict[str, Any]:
    return {name: _forward(*_load(path, layout, head, dtype), TOKENS, head) for name, path in paths.items()}


def _world(layout: Any) -> int:
    return layout[0] * layout[1]


def _last(results: list[Any]) -> Any:
    return results[-1]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One folder for each thing that a checkpoint may have; 4 layers, so that PP 4 works."""
    from transformers import MistralConfig, MistralForCausalLM

    from tools.make_tiny_model import make_tiny_model

    root = tmp_path_factory.mktemp("models")
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    variants: dict[str, dict[str, Any]] = {
        "tied": {"tied": True},
        "untied_sharded": {"max_shard_size": "60KB"},
        "mha": {"num_kv_heads": 4},
        "head_dim": {"head_dim": 24},
        "biases": {"attention_bias": True, "mlp_bias": True},
        "llama3_rope": {"rope_parameters": llama3},
        "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    }
    for seed, (name, options) in enumerate(variants.items()):
        make_tiny_model(root / name, seed=seed, **options)
    torch.manual_seed(9)
    mistral = MistralConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        vocab_size=97, max_position_embeddings=128, sliding_window=None, initializer_range=0.1,
    )  # fmt: skip
    MistralForCausalLM(mistral).save_pretrained(root / "mistral")
    paths = {name: str(root / name) for name in (*variants, "mistral")}
    return paths | {"recorded": str(DATA / "standard_trajectory" / "actor")}


def _transformers_logits(path: str, dtype: Any = torch.float32) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)(TOKENS).logits.float()


@pytest.fixture(scope="module")
def expected(models: dict[str, str]) -> dict[str, torch.Tensor]:
    return {name: _transformers_logits(path) for name, path in models.items()}


def test_scaled_rope_matters_in_these_models(models: dict[str, str], tmp_path: Path) -> None:
    """Without scaling the logits are others, so the comparison below can see it."""
    for name in ("llama3_rope", "linear_rope"):
        folder = tmp_path / name
        folder.mkdir()
        values = json.loads((Path(models[name]) / "config.json").read_text())
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
        (folder / "config.json").write_text(json.dumps(values))
        (folder / "model.safetensors").symlink_to(Path(models[name]) / "model.safetensors")
        assert (_transformers_logits(str(folder)) - _transformers_logits(models[name])).abs().max() > 0.1


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_b4_b5_c2_logits_equal_transformers(models: dict[str, str], expected: Any, layout: Any) -> None:
    found = _last(run_ranks(_outputs, _world(layout), models, layout))
    for name, logits in found.items():
        # fp32 through four layers whose sums run in another order; logits reach about 4.
        assert (logits - expected[name]).abs().max() < 3e-5, name


def test_probe_of_the_recording(models: dict[str, str]) -> None:
    probe = json.loads((DATA / "standard_trajectory" / "expected.json").read_text())["probe"]
    found = _last(run_ranks(_probe, 2, models["recorded"], torch.tensor(probe["input_ids"])))
    assert (found[..., :8] - torch.tensor(probe["logits_first8"])).abs().max() < 2e-4
    assert (found.sum(-1) - torch.tensor(probe["logits_sum"])).abs().max() < 1e-3
    assert torch.equal(found.argmax(-1), torch.tensor(probe["logits_argmax"]))


def _probe(path: str, tokens: torch.Tensor) -> Any:
    return _forward(*_load(path, (1, 2, None)), tokens)


def _tied_copies(path: str, layout: Any) -> list[tuple[int, str, int]]:
    """(stage, tensor rank, hash) of every parameter that is the embedding."""
    from mrlhf.checkpoint.names import EMBEDDING, OUTPUT_WEIGHT, all_parameters

    _, groups, chunks = _load(path, layout)
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


def _round_trip(path: str, out: str, layout: Any, head: str, dtype: Any, options: dict[str, Any]) -> None:
    from mrlhf.checkpoint.hf import export_hf

    config, groups, chunks = _load(path, layout, head, dtype)
    export_hf(chunks, config, out, source_folder=path, groups=groups, head=head, **options)


def _tensors(path: str | Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(Path(path).glob("*.safetensors")) for name, value in load_file(file).items()}


def _assert_same(path: str | Path, other: str | Path, dtype: torch.dtype | None = None) -> None:
    first, second = _tensors(path), _tensors(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert second[name].dtype == (dtype or value.dtype), name
        assert torch.equal(value.to(second[name].dtype), second[name]), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_c1_c6_round_trip_is_bitwise(models: dict[str, str], tmp_path: Path, layout: Any) -> None:
    run_ranks(_round_trips, _world(layout), models, str(tmp_path), layout)
    for name, path in models.items():
        _assert_same(path, tmp_path / name)
        before, after = (json.loads((Path(p) / "config.json").read_text()) for p in (path, tmp_path / name))
        assert before == after, name


def _round_trips(paths: dict[str, str], out: str, layout: Any) -> None:
    for name, path in paths.items():
        _round_trip(path, f"{out}/{name}", layout, "lm", torch.float32, {"max_shard_size": 60_000})


def test_replicas_export_once(models: dict[str, str], tmp_path: Path) -> None:
    run_ranks(_round_trip, 4, models["tied"], str(tmp_path / "out"), (2, 1, None), "lm", torch.float32, {})
    _assert_same(models["tied"], tmp_path / "out")


def test_c8_export_is_complete_and_loads_in_transformers(models: dict[str, str], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    run_ranks(_round_trip, 2, models["tied"], str(out), (1, 2, None), "lm", torch.float32, {"max_shard_size": 60_000})
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
        run_ranks(_round_trip, 1, *arguments, {})
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    run_ranks(_round_trip, 1, *arguments, {"overwrite": True})
    _assert_same(models["tied"], tmp_path)
    assert not (tmp_path / "mine").exists()


def test_c9_dtypes(models: dict[str, str], tmp_path: Path) -> None:
    bf16 = torch.bfloat16
    # fp32 file, bf16 model: cast on load, all of the export in two bytes.
    cast = tmp_path / "cast"
    run_ranks(_round_trip, 2, models["tied"], str(cast), (2, 1, None), "lm", bf16, {})
    _assert_same(models["tied"], cast, dtype=bf16)
    assert json.loads((cast / "config.json").read_text())["dtype"] == "bfloat16"
    # bf16 file, bf16 model and export: bitwise. bf16 file, fp32 model, export asked in bf16: the same again.
    for name, dtype, options in (("same", bf16, {}), ("back", torch.float32, {"dtype": bf16})):
        out = tmp_path / name
        run_ranks(_round_trip, 2, str(cast), str(out), (2, 1, None), "lm", dtype, options)
        _assert_same(cast, out, dtype=bf16)
    found = _last(run_ranks(_outputs, 2, {"cast": str(cast)}, (1, 2, None), "lm", bf16))["cast"]
    reference = _transformers_logits(str(cast), bf16)
    # bf16 keeps 8 bits: 4 * 2^-8 on logits of up to 4, through four layers.
    assert (found - reference).abs().max() < 0.1
    fp32 = _last(run_ranks(_outputs, 1, {"cast": str(cast)}, (1, 1, None)))["cast"]
    assert (fp32 - _transformers_logits(str(cast))).abs().max() < 3e-5


def _values(path: str, layout: Any, options: dict[str, Any], out: str | None = None) -> Any:
    from mrlhf.checkpoint.hf import export_hf

    config, groups, chunks = _load(path, layout, "value", **options)
    values = _forward(config, groups, chunks, TOKENS, "value")
    if out:
        export_hf(chunks, config, out, source_folder=path, groups=groups, head="value")
    return values


@pytest.mark.parametrize("layout", [(1, 1, None), (2, 1, None), (1, 2, None), (2, 2, None)], ids=str)
def test_b10_values_of_classifier_equal_transformers(tmp_path: Path, layout: Any) -> None:
    from transformers import AutoModelForSequenceClassification

    path = str(DATA / "ds_chat_trajectory" / "reward")
    found = run_ranks(_values, _world(layout), path, layout, {"head_init": "loaded"}, str(tmp_path / "out"))
    model = AutoModelForSequenceClassification.from_pretrained(path)
    with torch.no_grad():
        hidden = model.model(TOKENS).last_hidden_state
        expected = model.score(hidden).squeeze(-1)
    assert (found[-1] - expected).abs().max() < 3e-5
    assert all(value is None for value in found[: -layout[0]]), "values are on the last stage only"
    _assert_same(path, tmp_path / "out")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config.num_labels == 1


@pytest.mark.parametrize("layout", [(1, 1, None), (2, 2, None), (1, 4, None)], ids=str)
def test_b10_critic_from_tied_language_model(models: dict[str, str], tmp_path: Path, layout: Any) -> None:
    from transformers import AutoModelForSequenceClassification

    out = tmp_path / "critic"
    found = _last(run_ranks(_values, _world(layout), models["tied"], layout, {"seed": 3}, str(out)))
    exported = _tensors(out)
    head = exported.pop("score.weight")
    from mrlhf.checkpoint.hf import fresh_value_head

    assert torch.equal(head, fresh_value_head(64, 3)), "the head depends on the seed alone"
    assert not torch.equal(head, fresh_value_head(64, 4))
    assert "lm_head.weight" not in exported
    body = _tensors(models["tied"])
    assert exported.keys() == body.keys()
    assert all(torch.equal(value, body[name]) for name, value in exported.items())
    model = AutoModelForSequenceClassification.from_pretrained(out)
    with torch.no_grad():
        expected = model.score(model.model(TOKENS).last_hidden_state).squeeze(-1)
    assert (found - expected).abs().max() < 3e-5
    again = _last(run_ranks(_values, _world(layout), str(out), layout, {"head_init": "loaded"}))
    assert torch.equal(again, found)


def _edit(path: str, out: Path, change: Any) -> str:
    """A copy of a single-file folder whose tensors went through ``change``."""
    out.mkdir()
    for file in Path(path).glob("*.json"):
        (out / file.name).write_text(file.read_text())
    tensors = _tensors(path)
    change(tensors)
    save_file({name: value.clone() for name, value in tensors.items()}, out / "model.safetensors")
    return str(out)


def _message(path: str, layout: Any = (1, 1, None), head: str = "lm", **options: Any) -> str:
    try:
        _load(path, layout, head, **options)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def _messages(cases: list[tuple[str, str, dict[str, Any]]], layout: Any) -> list[str]:
    return [_message(path, layout, head, **options) for path, head, options in cases]


def test_c2_every_unused_or_missing_tensor_is_an_error(models: dict[str, str], tmp_path: Path) -> None:
    reward = str(DATA / "ds_chat_trajectory" / "reward")
    layer = "model.layers.3."

    def edit(name: str, base: str, change: Any) -> str:
        return _edit(base, tmp_path / name, change)

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
        results = run_ranks(_messages, _world(layout), [case[:3] for case in cases], layout)
        for rank, messages in enumerate(results):
            for case, message in zip(cases, messages, strict=True):
                assert case[3] in message, (rank, Path(case[0]).name, message)


def test_value_head_with_a_bias(tmp_path: Path) -> None:
    reward = str(DATA / "ds_chat_trajectory" / "reward")
    path = _edit(reward, tmp_path / "bias", lambda t: t.update({"score.bias": torch.tensor([0.75])}))
    for layout in ((1, 2, None), (2, 1, None)):
        out = tmp_path / f"out{layout}"
        with_bias = _last(run_ranks(_values, 2, path, layout, {}, str(out)))
        without = _last(run_ranks(_values, 2, reward, layout, {}))
        assert (with_bias - without - 0.75).abs().max() < 1e-5
        _assert_same(path, out)


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


def _convert(source: str, target: str, tp: int, pp: int, options: dict[str, Any]) -> None:
    from mrlhf.checkpoint.convert import import_hf

    import_hf(source, target, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **options)


def _convert_back(source: str, target: str, tp: int, pp: int) -> None:
    from mrlhf.checkpoint.convert import export_megatron

    export_megatron(source, target, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)


@pytest.mark.parametrize("name", ["tied", "biases"])
def test_megatron_folder_under_other_layouts(models: dict[str, str], expected: Any, tmp_path: Path, name: str) -> None:
    folder = str(tmp_path / "megatron")
    run_ranks(_convert, 2, models[name], folder, 2, 1, {})
    for layout in ((1, 1, None), (1, 4, None), (1, 2, 2)):
        found = _last(run_ranks(_outputs, _world(layout), {name: folder}, layout))[name]
        assert (found - expected[name]).abs().max() < 3e-5
    for tp, pp in ((1, 1), (2, 2)):
        out = tmp_path / f"hf{tp}{pp}"
        run_ranks(_convert_back, tp * pp, folder, str(out), tp, pp)
        _assert_same(models[name], out)
    critic = _last(run_ranks(_values, 2, folder, (1, 2, None), {"seed": 3}))
    assert torch.equal(critic, _last(run_ranks(_values, 2, models[name], (1, 2, None), {"seed": 3})))


def test_megatron_folder_of_a_classifier(tmp_path: Path) -> None:
    reward = str(DATA / "ds_chat_trajectory" / "reward")
    path = _edit(reward, tmp_path / "bias", lambda t: t.update({"score.bias": torch.tensor([0.75])}))
    folder = str(tmp_path / "megatron")
    run_ranks(_convert, 1, path, folder, 1, 1, {"dtype": torch.bfloat16})
    run_ranks(_convert_back, 2, folder, str(tmp_path / "hf"), 2, 1)
    _assert_same(path, tmp_path / "hf", dtype=torch.bfloat16)
    assert "no language-model head" in run_ranks(_message, 1, folder)[0]


def _tool(arguments: list[str]) -> int:
    from tools.convert_hf import main

    return main(arguments)


def test_command_line_both_ways(models: dict[str, str], tmp_path: Path) -> None:
    megatron, back = str(tmp_path / "megatron"), str(tmp_path / "back")
    arguments = ["import", "--source", models["tied"], "--target", megatron, "--tp", "2"]
    assert run_ranks(_tool, 2, arguments) == [0, 0]
    assert run_ranks(_tool, 1, arguments) == [2], "wrong number of processes"
    assert run_ranks(_tool, 1, ["export", "--source", megatron, "--target", back, "--max-shard-size", "1e-4"]) == [0]
    _assert_same(models["tied"], back)
    assert len(list(Path(back).glob("*.safetensors"))) > 1
    assert (Path(back) / "chat_template.jinja").exists()


def _peak_anonymous_growth(run: Any) -> int:
    """Largest growth of this process's anonymous (not file-backed) memory while ``run`` runs, in bytes."""

    def anonymous() -> int:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["RssAnon"].split()[0]) * 1024

    before, peak, stop = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.0005):
            peak = max(peak, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    run()
    stop.set()
    thread.join()
    return max(peak, anonymous()) - before


def _memory(path: str, out: str) -> tuple[int, int, int]:
    from mrlhf.checkpoint.hf import export_hf, load_hf_weights

    torch.set_num_threads(1)
    config, groups, chunks = _build(path, 1, 2, None)
    for chunk in chunks:
        for param in chunk.parameters():
            param.data.zero_()  # pages of the parameters exist before the measurement
    size = sum(param.numel() * 4 for chunk in chunks for param in chunk.parameters())
    load = _peak_anonymous_growth(lambda: load_hf_weights(chunks, config, path, tp_rank=0, tp_size=1))
    export = _peak_anonymous_growth(
        lambda: export_hf(chunks, config, out, source_folder=path, groups=groups, max_shard_size=64 * 2**20)
    )
    return size, load, export


def test_f9_loading_and_export_need_a_few_tensors_of_memory(tmp_path: Path) -> None:
    from tools.make_tiny_model import make_tiny_model

    path = make_tiny_model(
        tmp_path / "model", hidden_size=768, ffn_hidden_size=2048, num_layers=16, num_heads=12, num_kv_heads=4,
        max_shard_size="250MB", tokenizer=False,
    )  # fmt: skip
    whole = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    largest = 2 * 2048 * 768 * 4
    assert whole > 380e6
    assert len(list(path.glob("*.safetensors"))) == 2
    for size, load, export in run_ranks(_memory, 2, str(path), str(tmp_path / "out")):
        assert size > 0.45 * whole
        # The tensors of one entry, their fused form and a copy on the way; far below the stage, let alone the model.
        assert load < 6 * largest, f"{load / 1e6:.0f} MB"
        assert export < 6 * largest, f"{export / 1e6:.0f} MB"
    _assert_same(path, tmp_path / "out")
