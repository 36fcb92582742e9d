"""Sampling, scoring and statistics of a rollout on real ranks and real models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mrlhf.config_schema import PPOConfig
from mrlhf.data.prompts import Prompt, Sample, shard
from mrlhf.errors import MrlhfError
from mrlhf.roles.micro_batches import Cut
from mrlhf.trainer.experience import ShapingSettings, add_advantages, add_masks, whiten_over_ranks
from mrlhf.trainer.ppo import PPOTrainer, build_trainer
from mrlhf.trainer.run_state import PPORunState
from mrlhf.trainer.running import RunningMoments
from mrlhf.types import RolloutBatch
from tests.tiny_run import make_config, make_inputs

Run = Callable[..., list[Any]]
TP2 = "parallel.tensor_model_parallel_size=2"
PP2 = "parallel.pipeline_model_parallel_size=2"
calls: list[dict[str, Any]] = []


def counted(prompts: list[str], responses: list[str], **meta: Any) -> list[float]:
    """A reward function that differs on every rank and call: only a shared answer can agree."""
    calls.append({"prompts": prompts, "responses": responses, "meta": meta})
    return [10.0 * (dist.get_rank() + 1) + len(calls) + len(r) for r in responses]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def config(inputs: Path, tmp_path: Path) -> Callable[..., PPOConfig]:
    def make(*overrides: str) -> PPOConfig:
        return make_config(inputs, tmp_path / "out", *overrides)

    return make


def _whitened(rows: list[list[float]], masks: list[list[bool]], dtype: torch.dtype) -> list[float]:
    rank = dist.get_rank()
    x, mask = torch.tensor([rows[rank]], dtype=dtype), torch.tensor([masks[rank]])
    result: list[float] = whiten_over_ranks(x, mask, None, shift_mean=True)[mask].tolist()
    return result


def test_a8_whitening_over_ranks(run_ranks: Run) -> None:
    nan = float("nan")
    first, second = run_ranks(
        _whitened, 2, [[1.0, 2.0, 3.0], [10.0, nan, nan]], [[True] * 3, [True, False, False]], torch.float64
    )
    assert first == pytest.approx([-0.8485, -0.5657, -0.2828], abs=5e-5)
    assert second == pytest.approx([1.6971], abs=5e-5)
    alone, empty = run_ranks(_whitened, 2, [[3.0], [nan]], [[True], [False]], torch.float32)
    assert alone == [0.0]
    assert empty == []


def _shaped(settings: ShapingSettings, scores: list[float], lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and rewards of this rank's share of the rows, where they count."""
    share = len(lengths) // dist.get_world_size()
    mine = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    batch = RolloutBatch.from_sequences([[9]] * len(lengths), [[5] * n for n in lengths], pad_id=0)
    batch = add_masks(batch, "standard", 99)
    values = torch.sin(torch.arange(batch.size * (batch.width - 1)).reshape(batch.size, -1) * 1.0)
    batch = batch.replace(
        scores=torch.tensor(scores), old_logprobs=values * 0.1, ref_logprobs=values * 0.2, values=values
    ).select(mine)
    done = add_advantages(batch, settings, dist.group.WORLD)
    assert done.advantages is not None
    assert done.rewards is not None
    assert done.response_mask is not None
    return done.advantages[done.response_mask], done.rewards[done.response_mask]


