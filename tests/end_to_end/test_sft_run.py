"""Supervised fine-tuning under every layout, against an unsharded transformers model trained by torch."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlhf.errors import MrlhfError
from tests.sft_run import LINES, make_config, make_inputs, train
from tests.tiny_run import read_lines

TP2 = "parallel.tensor_model_parallel_size=2"
SP = "parallel.sequence_parallel=true"
PP2 = "parallel.pipeline_model_parallel_size=2"
PACKED = "train.packing=true"
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one-packed": (1, (PACKED, "train.micro_batch_size=4")),
    "tp2-sp": (2, (TP2, SP)),
    "tp2-sp-packed": (2, (TP2, SP, PACKED)),
    "pp2": (2, (PP2, "train.micro_batch_tokens=70")),
    "cp2": (2, ("parallel.context_parallel_size=2",)),
    "dp2-packed": (2, (PACKED, "optimizer.distributed=true", "train.micro_batch_size=1")),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("sft"))


class Reference:
    """The same training by transformers and torch alone: a row at a time, AdamW, clipping, warm-up and cosine."""

    def __init__(self, inputs: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.config = make_config(inputs, inputs / "unused")
        self.model = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
        self.rows = []
        for prompt, response in LINES:
            # The tokenizer adds no begin token. The response, closed by one end token, is what is learned.
            start = tokenizer.encode(prompt)
            learned = [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]
            self.rows.append((torch.tensor([start + learned]), len(start)))

    def loss(self, rows: list[int]) -> torch.Tensor:
        """Mean over the learned tokens of all ``rows``."""
        total, count = torch.zeros(()), 0
        for row in rows:
            ids, start = self.rows[row]
            labels = ids.clone()
            labels[:, :start] = -100
            total = total + self.model(ids, labels=labels).loss * (ids.size(1) - start)
            count += ids.size(1) - start
        return total / count

    def run(self, order: list[int]) -> dict[str, list[float]]:
        adam, size = self.config.optimizer, self.config.train.batch_size
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        plain = [p for p in self.model.parameters() if p.ndim == 1]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": adam.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
        )
        steps, warmup = self.config.trainer.iterations, adam.warmup_iterations
        assert steps is not None
        result: dict[str, list[float]] = {"loss": [], "norm": [], "lr": [], "validation": []}
        for step in range(steps):
            done = (step + 1 - warmup) / (steps + 1 - warmup)
            rate = adam.lr * ((step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * done)))
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            loss = self.loss(order[step * size : (step + 1) * size])
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), adam.clip_grad)
            optimizer.step()
            with torch.no_grad():
                held_out = float(self.loss(list(range(0, len(LINES), 2))[:5]))
            for name, value in (("loss", loss.item()), ("norm", norm.item()), ("lr", rate), ("validation", held_out)):
                result[name].append(value)
        return result


def stream_order(inputs: Path) -> list[int]:
    """Which lines the steps take, from the stream itself."""
    from mrlhf.data.stream import ExampleStream

    config = make_config(inputs, inputs / "unused")
    stream = ExampleStream(range(len(LINES)), "", seed=config.seed, batch_size=config.train.batch_size)
    return [row for _ in range(5) for row in next(stream)]


@pytest.fixture(scope="module")
def reference(inputs: Path) -> dict[str, list[float]]:
    result = Reference(inputs).run(stream_order(inputs))
    assert result["norm"][0] > 1.5  # clipping has work to do
    assert result["loss"][4] < result["loss"][0] - 0.5
    return result


def run_training(inputs: Path, output: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    trainer = train(make_config(inputs, output, *overrides))
    return {"last": trainer.validations[-1], "count": len(trainer.validations)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_steps_are_those_of_transformers_and_torch(
    run_ranks: Any, inputs: Path, reference: dict[str, list[float]], tmp_path: Path, layout: str
) -> None:
    """Losses, norms, rates, and the validation of 5 rows, which DP 2 shares out as 3 and 2."""
    world, overrides = LAYOUTS[layout]
    results = run_ranks(run_training, world, inputs, tmp_path / "out", overrides)
    rows = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert [row["loss"] for row in rows] == pytest.approx(reference["loss"], rel=2e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(reference["norm"], rel=1e-4)
    assert [row["lr"] for row in rows] == pytest.approx(reference["lr"], rel=1e-6)
    assert [row["perplexity"] for row in rows] == pytest.approx([math.exp(x) for x in reference["loss"]], rel=1e-4)
    validated = {step: row["validation/loss"] for step, row in enumerate(rows) if "validation/loss" in row}
    assert validated == pytest.approx({step: reference["validation"][step] for step in (1, 3, 4)}, rel=2e-5)
    assert rows[4]["validation/perplexity"] == pytest.approx(math.exp(validated[4]))
    assert rows[4]["epoch"] == pytest.approx(20 / 11)
    for result in results:
        assert result["count"] == 3
        assert result["last"].step == 5
        assert result["last"].metrics["loss"] == pytest.approx(validated[4])


def fresh_weights(inputs: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """The fresh model after no step, exported, then two steps of training."""
    output = inputs / f"fresh-{os.environ['WORLD_SIZE']}-{len(overrides)}"
    config = make_config(inputs, output, "model.init=random", "trainer.iterations=2", *overrides)
    from mrlhf.trainer.sft import build_trainer

    trainer = build_trainer(config)
    trainer.export("-fresh")
    trainer.train()
    return {"output": output}


def test_fresh_weights_are_the_same_under_every_layout_and_megatrons(run_ranks: Any, inputs: Path) -> None:
    from safetensors.torch import load_file

    alone = run_ranks(fresh_weights, 1, inputs, ())[0]["output"]
    shared = run_ranks(fresh_weights, 2, inputs, (TP2, SP, PACKED))[0]["output"]
    staged = run_ranks(fresh_weights, 2, inputs, (PP2,))[0]["output"]
    ours, loaded = (load_file(f / "model.safetensors") for f in (alone / "model-fresh", inputs / "model"))
    assert ours.keys() == loaded.keys()
    for other in (shared, staged):
        theirs = load_file(other / "model-fresh" / "model.safetensors")
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        losses = [[row["loss"] for row in read_lines(f / "metrics.jsonl")] for f in (alone, other)]
        assert losses[1] == pytest.approx(losses[0], rel=2e-5)
        assert losses[0][0] == pytest.approx(math.log(97), rel=0.02)
    for name, value in ours.items():
        deviation = 0.1 / 2 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.1
        if value.ndim == 1:
            assert torch.equal(value, torch.ones_like(value))
        else:
            assert float(value.std()) == pytest.approx(deviation, rel=0.1), name
            assert not torch.equal(value, loaded[name])


def from_megatron_folder(inputs: Path, output: Path) -> dict[str, Any]:
    from mrlhf.checkpoint.convert import import_hf

    import_hf(inputs / "model", inputs / "megatron", overwrite=True)
    overrides = (f"model.path={inputs / 'megatron'}", "trainer.export=true", "trainer.iterations=2")
    return run_training(inputs, output, overrides)


def test_a_converted_folder_starts_and_exports_the_same_model(
    run_ranks: Any, inputs: Path, reference: dict[str, list[float]], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_ranks(from_megatron_folder, 1, inputs, tmp_path / "out")
    rows = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert rows[0]["loss"] == pytest.approx(reference["loss"][0], rel=2e-5)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model", dtype=torch.float32)
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "out" / "model").encode("the sea")])
    assert torch.isfinite(model(ids).logits).all()


def diverging(inputs: Path, output: Path) -> str:
    # The first step, at any rate, makes weights whose loss is not finite.
    config = make_config(
        inputs, output, "optimizer.lr=1e30", "optimizer.warmup_iterations=0", "trainer.max_bad_steps=1"
    )
    with pytest.raises(MrlhfError) as stopped:
        train(config)
    return str(stopped.value)


def test_steps_without_finite_gradients_are_skipped_then_end_the_run(
    run_ranks: Any, inputs: Path, tmp_path: Path
) -> None:
    messages = run_ranks(diverging, 2, inputs, tmp_path / "out")
    assert messages[0] == messages[1]
    assert "2 optimizer steps in a row were skipped" in messages[0]
    assert "lower optimizer.lr" in messages[0]
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["skipped_updates"] for row in rows] == [0, 1]
