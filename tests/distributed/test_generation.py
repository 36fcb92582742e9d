"""Greedy and sampled generation on Megatron weights against recorded continuations, under every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlhf.checkpoint.convert import load_weights
from mrlhf.checkpoint.hf_config import read_model_config
from mrlhf.megatron.device import seed_rng_tracker
from mrlhf.megatron.groups import build_groups
from mrlhf.megatron.model import build_model
from mrlhf.planner import ParallelSizes
from mrlhf.rollout.engine import GenerationRequest, RolloutEngine
from mrlhf.rollout.sampling import SamplingParams

DATA = Path(__file__).parents[1] / "data"
LAYOUTS = {
    "tp1": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "pp4": (4, {"pipeline_model_parallel_size": 4}),
    "tp2pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "pp2vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "tp2sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "uneven": (2, {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 3}),
}


def _engine(folder: Path, world: int, sizes: dict[str, Any], slots: int) -> RolloutEngine:
    layout = ParallelSizes(world_size=world, **sizes)
    groups = build_groups(layout)
    seed_rng_tracker(0, groups.tp.rank())
    config = read_model_config(folder)
    chunks = build_model(config, layout, groups, head="lm", trainable=False)
    load_weights(chunks, config, folder, groups=groups, head="lm")
    return RolloutEngine(
        chunks,
        groups,
        vocab_size=config.vocab_size,
        kv_heads=config.num_query_groups,
        head_dim=config.head_dim,
        max_length=config.max_position_embeddings,
        slots=slots,
    )


def _greedy(folder: Path, world: int, sizes: dict[str, Any]) -> list[list[list[int]]]:
    """Continuations (prompt included, padded as recorded) with one and with three end ids."""
    expected = json.loads((folder / "expected.json").read_text())
    engine = _engine(folder / "actor", world, sizes, slots=3)
    results = []
    for key, stop in (("greedy", [2]), ("greedy_with_eos", expected["greedy_with_eos"]["eos_token_ids"])):
        rows = []
        prompts = expected[key]["prompts"]
        stripped = [[t for t in p if t != 0] for p in prompts]
        requests = [GenerationRequest(i, p, 12) for i, p in enumerate(stripped)]
        made = engine.generate(requests, SamplingParams(temperature=0.0), stop_ids=stop, seed=0, step=0)
        for prompt, generation in zip(prompts, made, strict=True):
            rows.append(prompt + generation.tokens + [0] * (12 - len(generation.tokens)))
        results.append(rows)
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["ds_chat_trajectory", "standard_trajectory"])
def test_d14_greedy_rows_equal_the_recorded_ones(run_ranks: Any, layout: str, name: str) -> None:
    world, sizes = LAYOUTS[layout]
    folder = DATA / name
    expected = json.loads((folder / "expected.json").read_text())
    for plain, with_ends in run_ranks(_greedy, world, folder, world, sizes):
        assert plain == expected["greedy"]["sequences"]
        assert with_ends == expected["greedy_with_eos"]["sequences"]


def _sampled(world: int, sizes: dict[str, Any], slots: int, params: SamplingParams) -> list[tuple[list[int], bool]]:
    engine = _engine(DATA / "standard_trajectory" / "actor", world, sizes, slots)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 97, (1 + i % 9,), generator=generator).tolist() for i in range(24)]
    dp = engine.groups.dp
    mine = [i for i in range(len(prompts)) if i % dp.size() == dp.rank()]
    requests = [GenerationRequest(i, prompts[i], 5 + i % 8) for i in mine]
    made = engine.generate(requests, params, stop_ids=[2, 23], seed=5, step=3)
    return [(g.sample_id, g.tokens, g.truncated) for g in made]


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_k=20, top_p=0.9)], ids=str
)
def test_samples_do_not_depend_on_the_layout(run_ranks: Any, params: SamplingParams) -> None:
    reference = run_ranks(_sampled, 1, 1, {}, 24, params)[0]
    assert len({tuple(tokens) for _, tokens, _ in reference}) == 24
    assert {truncated for _, _, truncated in reference} == {True, False}
    for world, sizes, slots in (
        (1, {}, 5),
        (2, LAYOUTS["tp2"][1], 24),
        (2, LAYOUTS["pp2"][1], 7),
        (2, {}, 24),
        (4, LAYOUTS["tp2pp2"][1], 9),
        (2, LAYOUTS["tp2sp"][1], 11),
    ):
        merged = sorted({tuple(map(str, row)): row for part in run_ranks(_sampled, world, world, sizes, slots, params)
                         for row in part}.values(), key=lambda row: row[0])  # fmt: skip
        assert merged == reference


def _bad_request(prompt: list[int], limit: int) -> str:
    engine = _engine(DATA / "standard_trajectory" / "actor", 1, {}, 4)
    with pytest.raises(ValueError, match="sample 3") as caught:
        engine.generate([GenerationRequest(3, prompt, limit)], SamplingParams(), stop_ids=[2], seed=0, step=0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "limit", "words"),
    [([], 4, "empty"), ([5], 0, "max_new_tokens is 0"), ([5] * 250, 7, "250 .* 7 = 257 exceeds .* 256")],
)
def test_bad_requests_name_the_sample(run_ranks: Any, prompt: list[int], limit: int, words: str) -> None:
    import re

    assert re.search(words, run_ranks(_bad_request, 1, prompt, limit)[0])


class KeepsWeights(torch.nn.Module):
    """The part of Transformer Engine's linear layers that matters here: weights are read in a first micro-batch."""

    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.linear, self.is_first_microbatch = linear, True

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        if self.is_first_microbatch:
            self.kept = self.linear.weight.detach().clone()
        self.is_first_microbatch = False
        return torch.nn.functional.linear(x, self.kept), None


def _after_an_update() -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Responses before an update of the weights, after it, and of a model that keeps nothing."""

    def responses(engine: RolloutEngine) -> list[list[int]]:
        requests = [GenerationRequest(i, [5, 9, 3 + i], 12) for i in range(4)]
        greedy = SamplingParams(temperature=0.0)
        return [g.tokens for g in engine.generate(requests, greedy, stop_ids=[], seed=0, step=0)]

    found = []
    for keeps in (True, False):
        engine = _engine(DATA / "standard_trajectory" / "actor", 1, {}, slots=4)
        chunk = engine.chunks[0]
        if keeps:
            chunk.config.fp8 = "hybrid"
            for layer in chunk.decoder.layers:
                layer.mlp.linear_fc2 = KeepsWeights(layer.mlp.linear_fc2)
            found.append(responses(engine))
        with torch.no_grad():
            for name, parameter in chunk.named_parameters():
                if "linear_fc2" in name:
                    parameter.mul_(-3.0)
        found.append(responses(engine))
    before, after, expected = found
    return before, after, expected


def test_fp8_weights_of_a_rollout_are_those_after_the_last_update(run_ranks: Any) -> None:
    before, after, expected = run_ranks(_after_an_update, 1)[0]
    assert after == expected
    assert before != after