def test_a8_whitened_advantages_do_not_depend_on_the_ranks(run_ranks: Run) -> None:
    settings = ShapingSettings(whiten_advantages=True, whiten_rewards=True)
    scores, lengths = [1.0, -2.0, 0.5, 3.0], [1, 4, 2, 5]
    whole = run_ranks(_shaped, 1, settings, scores, lengths)[0]
    parts = run_ranks(_shaped, 2, settings, scores, lengths)
    for index in range(2):
        together = torch.cat([part[index] for part in parts])
        assert torch.allclose(together, whole[index], rtol=1e-6, atol=1e-7)
    advantages, rewards = (x.double() for x in whole)
    assert float(advantages.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(advantages.std(correction=0)) == pytest.approx(1.0, abs=1e-6)
    plain = run_ranks(_shaped, 1, ShapingSettings(), scores, lengths)[0][1].double()
    assert float(rewards.mean()) == pytest.approx(float(plain.mean()), abs=1e-6)
    assert float(rewards.std(correction=0)) == pytest.approx(1.0, abs=1e-6)


def _running(parts: list[list[list[float]]]) -> tuple[list[list[float]], dict[str, float]]:
    moments, results = RunningMoments(), []
    for iteration, scores in enumerate(parts):
        mine = torch.tensor(scores[dist.get_rank()], dtype=torch.float32)
        results.append(moments.normalize(mine, None).tolist())
        if iteration == 1:  # as after a resume
            state, moments = moments.state_dict(), RunningMoments()
            moments.load_state_dict(state)
    return results, moments.state_dict()


def test_running_moments_are_those_of_all_scores_so_far(run_ranks: Run) -> None:
    generator = np.random.default_rng(3)
    parts = [[(1000 + generator.normal(size=n)).astype(np.float32).tolist() for n in (4, 4 - i)] for i in range(5)]
    results = run_ranks(_running, 2, parts)
    assert parts[4][1] == []
    seen: list[float] = []
    for iteration, scores in enumerate(parts):
        seen += scores[0] + scores[1]
        for rank in range(2):
            expected = (np.array(scores[rank]) - np.mean(seen)) / np.std(seen)
            assert results[rank][0][iteration] == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-6)
    assert results[0][1] == results[1][1]
    assert results[0][1]["count"] == len(seen)
    assert results[0][1]["m2"] / len(seen) == pytest.approx(np.var(seen), rel=1e-9)


def test_equal_scores_stay_finite(run_ranks: Run) -> None:
    assert run_ranks(_running, 1, [[[2.0, 2.0]]])[0][0] == [[0.0, 0.0]]


def _scored(config: PPOConfig) -> dict[str, Any]:
    trainer = build_trainer(config)
    per_rank = 8 // trainer.job.dp_size
    samples = next(trainer.stream)[trainer.job.dp_rank * per_rank :][:per_rank]
    batch, width, samples = trainer.sampler.sample(samples, 0)
    batch = add_masks(batch, config.semantics, width)
    cut = Cut(rows=3)
    model = trainer.scorer.models[0][0].scores(batch, cut)
    scores = trainer.scorer.scores(batch, cut, samples)
    return {
        "calls": list(calls), "scores": scores, "model": model, "dp": trainer.job.dp_rank,
        "rows": [batch.prompt(i) + batch.response(i) for i in range(batch.size)],
        "responses": [trainer.tokenizer.decode(batch.response(i)) for i in range(batch.size)],
        "prompts": [s.prompt.text for s in samples],
    }  # fmt: skip


def _sources(inputs: Path) -> str:
    target = "tests.distributed.test_rollouts:counted"
    return (
        f"reward.sources=[{{kind: model, path: '{inputs / 'reward'}', weight: -0.5}}, "
        f"{{kind: function, target: '{target}', weight: 2.0}}, {{kind: function, target: '{target}', weight: 1.0}}]"
    )


@pytest.mark.parametrize(("layout", "dp_size"), [(TP2, 1), (PP2, 1), (None, 2)])
def test_scores_are_the_weighted_sum_and_functions_run_once(
    run_ranks: Run, config: Any, inputs: Path, layout: str | None, dp_size: int
) -> None:
    from transformers import LlamaForSequenceClassification

    judge = LlamaForSequenceClassification.from_pretrained(inputs / "reward").eval()
    results = run_ranks(_scored, 2, config(_sources(inputs), *([layout] if layout else [])))
    # Each replica asks each of its two functions once, on its first rank.
    assert [len(r["calls"]) for r in results] == ([2, 2] if dp_size == 2 else [2, 0])
    if dp_size == 1:
        assert torch.equal(results[0]["scores"], results[1]["scores"])
    for rank, result in enumerate(results):
        asked = results[rank if dp_size == 2 else 0]["calls"]
        assert asked[0]["responses"] == result["responses"]
        assert asked[0]["prompts"] == result["prompts"]
        bonus = asked[0]["meta"]["bonus"]
        assert len(bonus) == len(result["rows"])
        # One line of the file has no such field.
        assert [b is None for b in bonus] == [p == "old trees in the wind" for p in result["prompts"]]
        first = 10.0 * (1 + rank if dp_size == 2 else 1)
        functions = [2 * (first + 1 + len(r)) + (first + 2 + len(r)) for r in result["responses"]]
        with torch.no_grad():
            hidden = [judge.model(torch.tensor([row])).last_hidden_state[0, -1] for row in result["rows"]]
            model = torch.cat([judge.score(h) for h in hidden])
        assert torch.allclose(result["model"], model, rtol=1e-4, atol=1e-5)
        assert torch.allclose(result["scores"], -0.5 * model + torch.tensor(functions), rtol=1e-6, atol=1e-4)


