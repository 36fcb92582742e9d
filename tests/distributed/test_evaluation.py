"""Evaluation on held-out prompts: hand numbers, and the same results under every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlhf.data.prompts import Prompt
from mrlhf.trainer.evaluation import compare
from mrlhf.types import RolloutBatch
from tests.ranks import run_ranks
from tests.tiny_run import make_config, make_inputs, read_lines

EVALUATION = [
    *("evaluation.temperature=1.0", "evaluation.samples_per_prompt=2", "evaluation.max_prompts=5"),
    *("trainer.eval_interval=1", "trainer.iterations=2", "evaluation.max_response_length=5"),
]


class _Letters:
    """Stands for a tokenizer where only text is needed."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(96 + i) for i in ids)


def _batch(responses: list[list[int]], scores: list[float], kl: float) -> RolloutBatch:
    batch = RolloutBatch.from_sequences([[1, 2]] * len(responses), responses, pad_id=0)
    width = batch.width - 1
    mask = torch.zeros(len(responses), width, dtype=torch.bool)
    for row, response in enumerate(responses):
        mask[row, 1 : 1 + len(response)] = True
    reference = torch.full((len(responses), width), -1.0)
    return batch.replace(
        scores=torch.tensor(scores), response_mask=mask, ref_logprobs=reference, old_logprobs=reference + kl
    )


def test_hand_numbers() -> None:
    ours = _batch([[3], [4, 5], [6], [7]], [1.0, 3.0, 0.0, 2.0], kl=0.5)
    theirs = _batch([[3], [3], [3], [3]], [1.0, 0.0, 1.0, 1.0], kl=0.0)
    prompts = [Prompt([1, 2], "ab"), Prompt([1, 2], "AB")]
    made = compare(ours, theirs, prompts, _Letters())  # type: ignore[arg-type]
    m = made.metrics
    assert m["score_mean"] == 1.5
    # By prompt 2 and 1: deviation sqrt(.5), over sqrt(2).
    assert m["score_stderr"] == pytest.approx(0.5)
    assert m["reference_score_mean"] == 0.75
    # Differences by prompt: (0 + 3) / 2 and (-1 + 1) / 2.
    assert m["difference"] == 0.75
    assert m["difference_stderr"] == pytest.approx(0.75)
    assert m["win_rate"] == pytest.approx((0.5 + 1 + 0 + 1) / 4)
    assert m["best_of_n_score_mean"] == 2.5
    assert m["reference_best_of_n_score_mean"] == 1.0
    assert m["kl_k1"] == pytest.approx(0.5)
    assert m["kl_sequence"] == pytest.approx(0.5 * 5 / 4)
    assert m["response_length_mean"] == 1.25
    assert made.rows[1] == {
        "prompt": "ab", "reference_response": "c", "reference_score": 0.0, "response": "de", "score": 3.0
    }  # fmt: skip
    assert made.rows[2]["prompt"] == "AB"
    assert "win rate 0.625" in made.summary()
    assert "1.0 standard errors" in made.summary()


def _evaluate(inputs: Path, output: Path, overrides: list[str]) -> dict[str, float]:
    from mrlhf.trainer.ppo import build_trainer

    trainer = build_trainer(make_config(inputs, output, *EVALUATION, *overrides))
    assert trainer.evaluator is not None
    before = trainer.evaluator.run()
    trainer.train()
    return before.metrics


@pytest.mark.parametrize(
    ("world", "layout"),
    [(2, ["parallel.tensor_model_parallel_size=2"]), (2, ["parallel.pipeline_model_parallel_size=2"]), (3, [])],
    ids=["tp2", "pp2", "dp3"],
)
def test_the_layout_changes_nothing(tmp_path_factory: pytest.TempPathFactory, world: int, layout: list[str]) -> None:
    """Three replicas share five prompts unevenly."""
    folder = tmp_path_factory.getbasetemp() / "evaluation"
    batches = ["rollout.prompts_per_iteration=6", "ppo.minibatch_size=6", "ppo.micro_batch_size=2"]
    if not folder.exists():
        make_inputs(folder)
        held_out = [json.dumps({"prompt": f"held out {i}", "bonus": i / 7}) for i in range(7)]
        (folder / "held_out.jsonl").write_text("\n".join(held_out))
        everything = [*batches, f"evaluation.prompts={folder / 'held_out.jsonl'}"]
        (before,) = run_ranks(_evaluate, 1, folder, folder / "plain", everything)
        (folder / "before.json").write_text(json.dumps(before))
    everything = [*batches, *layout, f"evaluation.prompts={folder / 'held_out.jsonl'}"]
    results = run_ranks(_evaluate, world, folder, folder / "-".join(layout or ["dp"]), everything)
    expected = json.loads((folder / "before.json").read_text())
    assert expected["prompts"] == 5
    # Nothing is trained yet: actor and reference are the same model and draw the same numbers.
    assert (expected["kl_k1"], expected["difference"], expected["win_rate"]) == (0.0, 0.0, 0.5)
    for metrics in results:
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)
    rows = [read_lines(folder / name / "metrics.jsonl") for name in ("plain", "-".join(layout or ["dp"]))]
    for plain, ours in zip(*rows, strict=True):
        names = [name for name in plain if name.startswith("eval/")]
        assert len(names) == len(expected)
        for name in names:
            assert ours[name] == pytest.approx(plain[name], rel=2e-4, abs=2e-5), name
    assert rows[0][1]["eval/kl_k1"] != 0
    texts = [read_lines(folder / name / "eval_samples.jsonl") for name in ("plain", "-".join(layout or ["dp"]))]
    assert len(texts[0]) == 2 * 5 * 2
    assert [row["response"] for row in texts[0]] == [row["response"] for row in texts[1]]


def test_fewer_prompts_than_replicas_and_fields_that_a_line_lacks(tmp_path: Path) -> None:
    """One replica has no held-out prompt, and the one that is there lacks the field that the reward function needs."""
    inputs = make_inputs(tmp_path / "inputs")
    (inputs / "held_out.jsonl").write_text('{"prompt": "without"}\n{"prompt": "with", "bonus": 1.0}\n')
    overrides = [
        *("ppo.minibatch_size=6", "ppo.micro_batch_size=2", "rollout.prompts_per_iteration=6"),
        *(f"evaluation.prompts={inputs / 'held_out.jsonl'}", "evaluation.max_prompts=1", "ppo.epochs=1"),
        "reward.sources=[{kind: function, target: 'tests.distributed.test_evaluation:needs_bonus'}]",
    ]
    results = run_ranks(_evaluate, 3, inputs, tmp_path / "out", overrides)
    assert [metrics["prompts"] for metrics in results] == [1, 1, 1]
    assert len({metrics["score_mean"] for metrics in results}) == 1


def needs_bonus(prompts: list[str], responses: list[str], bonus: list[float | None]) -> list[float]:
    """The field is there for every prompt of a file in which any line has it."""
    return [len(response) + (b or 0.0) for response, b in zip(responses, bonus, strict=True)]
