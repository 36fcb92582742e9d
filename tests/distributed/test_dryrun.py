"""Dry runs against real ranks: what every rank builds, sends and saves in an iteration of the trainer."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.tiny_run import make_config, make_inputs

PROMPT, RESPONSE = 5, 4
TP2, PP2 = "parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"
SP, VPP2 = "parallel.sequence_parallel=true", "parallel.virtual_pipeline_model_parallel_size=2"
CP2, DISTRIBUTED = "parallel.context_parallel_size=2", "optimizer.distributed=true"
FP8 = ["precision.fp8=hybrid", "precision.fp8_emulation=true"]

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "tp2_pp2_sp": (4, [TP2, PP2, SP]),
    "tp2": (2, [TP2]),
    "pp2": (2, [PP2]),
    "dp2": (2, []),
    "distributed": (2, [DISTRIBUTED]),
    "distributed_bf16_tp2": (4, [TP2, DISTRIBUTED, "precision.dtype=bf16"]),
    "vpp2": (2, [PP2, VPP2, "ppo.micro_batch_size=1"]),
    "vpp2_tp2_sp": (4, [PP2, VPP2, TP2, SP, "ppo.micro_batch_size=1"]),
    "cp2": (2, [CP2]),
    "cp2_tp2_sp_distributed": (4, [CP2, TP2, SP, DISTRIBUTED]),
    "fp8_tp2_sp": (2, [TP2, SP, *FP8]),
    "fp8_delayed_tp2": (2, [TP2, *FP8, "precision.fp8_recipe=delayed"]),
    "fp8_delayed_cp2": (2, [CP2, *FP8, "precision.fp8_recipe=delayed"]),
    "skip_old_logprobs": (2, [TP2, "ppo.skip_old_logprobs=true", "ppo.epochs=1", "ppo.kl_coef=0"]),
    "own_layout": (2, [TP2, "critic.parallel.tensor_model_parallel_size=1"]),
}
QUICK = ("pp2",)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_inputs(tmp_path_factory.mktemp("dryrun"), num_layers=4)
    lines = [json.dumps({"prompt": f"the old trees in the wind and a robot who reads {word}"}) for word in "abcdefgh"]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def configured(inputs: Path, output: Path, overrides: list[str]) -> Any:
    """Every prompt is cut to the same length; there are several micro-batches in every pass."""
    return make_config(
        inputs,
        output,
        f"data.max_prompt_length={PROMPT}",
        "data.overlong=keep_last",
        f"rollout.max_response_length={RESPONSE}",
        "rollout.batch_size=4",
        "ppo.minibatch_size=8",
        "ppo.micro_batch_size=1",
        "inference.micro_batch_size=1",
        "ppo.whiten_advantages=true",
        f"reward.sources=[{{kind: model, path: '{inputs / 'reward'}'}}]",
        *overrides,
    )


def real_iteration(config: Any) -> dict[str, Any]:
    """One iteration of the trainer on this rank, with every message counted by phase."""
    from unittest.mock import patch

    from mrlhf.checkpoint.plan import planned_tensors
    from mrlhf.dryrun.traffic import Recorder, Traffic, group_names
    from mrlhf.progress import OffDisplay
    from mrlhf.trainer import ppo
    from mrlhf.trainer.run_state import PPORunState

    trainer = ppo.build_trainer(config)
    trainer.sampler.stop_ids = []
    layouts = [trainer.job.groups, *(layout.groups for layout in trainer.job.own_layouts.values())]
    names = {key: name for groups in reversed(layouts) for key, name in group_names(groups).items()}
    stage_ranks = {r for groups in layouts for r in dist.get_process_group_ranks(groups.pp)}
    traffic = Traffic(names, stage_ranks)

    def counted(phase: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            traffic.phase = phase
            with Recorder(traffic):
                return function(*args, **kwargs)

        return call

    def count(phase: str, owner: Any, name: str) -> Any:
        return patch.object(owner, name, counted(phase, getattr(owner, name)))

    reward = trainer.scorer.models[0][0]
    with (
        count("rollout", trainer.sampler.engine, "generate"),
        count("inference/actor", trainer.actor, "logprobs"),
        count("inference/reference", trainer.reference, "logprobs") if trainer.reference is not None else nullcontext(),
        count("inference/critic", trainer.critic, "values"),
        count("inference/reward0", reward, "scores"),
        count("experience", ppo, "add_advantages"),
        count("experience", ppo, "gather_batch"),
        count("train/actor", trainer.actor, "policy_gradients"),
        count("train/critic", trainer.critic, "value_gradients"),
        count("step/actor", trainer.actor, "apply"),
        count("step/critic", trainer.critic, "apply"),
    ):
        batches: list[Any] = []
        real_masks = ppo.add_masks
        with patch.object(ppo, "add_masks", lambda batch, *rest: real_masks(batches.append(batch) or batch, *rest)):
            trainer.iterate(0, OffDisplay())
    assert set(batches[0].prompt_lengths.tolist()) == {PROMPT}
    assert set(batches[0].response_lengths.tolist()) == {RESPONSE}
    traffic.phase = "save"
    with Recorder(traffic):
        state = PPORunState(trainer)
        saved = planned_tensors(state.models(), state.averages(), optimizer=config.checkpoint.optimizer)
    models = {"actor": trainer.actor, "critic": trainer.critic, "reference": trainer.reference, "reward0": reward}
    models = {role: model for role, model in models.items() if model is not None}
    return {
        "shapes": {
            role: {f"{i}.{n}": tuple(p.shape) for i, c in enumerate(model.chunks) for n, p in c.named_parameters()}
            for role, model in models.items()
        },
        "bytes": {role: held(model) for role, model in models.items()},
        "messages": traffic.counts,
        "saved": saved,
    }


def held(model: Any) -> tuple[int, int, int]:
    """Bytes of weights, gradient buffers, and optimizer."""
    from mrlhf.roles.model import TrainedModel

    parameters = [p for chunk in model.chunks for p in chunk.parameters()]
    weights = sum(p.numel() * p.element_size() for p in parameters)
    if not isinstance(model, TrainedModel):
        return weights, 0, 0
    gradients = sum({p.main_grad.untyped_storage().data_ptr(): p.main_grad.untyped_storage().nbytes()
                     for p in parameters}.values())  # fmt: skip
    storages = {}
    own = {p.untyped_storage().data_ptr() for p in parameters}
    for optimizer in model.trainable.optimizer.chained_optimizers:
        for group in optimizer.optimizer.param_groups:
            for main in group["params"]:
                state = optimizer.optimizer.state[main]
                for tensor in (main, state.get("exp_avg"), state.get("exp_avg_sq")):
                    if tensor is not None and tensor.untyped_storage().data_ptr() not in own:
                        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return weights, gradients, sum(storages.values())


def both(inputs: Path, output: Path, overrides: list[str]) -> Any:
    """This rank in earnest, then in a dry run of the same configuration."""
    from mrlhf.cli_plan import read_models
    from mrlhf.dryrun.results import Lengths
    from mrlhf.dryrun.walk import walk_rank
    from mrlhf.parallel.products import chosen

    config = configured(inputs, output, overrides)
    rank, world = dist.get_rank(), dist.get_world_size()
    # A dry run is about GPUs, which multiply 16-bit numbers themselves, whatever this processor does.
    with chosen("native"):
        real = real_iteration(config)
    dist.barrier()
    dist.destroy_process_group()
    walk = walk_rank(config, read_models(config), rank, world, Lengths(PROMPT, RESPONSE))
    return real, walk


def of_an_iteration(walk: Any) -> dict[str, Counter[Any]]:
    """Messages by phase, the two halves of the rollout together."""
    found: dict[str, Counter[Any]] = {}
    for name, phase in walk.phases.items():
        counts = found.setdefault("rollout" if name.startswith("rollout/") else name, Counter())
        for message, count in phase.messages.items():
            counts[message] += count * phase.times
    return {name: counts for name, counts in found.items() if counts and name != "build"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_a_dry_run_does_what_a_real_rank_does(run_ranks: Any, inputs: Path, tmp_path: Path, name: str) -> None:
    world, overrides = LAYOUTS[name]
    for rank, (real, walk) in enumerate(run_ranks(both, world, inputs, tmp_path / "out", overrides)):
        assert walk.rank == rank
        assert {role: part.shapes for role, part in walk.parts.items()} == real["shapes"]
        counted = of_an_iteration(walk)
        assert counted.keys() == real["messages"].keys()
        for phase, messages in real["messages"].items():
            assert counted[phase] == messages, f"rank {rank}, {phase}"
            assert sum(messages.values()) > 0
        assert walk.saved == real["saved"]
        assert walk.written > 0 or rank > 0
        for role, part in walk.parts.items():
            # A few kilobytes besides: steps and what else an optimizer keeps that is no state of a parameter.
            bytes_held = (part.weights, part.gradients, part.optimizer)
            assert bytes_held == pytest.approx(real["bytes"][role], rel=0.01, abs=2048), role