def _prompts(trainer: PPOTrainer) -> list[list[int]]:
    return [s.prompt.ids for s in next(trainer.stream)]


def _samples(prompts: list[list[int]]) -> list[Sample]:
    return [Sample(i, i, Prompt(ids, "", {})) for i, ids in enumerate(prompts)]


def _configure(trainer: PPOTrainer, semantics: str, stop: list[int], pad: int, limit: int = 6) -> None:
    sampler = trainer.sampler
    sampler.semantics, sampler.stop_ids, sampler.pad_id = semantics, stop, pad  # type: ignore[assignment]
    sampler.max_response_length = limit


def _end_ids(config: PPOConfig) -> dict[str, Any]:
    trainer = build_trainer(config)
    samples = _samples(_prompts(trainer))
    vocabulary = list(range(trainer.actor.config.vocab_size))
    _configure(trainer, "standard", [], 0)
    free, _, _ = trainer.sampler.sample(samples, 0)
    said = [free.response(i) for i in range(free.size)]
    end = said[0][3]  # the first row ends here at the latest
    out: dict[str, Any] = {"said": said, "end": end}
    for name, semantics, stop, pad in (
        ("standard", "standard", [end], end),
        ("chat", "deepspeed_chat", [end], end),
        ("chat, other pad", "deepspeed_chat", [end], 0),
        ("chat, pad does not end", "deepspeed_chat", [], end),
    ):
        _configure(trainer, semantics, stop, pad)
        batch, width, _ = trainer.sampler.sample(samples, 0)
        rows = [batch.response(i) for i in range(batch.size)]
        out[name] = rows, width, batch.truncated.tolist(), batch.pad_id
    before, width, kept = trainer.sampler.sample(samples, 1)
    _configure(trainer, "deepspeed_chat", vocabulary, end)
    again, again_width, again_samples = trainer.sampler.sample(_samples([[5, 6]] * 3), 2)
    out["again"] = torch.equal(before.tokens, again.tokens), width == again_width, kept == again_samples
    _configure(trainer, "standard", vocabulary, 0)
    only, only_width, _ = trainer.sampler.sample(samples, 3)
    masked = add_masks(only, "standard", only_width)
    masked = masked.replace(scores=torch.ones(only.size), **_zeros(masked))
    rewards = add_advantages(masked, ShapingSettings(), None).rewards
    out["only"] = only.response_lengths.tolist(), only.truncated.tolist(), rewards, only.prompt_lengths.tolist()
    trainer.sampler.previous = None
    _configure(trainer, "deepspeed_chat", vocabulary, 0)
    with pytest.raises(MrlhfError, match="every response of the first rollout has at most one token"):
        trainer.sampler.sample(samples, 0)
    return out


def _zeros(batch: RolloutBatch) -> dict[str, torch.Tensor]:
    frame = torch.zeros(batch.size, batch.width - 1)
    return {"old_logprobs": frame, "ref_logprobs": frame, "values": frame}


