"""PTX steps and the average of the actor, against torch and transformers without any sharding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mrlhf.config_schema import PPOConfig
from mrlhf.data.sft import load_sft, sft_batch
from mrlhf.data.stream import ExampleStream
from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.trainer.ppo import build_trainer
from tests.end_to_end.trainer_steps import make_batch, moved, update, weights
from tests.ranks import run_ranks
from tests.tiny_run import make_config, make_inputs, read_lines, train

DECAY, COEF, LR = 0.992, 27.8, 2e-3
TEXTS = ["the sea is wide", "a bird sings", "rain on the old roof", "tea", "mud and more mud", "one day in may"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_inputs(tmp_path_factory.mktemp("ptx"))
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder


def _config(inputs: Path, output: Path, *overrides: str) -> PPOConfig:
    return make_config(
        inputs, output, f"ptx.path={inputs / 'texts.jsonl'}", f"ptx.unsup_coef={COEF}", "ppo.shuffle=false",
        f"ppo.ema_decay={DECAY}", "ppo.log_entropy=false", f"optimizer.actor.lr={LR}",
        # A large epsilon: entries with a tiny gradient would otherwise move by the sign of their rounding error.
        "optimizer.actor.eps=1e-3", *overrides,
    )  # fmt: skip


def _two_epochs(config: PPOConfig) -> dict[str, Any]:
    trainer = build_trainer(config)
    batch = make_batch(trainer)
    metrics, steps = update(trainer, batch)
    trainer.export()
    return {
        "batch": batch.tensors(),
        "metrics": metrics,
        "norms": [(step.actor.grad_norm, step.ptx.grad_norm) for step in steps],
    }


class Unsharded:
    """The same updates on the Hugging Face model with torch's AdamW."""

    def __init__(self, config: PPOConfig, batch: dict[str, torch.Tensor]) -> None:
        from transformers import LlamaForCausalLM

        self.config, self.batch = config, batch
        self.model = LlamaForCausalLM.from_pretrained(config.actor.path)
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0
        )
        self.norms: list[tuple[float, float]] = []
        self.ptx_losses: list[float] = []

    def logprobs(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.model(tokens).logits[:, :-1].log_softmax(-1)
        return scores.gather(2, tokens[:, 1:, None]).squeeze(2)

    def step(self, loss: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimizer.step()
        return norm

    def policy_loss(self, rows: list[int]) -> torch.Tensor:
        part = {name: tensor[rows] for name, tensor in self.batch.items()}
        # Answers of one token do not count in DeepSpeed-Chat.
        valid = (part["response_lengths"] > 1) | torch.tensor(self.config.semantics == "standard")
        mask = part["response_mask"] & valid[:, None]
        ratio = (self.logprobs(part["tokens"]) - part["old_logprobs"]).exp()[mask]
        advantages = part["advantages"][mask]
        return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).sum() / mask.sum()

    def text_loss(self, texts: Iterator[Any], pad_id: int) -> torch.Tensor:
        batch = sft_batch(next(texts), pad_id=pad_id)
        loss = -self.logprobs(batch.tokens)[batch.response_mask].mean()
        self.ptx_losses.append(loss.item())
        return COEF * loss

    def run(self, *, texts_first: bool = False) -> dict[str, torch.Tensor]:
        tokenizer = load_tokenizer(self.config.tokenizer_path, None)
        examples = load_sft(self.config.ptx.path, tokenizer, max_length=64, learn_on="all")
        texts = ExampleStream(examples.examples, examples.fingerprint, seed=self.config.seed, batch_size=4)
        for rows in ([0, 1, 2, 3], [4, 5, 6, 7]) * 2:
            if texts_first:
                ptx = self.step(self.text_loss(texts, tokenizer.pad_id))
                self.norms.append((self.step(self.policy_loss(rows)), ptx))
            else:
                policy = self.step(self.policy_loss(rows))
                self.norms.append((policy, self.step(self.text_loss(texts, tokenizer.pad_id))))
            for name, parameter in self.model.named_parameters():
                self.average[name] = DECAY * self.average[name] + (1 - DECAY) * parameter.detach()
        return {name: p.detach() for name, p in self.model.named_parameters()}


LAYOUTS = {
    "deepspeed_chat-tp2": (2, ["semantics=deepspeed_chat", "parallel.tensor_model_parallel_size=2"]),
    "deepspeed_chat-dp2": (2, ["semantics=deepspeed_chat", "optimizer.distributed=true"]),
    "standard-pp2": (2, ["parallel.pipeline_model_parallel_size=2"]),
}


@pytest.mark.parametrize("layout", [*list(LAYOUTS)[:2], pytest.param("standard-pp2", marks=pytest.mark.slow)])
def test_the_order_is_policy_then_texts_then_average(inputs: Path, tmp_path: Path, layout: str) -> None:
    world, overrides = LAYOUTS[layout]
    config = _config(inputs, tmp_path / "out", *overrides)
    results = run_ranks(_two_epochs, world, config)
    reference = Unsharded(config, results[0]["batch"])
    expected = reference.run()
    for result in results:
        assert result["norms"] == [pytest.approx(pair, rel=1e-4) for pair in reference.norms]
        # Without the coefficient.
        assert result["metrics"]["ptx/loss"] == pytest.approx(sum(reference.ptx_losses) / 4, rel=2e-2)
    actor, average = (
        load_file(tmp_path / "out/actor/model.safetensors"),
        load_file(tmp_path / "out/ema/model.safetensors"),
    )
    swapped = Unsharded(config, results[0]["batch"])
    swapped_weights = swapped.run(texts_first=True)
    assert actor.keys() == average.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(actor[name], weight, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        # The average has moved by about a hundredth of what the weights have.
        torch.testing.assert_close(average[name], reference.average[name], rtol=0, atol=5e-7)
    # The tolerances tell the order apart, and what the average is of.
    name = "model.layers.0.mlp.up_proj.weight"
    assert float((actor[name] - swapped_weights[name]).abs().max()) > 1e-4
    assert float((average[name] - swapped.average[name]).abs().max()) > 5e-6


def _swap(config: PPOConfig) -> None:
    trainer = build_trainer(config)
    update(trainer, make_batch(trainer))
    own = weights(trainer.actor)
    assert trainer.ema is not None
    with trainer.ema.swapped_in():
        assert moved(trainer.actor, own)
    assert not moved(trainer.actor, own)
    # The optimizer still works on the weights that are in place.
    storage = {p.data_ptr() for c in trainer.actor.chunks for p in c.parameters()}
    update(trainer, make_batch(trainer, 1), 1)
    assert moved(trainer.actor, own)
    assert storage == {p.data_ptr() for c in trainer.actor.chunks for p in c.parameters()}
    state = {name: shard.clone() for name, shard in trainer.ema.state_dict().items()}
    trainer.ema.update()
    assert any(not torch.equal(shard, state[name]) for name, shard in trainer.ema.state_dict().items())
    trainer.ema.load_state_dict(state)
    assert all(torch.equal(shard, state[name]) for name, shard in trainer.ema.state_dict().items())
    assert all(shard.dtype == torch.float32 for shard in trainer.ema.shards.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_average_comes_in_and_leaves_no_trace(inputs: Path, tmp_path: Path, dtype: str) -> None:
    config = _config(inputs, tmp_path, f"precision.dtype={dtype}", "optimizer.distributed=true")
    run_ranks(_swap, 1, config)


def _whole_run(config: PPOConfig) -> int:
    return train(config).updater.ptx.stream.position  # type: ignore[union-attr]


def test_a_run_logs_and_exports(inputs: Path, tmp_path: Path) -> None:
    config = _config(inputs, tmp_path, "trainer.export=true", "ppo.critic_warmup_iterations=1", "ptx.batch_size=2")
    # Nothing is learned from texts while the critic warms up; afterwards 2 rows in each of 4 steps.
    assert run_ranks(_whole_run, 1, config)[0] == 8
    first, second = read_lines(tmp_path / "metrics.jsonl")
    assert "ptx_loss" not in first
    assert 0 < second["ptx_loss"] < 10
    assert second["ptx_updates"] == 4
    folders = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert folders == {"actor", "critic", "ema", "heartbeat"}
