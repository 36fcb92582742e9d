"""Dry runs of many ranks: those that are alike are walked once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mrlhf.config_schema import PPOConfig
from mrlhf.dryrun.results import Lengths, RankWalk
from mrlhf.dryrun.walk import walk_rank
from mrlhf.model_config import ModelConfig
from mrlhf.parallel.layout import RankGrid
from mrlhf.planner import ParallelSizes, padded_vocab_size
from mrlhf.planning.from_config import head_of, role_sizes
from mrlhf.planning.parameters import model_parameters

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Alike:
    """Ranks that do the same.

    Attributes:
        ranks: their numbers.
        walk: of the first of them.
        passes_of: the rank whose passes they share; another one where only the checkpoint differs.
    """

    ranks: tuple[int, ...]
    walk: RankWalk
    passes_of: int


def default_lengths(config: PPOConfig, models: Mapping[str, ModelConfig]) -> Lengths:
    """The longest prompts and responses of a run."""
    prompt = config.data.max_prompt_length
    if prompt is None:
        prompt = min(model.max_position_embeddings for model in models.values()) - config.longest_response
    return Lengths(prompt, config.rollout.max_response_length)


def dry_run(
    config: PPOConfig,
    models: Mapping[str, ModelConfig],
    world_size: int,
    ranks: Collection[int],
    lengths: Lengths,
    *,
    told: Callable[[str], None] = lambda _: None,
) -> list[Alike]:
    """Walk ``ranks``, those that are alike once, in ascending order.

    Args:
        config: of the run; sizes have been checked.
        models: architectures by role.
        world_size: ranks of the run.
        ranks: whose parts.
        lengths: of all rows.
        told: gets a line before each walk.
    """
    layouts = {role: role_sizes(config, role, world_size) for role in models}
    grids = {sizes: RankGrid(sizes) for sizes in (config.parallel.sizes(world_size), *layouts.values())}
    same: dict[tuple[Key, Key], list[int]] = {}
    for rank in sorted(ranks):
        passes = tuple(passes_key(config, role, models[role], grids[sizes], rank) for role, sizes in layouts.items())
        saves = tuple(saves_key(config, grid, rank) for grid in grids.values())
        same.setdefault((passes, saves), []).append(rank)
    found: list[Alike] = []
    walked: dict[Key, RankWalk] = {}
    for (passes, _), members in same.items():
        first = members[0]
        known = walked.get(passes)
        what = "walked" if known is None else f"built; passes as rank {known.rank}"
        told(f"{describe_ranks(members)}: rank {first} is {what}")
        walk = walk_rank(config, models, first, world_size, lengths, passes=known is None)
        if known is None:
            walked[passes] = walk
        else:
            walk = with_passes(walk, known)
        found.append(Alike(tuple(members), walk, first if known is None else known.rank))
    return found


def with_passes(built: RankWalk, known: RankWalk) -> RankWalk:
    """A rank whose trained models were built, with the passes and the frozen models of one that is like it."""
    save = built.phases["save"]
    frozen = sum(part.weights for role, part in known.parts.items() if role not in built.parts)
    phases = {**known.phases, "save": replace(save, peak=save.peak + frozen)}
    return replace(built, parts={**known.parts, **built.parts}, phases=phases, kv_cache=known.kv_cache)


def passes_key(config: PPOConfig, role: str, model: ModelConfig, grid: RankGrid, rank: int) -> Key:
    """Ranks with the same one compute and send the same for a role.

    Tensor ranks differ on the last stage, where the last of them hold fewer real columns of the padded vocabulary.
    """
    place, sizes = grid.coordinates(rank), grid.sizes
    columns = 0
    if place.pp == sizes.pipeline_model_parallel_size - 1 and head_of(config, role) == "lm":
        tp = sizes.tensor_model_parallel_size
        width = padded_vocab_size(model.vocab_size, tp) // tp
        columns = min(max(model.vocab_size - place.tp * width, 0), width)
    return (role, place.pp, columns)


def saves_key(config: PPOConfig, grid: RankGrid, rank: int) -> Key:
    """Ranks with the same one hold and write the same.

    One of several that hold a tensor writes it, and the last shards of a distributed optimizer end in padding.
    """
    place = grid.coordinates(rank)
    last = config.optimizer.distributed and place.dp == grid.shape.dp - 1
    return (place.tp == 0, place.cp == 0, place.dp == 0, last)


def total_parameters(
    config: PPOConfig, role: str, model: ModelConfig, sizes: ParallelSizes, groups: Collection[Alike]
) -> tuple[int, int]:
    """Parameters of ``role`` on all ranks of one replica, each once and without padding; and the model's own number.

    Args:
        config: of the run.
        role: whose model.
        model: its architecture.
        sizes: its layout.
        groups: all ranks of the world.
    """
    grid, tp, head = RankGrid(sizes), sizes.tensor_model_parallel_size, head_of(config, role)
    tied = model.tie_word_embeddings and head == "lm"
    found = 0
    for group in groups:
        part = group.walk.parts[role]
        for rank in group.ranks:
            place = grid.coordinates(rank)
            if place.dp == 0 and place.cp == 0:
                found += part.parameters - (part.replicated if place.tp else 0)
    vocabulary = padded_vocab_size(model.vocab_size, tp)
    if tied and sizes.pipeline_model_parallel_size > 1:
        # The last stage's copy of the embedding.
        found -= vocabulary * model.hidden_size
    matrices = 1 if tied or head == "value" else 2
    found -= matrices * (vocabulary - model.vocab_size) * model.hidden_size
    return found, model_parameters(model, head)


def describe_ranks(ranks: Collection[int]) -> str:
    """``ranks 0-7, 16`` or ``rank 3``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
