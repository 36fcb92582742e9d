"""The planner's bytes against dry runs, where both define the same thing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
SP, DISTRIBUTED = "parallel.sequence_parallel=true", "optimizer.distributed=true"
BF16 = "precision.dtype=bf16"

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "tp2_pp2_sp_distributed_bf16": (8, [f"{TP}=2", f"{PP}=2", SP, DISTRIBUTED, BF16]),
    "fp32": (1, []),
    "tp4_bf16_ema": (4, [f"{TP}=4", BF16, "ppo.ema_decay=0.99"]),
    "cp2_tp2_sp_bf16": (8, ["parallel.context_parallel_size=2", f"{TP}=2", SP, DISTRIBUTED, BF16]),
    "cp4_fp32": (4, ["parallel.context_parallel_size=4"]),
    "cp2_recompute_pp2_bf16": (4, ["parallel.context_parallel_size=2", f"{PP}=2", "parallel.recompute=true", BF16]),
    "tp2_sp_parts_bf16": (2, [f"{TP}=2", SP, "parallel.recompute=selective", BF16]),
    "cp2_pp2_attention_mlp": (
        4,
        [
            "parallel.context_parallel_size=2",
            f"{PP}=2",
            "parallel.recompute=selective",
            "parallel.recompute_modules=[core_attn,mlp]",
            BF16,
        ],
    ),
    "tp2_sp_fp8": (2, [f"{TP}=2", SP, BF16, "precision.fp8=hybrid", "precision.fp8_recipe=mxfp8"]),
    "pp4_vpp_distributed": (
        8,
        [f"{PP}=4", "parallel.virtual_pipeline_model_parallel_size=2", DISTRIBUTED, BF16],
    ),
}
QUICK = ("tp2_pp2_sp_distributed_bf16",)


def folders(base: Path, layers: int) -> Path:
    """Llama 3's 8B with fewer layers and columns: wide enough that activations outweigh what is small."""
    for name, source in (("actor", "llama-3-70b"), ("reward", "llama-3-8b-reward")):
        config = json.loads((CONFIGS / "models" / source / "config.json").read_text())
        config |= {"hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": layers, "vocab_size": 32000}
        config |= {"num_attention_heads": 16, "num_key_value_heads": 8}
        (base / name).mkdir()
        (base / name / "config.json").write_text(json.dumps(config))
    return base


def configured(inputs: Path, overrides: list[str]) -> Any:
    from mrlhf.config import load_config

    given = {
        "actor.path": inputs / "actor",
        "reward.sources": f"[{{kind: model, path: '{inputs / 'reward'}'}}]",
        "data.prompts": "prompts.jsonl",
        "data.max_prompt_length": 256,
        "rollout.max_response_length": 255,
        "rollout.prompts_per_iteration": 32,
        "rollout.batch_size": 16,
        "ppo.minibatch_size": 32,
        "ppo.micro_batch_size": 2,
        "inference.micro_batch_size": 2,
        "trainer.iterations": 1,
        "trainer.output_dir": inputs / "out",
    }
    return load_config(None, [*(f"{key}={value}" for key, value in given.items()), *overrides])


def walks(inputs: Path, overrides: list[str], world: int) -> list[Any]:
    """The first rank of every pipeline stage."""
    from mrlhf.cli_plan import read_models
    from mrlhf.dryrun.run import default_lengths
    from mrlhf.dryrun.walk import walk_rank

    dist.destroy_process_group()
    config = configured(inputs, overrides)
    models = read_models(config)
    stages = config.parallel.sizes(world).pipeline_model_parallel_size
    ranks = sorted({0, world - world // stages})
    result = [walk_rank(config, models, rank, world, default_lengths(config, models)) for rank in ranks]
    dist.init_process_group("gloo", init_method=f"file://{inputs}/again{world}", rank=0, world_size=1)
    return result


def check_messages(job: Any, role: Any, stage: int, walk: Any, *, backward: bool) -> None:
    """Keys and values to the byte, tensor and pipeline parallel traffic to 1%."""
    from mrlhf.planning.traffic import pass_traffic

    phase = walk.phases[f"{'train' if backward else 'inference'}/{role.name}"]
    sent = dict.fromkeys(("tp", "cp", "pp"), 0.0)
    for message, count in phase.messages.items():
        # Beside them: shapes ahead of tensors, and a few numbers of every token, told to the stages and put together
        # over CP.
        aside = message.dtype == "int64" or message.kind == "broadcast"
        if message.group in sent and not aside and not (message.group == "cp" and len(message.shape) < 4):
            sent[message.group] += count * message.sent / phase.micro_batches
    plain = replace(role, fp8=False)
    planned = pass_traffic(job, plain, stage, job.train if backward else job.inference, backward=backward)
    assert sent["cp"] == planned.context
    assert sent["pp"] == pytest.approx(planned.pipeline, rel=0.01)
    assert sent["tp"] == pytest.approx(planned.tensor, rel=0.01)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_the_plan_is_within_5_percent(run_ranks: Any, tmp_path: Path, name: str) -> None:
    from mrlhf.cli_plan import read_models
    from mrlhf.planning.from_config import make_job
    from mrlhf.planning.memory import kv_cache_bytes, persistent, phases

    world, overrides = LAYOUTS[name]
    config = configured(folders(tmp_path, 8 if "vpp" in name else 4), overrides)
    job = replace(make_job(config, read_models(config), world), cuda=False)
    for walk in run_ranks(walks, 1, tmp_path, overrides, world)[0]:
        stages = {role.name: role.stage_of(walk.rank) for role in job.roles}
        for role in job.roles:
            part, index = walk.parts[role.name], stages[role.name]
            kept = persistent(job, role, index)
            assert part.parameters == role.stages[index].total
            assert part.layers == role.stages[index].layers
            assert kept.weights == part.weights
            assert kept.gradients == pytest.approx(part.gradients, rel=0.01)
            assert kept.optimizer == pytest.approx(part.optimizer, rel=0.01)
        actor = job.roles[0]
        assert job.rollout is not None
        assert kv_cache_bytes(job, actor, job.rollout, walk.parts["actor"].layers) == walk.kv_cache
        planned = phases(job, stages)
        for role in job.roles:
            check_messages(job, role, stages[role.name], walk, backward=False)
            if role.trained:
                check_messages(job, role, stages[role.name], walk, backward=True)
        walked = max(walk.phases["train/actor"].peak, walk.phases["train/critic"].peak)
        # FP8 layers are walked in bf16, without their copies of weights.
        train = planned["train"]
        assert train.total - train.rows - train.fp8 == pytest.approx(walked, rel=0.05)
