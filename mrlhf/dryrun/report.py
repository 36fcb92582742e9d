"""A dry run as plain values and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from mrlhf.config_schema import PPOConfig
from mrlhf.dryrun.results import Lengths, Phase
from mrlhf.dryrun.run import Alike, describe_ranks, total_parameters
from mrlhf.dryrun.traffic import Message
from mrlhf.model_config import ModelConfig
from mrlhf.planning import fp8
from mrlhf.planning.from_config import make_role, role_sizes
from mrlhf.planning.job import Role

GIB = 2**30


def as_values(
    config: PPOConfig,
    models: Mapping[str, ModelConfig],
    world_size: int,
    lengths: Lengths,
    groups: Sequence[Alike],
) -> dict[str, Any]:
    """Everything, as values that JSON can hold."""
    answer: dict[str, Any] = {
        "world_size": world_size,
        "layout": config.parallel.sizes(world_size).describe(),
        "prompt_length": lengths.prompt,
        "response_length": lengths.response,
        "fp8": config.precision.fp8,
        "fp8_walked": config.precision.fp8 is not None and config.precision.fp8_emulation,
        "ranks": [_group(group) for group in groups],
    }
    planned = {role: make_role(config, role, model, world_size) for role, model in models.items()}
    for values, group in zip(answer["ranks"], groups, strict=True):
        for name, part in planned.items():
            values["models"][name]["fp8"] = _fp8(part, part.stage_of(group.walk.rank))
    if sum(len(group.ranks) for group in groups) == world_size:
        answer["models"] = {}
        for role, model in models.items():
            found, own = total_parameters(config, role, model, role_sizes(config, role, world_size), groups)
            answer["models"][role] = {"parameters_of_all_ranks": found, "parameters_of_the_model": own}
    return answer


def _group(group: Alike) -> dict[str, Any]:
    walk = group.walk
    return {
        "ranks": list(group.ranks),
        "walked": walk.rank,
        "passes_of": group.passes_of,
        "models": {
            role: {
                "layers": part.layers,
                "parameters": part.parameters,
                "replicated_over_tp": part.replicated,
                "weights": part.weights,
                "gradients": part.gradients,
                "optimizer": part.optimizer,
                "shapes": {name: list(shape) for name, shape in part.shapes.items()},
            }
            for role, part in walk.parts.items()
        },
        "kv_cache": walk.kv_cache,
        "phases": {name: _phase(phase) for name, phase in walk.phases.items()},
        "checkpoint": {
            "written": walk.written,
            "tensors": [
                {
                    "name": tensor.name,
                    "global_shape": list(tensor.global_shape),
                    "local_shape": list(tensor.local_shape),
                    "dtype": tensor.dtype,
                    "written": tensor.written,
                }
                for tensor in walk.saved
            ],
        },
    }


def _fp8(role: Role, stage: int) -> dict[str, Any] | None:
    """By formula: what Transformer Engine's FP8 has and a walk has not."""
    if not role.fp8:
        return None
    reductions = fp8.amax_reductions(role, stage)
    return {
        "layers": role.fp8_layers(stage),
        "weights": fp8.weight_bytes(role, stage),
        "amax_all_reduces_of_a_micro_batch": asdict(reductions) if reductions is not None else None,
    }


def _phase(phase: Phase) -> dict[str, Any]:
    return {
        "times": phase.times,
        "micro_batches": phase.micro_batches,
        "micro_batches_walked": phase.walked,
        "peak": phase.peak,
        "messages": [
            {
                "kind": message.kind,
                "group": message.group,
                "ranks": message.ranks,
                "dtype": message.dtype,
                "shape": list(message.shape),
                "peer": message.peer if message.peer >= 0 else None,
                "count": count,
                "bytes": message.bytes * count,
            }
            for message, count in sorted(phase.messages.items())
        ],
    }