def test_end_ids_in_both_semantics(run_ranks: Run, config: Any) -> None:
    out = run_ranks(_end_ids, 1, config())[0]
    end = out["end"]

    def cut(row: list[int], *, keep: bool) -> list[int]:
        return row if end not in row else row[: row.index(end) + keep]

    kept, without = [cut(r, keep=True) for r in out["said"]], [cut(r, keep=False) for r in out["said"]]
    truncated = [end not in r for r in out["said"]]
    assert not truncated[0]
    assert kept[0] != without[0]
    width = max(map(len, kept))
    assert out["standard"] == (kept, width, truncated, end)
    # The padded width counts the end id that the lengths leave out.
    assert out["chat"] == (without, width, truncated, end)
    assert out["chat, other pad"] == (kept, width, truncated, 0)
    assert out["chat, pad does not end"] == (out["said"], 6, [True] * 8, end)
    assert out["again"] == (True, True, True)
    lengths, cut_off, rewards, prompt_lengths = out["only"]
    assert lengths == [1] * 8
    assert cut_off == [False] * 8
    for row, prompt in enumerate(prompt_lengths):
        assert rewards[row, prompt - 1] == 1.0
        assert int((rewards[row] != 0).sum()) == 1


def _kept_rollout(config: PPOConfig) -> dict[str, Any]:
    """The last rollout after a save and a load, for a run that keeps the sampler's log-probs and one that does not."""
    trainer = build_trainer(config)
    dp = trainer.job.dp_rank, trainer.job.dp_size
    batch, width, samples = trainer.sampler.sample(shard(next(trainer.stream), *dp), 0)
    state = PPORunState(trainer)
    saved = json.loads(json.dumps(state._rollout()))
    trainer.sampler.previous = None
    state._set_rollout(saved)
    assert trainer.sampler.previous is not None
    again, again_width, again_samples = trainer.sampler.previous
    out: dict[str, Any] = {"same": (again_width, again_samples) == (width, samples)}
    out["tensors"] = {name: (tensor, again.tensors()[name]) for name, tensor in batch.tensors().items()}
    trainer.sampler.previous = None
    state._set_rollout({**saved, "rows": [{**row, "logprobs": None} for row in saved["rows"]]})
    out["without"] = trainer.sampler.previous is None
    return out


@pytest.mark.parametrize("kept", [True, False])
def test_a_saved_rollout_comes_back_whole(run_ranks: Run, config: Any, kept: bool) -> None:
    """deepspeed_chat may come back to it after a resume, and weights may be made of the sampler's log-probs."""
    for out in run_ranks(_kept_rollout, 2, config(*(["ppo.importance_cap=2.0"] if kept else []))):
        assert out["same"]
        assert ("rollout_logprobs" in out["tensors"]) is kept
        assert all(torch.equal(*pair) for pair in out["tensors"].values())
        assert out["without"] is kept


def _width_over_ranks(config: PPOConfig) -> tuple[list[list[int]], list[int], int, int]:
    """Rank 1's responses are long, rank 0's short: all of rank 0's are one token, yet the batch is a good one."""
    trainer = build_trainer(config)
    prompts = _prompts(trainer)[:4]
    _configure(trainer, "deepspeed_chat", [], 0, limit=5 if trainer.job.dp_rank else 1)
    samples = _samples(prompts)
    first, width, _ = trainer.sampler.sample(samples, 0)
    second, _, _ = trainer.sampler.sample(samples, 1)
    masks = add_masks(first, "deepspeed_chat", width)
    assert masks.gae_mask is not None
    same = torch.equal(first.tokens, second.tokens)
    return [first.response(i) for i in range(first.size)], masks.gae_mask.sum(1).tolist(), width, int(same)


def test_the_response_width_is_that_of_all_ranks(run_ranks: Run, config: Any) -> None:
    (short, slots0, width0, same0), (long, slots1, width1, same1) = run_ranks(_width_over_ranks, 2, config())
    assert [len(r) for r in short] == [1] * 4
    assert [len(r) for r in long] == [5] * 4
    assert width0 == width1 == 5
    # A short row has the extra slot, a full one has none.
    assert slots0 == [2] * 4
    assert slots1 == [5] * 4
    # Short responses on one rank alone do not bring the previous rows back.
    assert not same0
    assert not same1


def test_sources_of_one_name_are_numbered() -> None:
    from mrlhf.trainer.rollouts import _free_name

    taken: dict[str, int] = {}
    for _ in range(3):
        taken[_free_name("rewards:length", taken)] = 0
    assert list(taken) == ["length", "length1", "length2"]
