"""Greedy and sampled generation on Megatron weights against recorded continuations, under every layout."""

from __future__ import annotations

import json
from collections.abc import Callable
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


def _engine(
    folder: Path,
    world: int,
    sizes: dict[str, Any],
    slots: int,
    *,
    change: Callable[[Any], None] = lambda chunk: None,
    dtype: torch.dtype = torch.float32,
) -> RolloutEngine:
    layout = ParallelSizes(world_size=world, **sizes)
    groups = build_groups(layout)
    seed_rng_tracker(0, groups.tp.rank())
    config = read_model_config(folder)
    chunks = build_model(config, layout, groups, head="lm", trainable=False, dtype=dtype)
    load_weights(chunks, config, folder, groups=groups, head="lm")
    for chunk in chunks:
        change(chunk)
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


PARAMS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.2, repetition_penalty=1.3),
)


def _prompts() -> list[list[int]]:
    """64 samples: four of each of 16 prompts."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 97, (1 + i % 9,), generator=generator).tolist() for i in range(16) for _ in range(4)]


def _sampled(world: int, sizes: dict[str, Any], slots: int, options: dict[str, Any]) -> list[Any]:
    """Text and log-probs of this replica's samples, for each of `PARAMS`."""
    engine = _engine(DATA / "standard_trajectory" / "actor", world, sizes, slots)
    engine.cache_bytes = options.get("cache_bytes")
    engine.prefill_tokens = options.get("prefill_tokens", engine.prefill_tokens)
    prompts, dp = _prompts(), engine.groups.dp
    mine = [i for i in range(len(prompts)) if i % dp.size() == dp.rank()]
    if options.get("shuffled"):
        mine = [mine[i] for i in torch.randperm(len(mine), generator=torch.Generator().manual_seed(1)).tolist()]
    requests = [GenerationRequest(i, prompts[i], 5 + i % 8) for i in mine]
    made = [
        engine.generate(requests, params, stop_ids=[2, 23], seed=5, step=3, with_logprobs=True) for params in PARAMS
    ]
    assert [[g.sample_id for g in each] for each in made] == [mine] * len(PARAMS)
    return [[(g.sample_id, g.tokens, g.truncated, g.logprobs) for g in each] for each in made]


@pytest.fixture(scope="module")
def texts() -> list[list[Any]]:
    """All samples at once, unsharded."""
    from tests.ranks import run_ranks

    reference: list[list[Any]] = run_ranks(_sampled, 1, 1, {}, 64, {})[0]
    for rows in reference:
        assert len({tuple(tokens) for _, tokens, _, _ in rows}) > 50
        assert {truncated for _, _, truncated, _ in rows} == {True, False}
    return reference


@pytest.mark.parametrize(
    ("world", "layout", "slots", "options"),
    [
        (1, "tp1", 5, {"shuffled": True, "prefill_tokens": 4}),
        # Room for six rows and the scratch slot: 4 layers, 2 x 2 heads of 16, 21 tokens in fp32.
        (1, "tp1", 64, {"cache_bytes": 7 * 2 * 4 * 2 * 16 * 21 * 4}),
        (2, "tp2", 64, {}),
        (2, "pp2", 7, {"shuffled": True}),
        (2, "tp1", 64, {}),
        (2, "tp2sp", 11, {}),
        (4, "tp2pp2", 9, {"prefill_tokens": 16}),
        pytest.param(4, "pp4", 4, {}, marks=pytest.mark.slow),
        pytest.param(2, "pp2vpp2", 6, {"prefill_tokens": 5}, marks=pytest.mark.slow),
        pytest.param(2, "uneven", 13, {}, marks=pytest.mark.slow),
    ],
)
def test_samples_do_not_depend_on_layout_slots_and_order(
    run_ranks: Any, texts: list[list[Any]], world: int, layout: str, slots: int, options: dict[str, Any]
) -> None:
    found = run_ranks(_sampled, world, world, LAYOUTS[layout][1], slots, options)
    for number, reference in enumerate(texts):
        rows = {row[0]: row for part in found for row in part[number]}
        assert [rows[i][:3] for i in range(64)] == [row[:3] for row in reference]
        for part in found:
            # Every rank has them, not only the last stage.
            for row in part[number]:
                assert row[3] == pytest.approx(reference[row[0]][3], abs=2e-5)


def _rounded(chunk: Any) -> None:
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.copy_(parameter.bfloat16())


def _in_16_bits(world: int, sizes: dict[str, Any]) -> list[Any]:
    """Greedy texts, log-probs, and the cache's dtype: in bf16 with its products in fp32, and in fp32 with the same
    weights."""
    from mrlhf.megatron.decode import Pipeline
    from mrlhf.parallel.products import chosen

    found = []
    requests = [GenerationRequest(i, p, 8) for i, p in enumerate(_prompts()[::8])]
    with chosen("fp32"):
        for options in ({"dtype": torch.bfloat16}, {"change": _rounded}):
            engine = _engine(DATA / "standard_trajectory" / "actor", world, sizes, 3, **options)
            made = engine.generate(
                requests, SamplingParams(temperature=0.0), stop_ids=[2], seed=0, step=0, with_logprobs=True
            )
            cache = Pipeline(engine.chunks, engine.groups).cache_dtype
            found.append(([g.tokens for g in made], [g.logprobs for g in made], str(cache)))
    return found


