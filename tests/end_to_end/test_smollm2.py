"""SmolLM2-135M-Instruct end to end: greedy text equal to transformers', and the PPO example."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlhf.data.prompts import load_prompts
from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.rollout.engine import GenerationRequest
from mrlhf.rollout.sampling import SamplingParams
from tests.distributed.hf_tools import read_tensors
from tests.distributed.test_generation import _engine
from tests.end_to_end.jobs import ROOT
from tests.ranks import run_ranks

PROMPTS = ROOT / "examples" / "data" / "smollm2_prompts.jsonl"
CHOSEN = (1, 3, 6, 7)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp3": (3, {"tensor_model_parallel_size": 3}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
}


def _prompts(folder: str) -> list[list[int]]:
    dataset = load_prompts(PROMPTS, load_tokenizer(folder), max_prompt_length=128)
    return [dataset.prompts[i].ids for i in CHOSEN]


@pytest.fixture(scope="module")
def continuations(smollm2: str) -> list[list[int]]:
    """32 greedy tokens of each prompt alone, without any padding, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    rows = []
    for prompt in _prompts(smollm2):
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32)
        rows.append(made[0, len(prompt) :].tolist())
    return rows


def _greedy(folder: str, world: int, sizes: dict[str, Any]) -> list[list[int]]:
    engine = _engine(Path(folder), world, sizes, slots=len(CHOSEN))
    stop = load_tokenizer(folder).eos_ids
    requests = [GenerationRequest(i, prompt, 32) for i, prompt in enumerate(_prompts(folder))]
    made = engine.generate(requests, SamplingParams(temperature=0.0), stop_ids=stop, seed=0, step=0)
    return [g.tokens for g in made]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_d1_d2_greedy_tokens_of_a_ragged_batch_equal_transformers(
    smollm2: str, continuations: list[list[int]], layout: str
) -> None:
    world, sizes = LAYOUTS[layout]
    assert len({len(prompt) for prompt in _prompts(smollm2)}) == len(CHOSEN)
    assert sum(len(row) == 32 for row in continuations) >= 2
    for rows in run_ranks(_greedy, world, smollm2, world, sizes):
        assert rows == continuations


@pytest.mark.slow
def test_ppo_example(smollm2: str, tmp_path: Path) -> None:
    """The example as a user runs it, with shorter responses."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    overrides = ["rollout.max_response_length=12", f"trainer.output_dir={tmp_path}", "optimizer.actor.lr=5e-5"]
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "run_ppo_smollm2.sh"), *overrides],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    for line in lines:
        assert line["ratio_error_before_update"] < 1e-5
        assert -1 <= line["score_min"] < line["score_max"] <= 1
        assert line["actor_grad_norm"] > 0
        assert line["critic_grad_norm"] > 0
    assert abs(lines[0]["kl_k1"]) < 1e-6
    assert all(line["kl_k3"] > 1e-6 for line in lines[1:])
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 24
    assert len({sample["prompt"] for sample in samples}) == 8

    ids = AutoTokenizer.from_pretrained(tmp_path / "actor")("The sea is", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")(ids).logits
        values = AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "critic", pad_token_id=0, num_labels=1
        )(ids).logits  # fmt: skip
    assert logits.shape == (1, ids.size(1), 49152)
    assert values.shape == (1, 1)
    assert torch.isfinite(logits).all()
    assert torch.isfinite(values).all()
    before, after = read_tensors(smollm2), read_tensors(tmp_path / "actor")
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    # Every tensor was trained, and none further than three updates of Adam at this rate move it.
    assert set(changed) == set(before)
    largest = max(float((before[name] - after[name]).abs().max()) for name in before)
    assert largest < 3 * 5e-5 * 1.5
