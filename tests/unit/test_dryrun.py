"""Dry runs without other processes: scaling, classes of ranks, counting, parameters by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mrlhf.cli_dryrun import parse_ranks
from mrlhf.cli_plan import read_models
from mrlhf.config import load_config
from mrlhf.dryrun.results import alike, scaled
from mrlhf.dryrun.run import describe_ranks, passes_key, saves_key
from mrlhf.dryrun.traffic import Message
from mrlhf.errors import ConfigError
from mrlhf.parallel.layout import RankGrid
from mrlhf.planning.parameters import model_parameters

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"


def message(kind: str = "all_reduce", *, ranks: int = 4, shape: tuple[int, ...] = (10, 3)) -> Message:
    return Message(kind, "tp", ranks, "bfloat16", shape, 2)


def test_bytes_and_what_a_ring_sends() -> None:
    assert message().bytes == 60
    assert message().sent == 2 * 3 / 4 * 60
    assert message("all_gather").sent == message("reduce_scatter").sent == 3 / 4 * 60
    assert message("send").sent == 60
    assert message("recv").sent == 0


def test_all_micro_batches_from_a_few() -> None:
    each, once, other = message(), message("broadcast"), message(shape=(1,))
    few, many = Counter({each: 7, once: 1}), Counter({each: 13, once: 1, other: 4})
    # From 2 to 4 micro-batches: 3 more of one kind with each, 2 of another that begins later.
    assert scaled(few, 2, many, 4, 10) == {each: 31, once: 1, other: 16}
    with pytest.raises(ValueError, match="not counted evenly"):
        scaled(Counter({each: 7}), 2, Counter({each: 10}), 4, 9)


def test_a_last_smaller_micro_batch_is_not_walked() -> None:
    assert alike([[0, 1], [2, 3], [4]]) == [[0, 1], [2, 3]]


def test_ranks_in_words_and_from_words() -> None:
    assert describe_ranks([0, 1, 2, 8, 10, 11]) == "ranks 0-2, 8, 10-11"
    assert describe_ranks([3]) == "rank 3"
    assert parse_ranks("all", 3) == [0, 1, 2]
    assert parse_ranks("0, 2", 3) == [0, 2]
    for text in ("3", "-1", "one", "0,"):
        with pytest.raises(ConfigError, match="is not a rank of --world-size 3"):
            parse_ranks(text, 3)


def test_which_ranks_of_the_70b_layout_are_alike() -> None:
    config = load_config(
        str(CONFIGS / "ppo_70b.yaml"),
        [
            f"actor.path={CONFIGS / 'models' / 'llama-3-70b'}",
            f"reward.sources=[{{kind: model, path: {CONFIGS / 'models' / 'llama-3-8b-reward'}}}]",
        ],
    )
    models = read_models(config)
    grid = RankGrid(config.parallel.sizes(32))
    passes = [tuple(passes_key(config, role, models[role], grid, rank) for role in models) for rank in range(32)]
    # 129,024 padded columns are 8 x 16,128; 768 of the last shard's do not exist.
    assert len(set(passes)) == 5
    assert passes[31] != passes[30]
    assert {key[2] for key in passes[31] if key[0] == "actor"} == {15360}
    assert {key[2] for key in passes[30] if key[0] == "actor"} == {16128}
    assert len({saves_key(config, grid, rank) for rank in range(32)}) == 2
    wide = RankGrid(config.parallel.sizes(96))
    assert len({saves_key(config, wide, rank) for rank in range(96)}) == 6


PUBLISHED: dict[str, tuple[int, int, int, int, int, int]] = {
    "llama-3-70b": (80, 8192, 64, 8, 28672, 2),
    "llama-3.1-405b": (126, 16384, 128, 8, 53248, 2),
    "llama-3-8b-reward": (32, 4096, 32, 8, 14336, 1),
}
NUMBERS = {"llama-3-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800, "llama-3-8b-reward": 7_504_928_768}


def by_hand(name: str) -> int:
    """Parameters from the numbers of the paper: layers, width, heads, key-value heads, columns, vocabulary matrices."""
    layers, h, heads, groups, ffn, matrices = PUBLISHED[name]
    d = h // heads
    layer = h * (heads + 2 * groups) * d + heads * d * h + 3 * h * ffn + 2 * h
    return layers * layer + matrices * 128_256 * h + h + (h if matrices == 1 else 0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_architectures_in_the_examples_have_the_published_numbers(name: str) -> None:
    from mrlhf.checkpoint.hf_config import read_head, read_model_config

    folder = CONFIGS / "models" / name
    assert by_hand(name) == NUMBERS[name] == model_parameters(read_model_config(folder), read_head(folder) or "lm")