@pytest.mark.parametrize("layout", ["tp1", "tp2", "pp2", "tp2sp"])
def test_bf16_with_products_in_fp32_says_what_fp32_says_with_the_same_weights(run_ranks: Any, layout: str) -> None:
    world, sizes = LAYOUTS[layout]
    for bf16, fp32 in run_ranks(_in_16_bits, world, world, sizes):
        # Megatron's own modules, under sequence parallelism, round to bf16 everywhere; messages between stages do.
        assert bf16[2] == ("torch.bfloat16" if layout == "tp2sp" else "torch.float32")
        exact = layout in ("tp1", "tp2")
        assert not exact or bf16[0] == fp32[0]
        firsts = [(a[0], b[0]) for a, b in zip(bf16[1], fp32[1], strict=True)]
        for a, b in zip(bf16[1], fp32[1], strict=True) if exact else [zip(*firsts, strict=True)]:
            assert list(a) == pytest.approx(list(b), abs=2e-5 if exact else 0.05)


def _penalized(world: int, sizes: dict[str, Any]) -> list[Any]:
    engine = _engine(DATA / "standard_trajectory" / "actor", world, sizes, 3)
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    requests = [GenerationRequest(i, p, 12) for i, p in enumerate(_prompts()[::8])]
    made = engine.generate(requests, params, stop_ids=[2], seed=0, step=0, with_logprobs=True)
    return [(g.tokens, g.logprobs) for g in made]


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_repetition_penalty_and_logprobs_are_those_of_transformers(run_ranks: Any, layout: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DATA / "standard_trajectory" / "actor", dtype=torch.float32)
    for found in run_ranks(_penalized, 2, 2, LAYOUTS[layout][1]):
        plain = 0
        for prompt, (tokens, logprobs) in zip(_prompts()[::8], found, strict=True):
            ids = torch.tensor([prompt])
            options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": 2, "pad_token_id": 0}
            mask = torch.ones_like(ids)
            made = model.generate(ids, attention_mask=mask, repetition_penalty=1.5, **options)[0, len(prompt) :]
            assert tokens == made.tolist()
            without = model.generate(ids, attention_mask=mask, **options)[0, len(prompt) :]
            plain += tokens != without.tolist()
            with torch.no_grad():
                table = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            # Those of the model itself, without the penalty.
            expected = table.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
            assert logprobs == pytest.approx(expected, abs=2e-5)
        assert plain > 2


def _stopped(strings: list[str]) -> list[Any]:
    from mrlhf.rollout.stop_strings import StopStrings

    engine = _engine(DATA / "standard_trajectory" / "actor", 2, LAYOUTS["pp2"][1], 3)
    requests = [GenerationRequest(i, p, 12) for i, p in enumerate(_prompts()[::4])]
    complete = StopStrings(strings, _letters) if strings else None
    made = engine.generate(requests, SamplingParams(), stop_ids=[2], seed=1, step=0, complete=complete)
    return [(g.tokens, g.truncated) for g in made]


def _letters(ids: Any) -> str:
    return "".join(chr(ord("a") + t % 26) for t in ids)


def test_responses_end_with_the_token_that_completes_a_string(run_ranks: Any) -> None:
    free = run_ranks(_stopped, 2, [])[0]
    strings = [_letters(free[0][0])[3:5], _letters(free[5][0])[7]]
    for found in run_ranks(_stopped, 2, strings):
        for (whole, truncated), (tokens, cut) in zip(free, found, strict=True):
            ends = [n for n in range(len(whole) + 1) if any(x in _letters(whole[:n]) for x in strings)]
            assert tokens == (whole[: ends[0]] if ends else whole)
            assert cut == (truncated and not ends)
    assert {cut for _, cut in found} == {True, False}


def _no_room() -> str:
    engine = _engine(DATA / "standard_trajectory" / "actor", 2, LAYOUTS["pp2"][1], 8)
    engine.cache_bytes = 10_000
    with pytest.raises(ValueError, match="rollout.kv_cache_memory") as caught:
        engine.generate([GenerationRequest(i, [5] * 9, 8) for i in range(4)], PARAMS[0], stop_ids=[], seed=0, step=0)
    return str(caught.value)


def test_too_small_a_cache_is_refused(run_ranks: Any) -> None:
    for message in run_ranks(_no_room, 2):
        assert "10000 bytes for keys and values hold 0 rows of 17 tokens" in message
        assert "at least 2 are needed" in message


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

    def keep(chunk: Any) -> None:
        chunk.config.fp8 = "hybrid"
        for layer in chunk.decoder.layers:
            layer.mlp.linear_fc2 = KeepsWeights(layer.mlp.linear_fc2)

    found = []
    for change in (keep, None):
        folder = DATA / "standard_trajectory" / "actor"
        engine = _engine(folder, 1, {}, 4, change=change) if change else _engine(folder, 1, {}, 4)
        if change:
            found.append(responses(engine))
        with torch.no_grad():
            for name, parameter in engine.chunks[0].named_parameters():
                if "linear_fc2" in name:
                    parameter.mul_(-3.0)
        found.append(responses(engine))
    before, after, expected = found
    return before, after, expected


def test_fp8_weights_of_a_rollout_are_those_after_the_last_update(run_ranks: Any) -> None:
    before, after, expected = run_ranks(_after_an_update, 1)[0]
    assert after == expected
    assert before != after
