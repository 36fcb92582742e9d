"""Helpers of the checkpoint tests: model folders, loading on ranks, outputs, comparison of folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mrlhf.errors import CheckpointError

DATA = Path(__file__).parents[1] / "data"
TOKENS = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(5))


def build_stages(
    path: str | Path, tp: int, pp: int, vpp: int | None, head: str = "lm", dtype: Any = torch.float32
) -> Any:
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


def load_stages(path: str | Path, layout: Any, head: str = "lm", dtype: Any = torch.float32, **options: Any) -> Any:
    from mrlhf.checkpoint.convert import load_weights

    config, groups, chunks = build_stages(path, *layout, head=head, dtype=dtype)
    load_weights(chunks, config, path, groups=groups, head=head, **options)
    return config, groups, chunks


def forward_stages(
    config: Any, groups: Any, chunks: Any, tokens: torch.Tensor, head: str = "lm"
) -> torch.Tensor | None:
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


def model_outputs(paths: dict[str, str], layout: Any, head: str = "lm", dtype: Any = torch.float32) -> dict[str, Any]:
    return {name: forward_stages(*load_stages(path, layout, head, dtype), TOKENS, head) for name, path in paths.items()}


def world_of(layout: Any) -> int:
    return layout[0] * layout[1]


def last_rank(results: list[Any]) -> Any:
    return results[-1]


def write_models(root: Path) -> dict[str, str]:
    """One folder for each thing that a checkpoint may have; 4 layers, so that PP 4 works."""
    from transformers import MistralConfig, MistralForCausalLM

    from tools.make_tiny_model import make_tiny_model

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


def transformers_logits(path: str, dtype: Any = torch.float32) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)(TOKENS).logits.float()


def round_trip(path: str, out: str, layout: Any, head: str, dtype: Any, options: dict[str, Any]) -> None:
    from mrlhf.checkpoint.hf import export_hf

    config, groups, chunks = load_stages(path, layout, head, dtype)
    export_hf(chunks, config, out, source_folder=path, groups=groups, head=head, **options)


def read_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(Path(path).glob("*.safetensors")) for name, value in load_file(file).items()}


def assert_same_tensors(path: str | Path, other: str | Path, dtype: torch.dtype | None = None) -> None:
    first, second = read_tensors(path), read_tensors(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert second[name].dtype == (dtype or value.dtype), name
        assert torch.equal(value.to(second[name].dtype), second[name]), name


def model_values(path: str, layout: Any, options: dict[str, Any], out: str | None = None) -> Any:
    from mrlhf.checkpoint.hf import export_hf

    config, groups, chunks = load_stages(path, layout, "value", **options)
    values = forward_stages(config, groups, chunks, TOKENS, "value")
    if out:
        export_hf(chunks, config, out, source_folder=path, groups=groups, head="value")
    return values


def edit_copy(path: str, out: Path, change: Any) -> str:
    """A copy of a single-file folder whose tensors went through ``change``."""
    out.mkdir()
    for file in Path(path).glob("*.json"):
        (out / file.name).write_text(file.read_text())
    tensors = read_tensors(path)
    change(tensors)
    save_file({name: value.clone() for name, value in tensors.items()}, out / "model.safetensors")
    return str(out)


def load_message(path: str, layout: Any = (1, 1, None), head: str = "lm", **options: Any) -> str:
    try:
        load_stages(path, layout, head, **options)
    except CheckpointError as error:
        return str(error)
    return "loaded"