def print_report(answer: Mapping[str, Any], groups: Sequence[Alike], console: Console) -> None:
    """Tables of every group of ranks that are alike."""
    console.print(
        f"{answer['layout']}; prompts of {answer['prompt_length']} and responses of {answer['response_length']} tokens"
    )
    if answer["fp8"] and not answer["fp8_walked"]:
        console.print(
            "FP8: rows and passes are filled up as it needs them, layers are walked in precision.dtype; what it adds "
            "is counted by formula, below each table of models. Memory and messages of the tables are without it"
        )
    for group, values in zip(groups, answer["ranks"], strict=True):
        _print_group(group, values["models"], console)
    for role, counted in answer.get("models", {}).items():
        found, own = counted["parameters_of_all_ranks"], counted["parameters_of_the_model"]
        verdict = "the model's own number" if found == own else f"NOT the model's {own:,}"
        console.print(f"{role}: {found:,} parameters on all ranks of a replica, each counted once: {verdict}")


def _print_group(group: Alike, values: Mapping[str, Any], console: Console) -> None:
    walk, several = group.walk, len(group.ranks) > 1
    title = describe_ranks(group.ranks) + (f" are alike, rank {walk.rank} was walked" if several else "")
    if group.passes_of != walk.rank:
        title += f"; the passes are those of rank {group.passes_of}"
    console.print(f"\n[bold]{title}[/bold]")
    models = Table("model", "layers", "parameters", "weights", "gradients", "optimizer", title_justify="left")
    for role, part in walk.parts.items():
        sizes = [_gib(size) for size in (part.weights, part.gradients, part.optimizer)]
        models.add_row(role, str(part.layers), f"{part.parameters:,}", *sizes)
    console.print(models)
    for role in walk.parts:
        if (extra := values[role]["fp8"]) is not None:
            console.print(_fp8_line(role, extra), markup=False)
    phases = Table("phase", "times", "micro-batches", "peak", "kind", "group", "count", "GiB")
    for name, phase in walk.phases.items():
        rows = _by_kind(phase.messages) or [("", "", "", "")]
        batches = str(phase.micro_batches or "")
        for number, row in enumerate(rows):
            head = (name, str(phase.times), batches, _gib(phase.peak)) if number == 0 else ("", "", "", "")
            phases.add_row(*head, *row)
    console.print(phases)
    for line in borders(walk.phases):
        console.print(line, markup=False)
    console.print(
        f"KV cache {_gib(walk.kv_cache)} GiB; a checkpoint has {len(walk.saved)} tensors of this rank, of which it "
        f"writes {_gib(walk.written)} GiB"
    )


def _fp8_line(role: str, extra: Mapping[str, Any]) -> str:
    """``actor: FP8 in 20 layers keeps 3.98 GiB of weights and scales; a micro-batch has 40, 80 in training ...``."""
    line = f"{role}: FP8 in {extra['layers']} layers keeps {_gib(extra['weights'])} GiB of weights and scales"
    told = extra["amax_all_reduces_of_a_micro_batch"]
    if told is None:
        return line
    training = f", {told['training']} in training" if told["training"] else ""
    return (
        f"{line}; a micro-batch has {told['forward']}{training} all_reduce of largest values ({told['bytes']} bytes) "
        f"over {told['group']} ({told['ranks']})"
    )


def _by_kind(messages: Mapping[Message, int]) -> list[tuple[str, str, str, str]]:
    counts: Counter[tuple[str, str, int]] = Counter()
    sizes: Counter[tuple[str, str, int]] = Counter()
    for message, count in messages.items():
        key = (message.group, message.kind, message.ranks)
        counts[key] += count
        sizes[key] += count * message.bytes
    return [
        (kind, f"{name} ({ranks})", f"{counts[name, kind, ranks]:,}", f"{sizes[name, kind, ranks] / GIB:,.3f}")
        for name, kind, ranks in sorted(counts)
    ]


def borders(phases: Mapping[str, Phase]) -> list[str]:
    """What passes the borders of this rank's stages: ``train/actor: sends [256, 1, 8192] bfloat16 to rank 8``."""
    lines = []
    for name, phase in phases.items():
        words = []
        for message in sorted(phase.messages):
            # The shape that goes ahead of every tensor is three whole numbers.
            if message.kind in ("send", "recv") and message.dtype != "int64":
                verb, where = ("sends", "to") if message.kind == "send" else ("receives", "from")
                words.append(f"{verb} {list(message.shape)} {message.dtype} {where} rank {message.peer}")
        if words:
            lines.append(f"{name}: {', '.join(words)}")
    return lines


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}"
