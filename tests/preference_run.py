"""Tiny runs on preference pairs: models, pairs, configurations, and the same training unsharded in plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mrlhf.config import load_config
from mrlhf.config_preferences import DPOConfig, RewardTrainingConfig
from mrlhf.data.preferences import PreferenceExample, load_preferences
from mrlhf.data.tokenizer import load_tokenizer

SIZES: dict[str, Any] = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 64}
LR, WEIGHT_DECAY = 3e-3, 0.1
PAIRS = [
    ("the sea", " is wide and blue", " no", 0.5),
    ("a bird", " sings", " sinks like a stone in the pond behind the mill", 0.0),
    ("what is rain", " water that falls out of clouds", " water that falls out of taps", 1.0),
    ("old", " trees", " trees stand", 0.0),
    ("in the morning the baker", " opens the shop", " q", 2.0),
    ("tea", " is hot", " is hat", 0.25),
    ("mud", " sticks", " flies to the moon and back again before anybody sees it", 0.0),
    ("one day", " a", " b", 0.0),
    ("stars", " are far away", " are", 0.75),
    ("a robot who reads", " books all night", " bxxks all night", 0.0),
    ("bread", " and butter", " and", 0.0),
]


def make_inputs(folder: Path) -> Path:
    """Write ``policy/``, ``scorer/``, ``train.jsonl`` (11 pairs) and ``held_out.jsonl`` (5 pairs)."""
    from tools.make_tiny_model import make_tiny_model

    make_tiny_model(folder / "policy", seed=0, **SIZES)
    make_tiny_model(folder / "scorer", seed=1, classifier=True, **SIZES)
    write_pairs(folder / "train.jsonl", PAIRS)
    write_pairs(folder / "held_out.jsonl", PAIRS[1::2])
    return folder


def write_pairs(path: Path, pairs: Sequence[tuple[str, str, str, float]]) -> None:
    keys = ("prompt", "chosen", "rejected", "margin")
    path.write_text("".join(json.dumps(dict(zip(keys, pair, strict=True))) + "\n" for pair in pairs))


def make_config(schema: type[Any], inputs: Path, output: Path, *overrides: str) -> Any:
    """Five steps of 4 pairs in micro-batches of 2, in file order, validated at the end."""
    base = {
        "seed": 7,
        "model.path": inputs / ("scorer" if schema is RewardTrainingConfig else "policy"),
        "data.train": inputs / "train.jsonl",
        "data.validation": inputs / "held_out.jsonl",
        "data.shuffle": "false",
        "train.batch_size": 4,
        "train.micro_batch_size": 2,
        "optimizer.lr": LR,
        "optimizer.weight_decay": WEIGHT_DECAY,
        "trainer.iterations": 5,
        "trainer.output_dir": output,
        "trainer.overwrite": "true",
        "trainer.progress": "off",
        "trainer.tensorboard": "false",
        "trainer.export": "false",
    }
    return load_config(None, [*(f"{key}={value}" for key, value in base.items()), *overrides], schema)


def reward_config(inputs: Path, output: Path, *overrides: str) -> RewardTrainingConfig:
    config: RewardTrainingConfig = make_config(RewardTrainingConfig, inputs, output, *overrides)
    return config


def dpo_config(inputs: Path, output: Path, *overrides: str) -> DPOConfig:
    config: DPOConfig = make_config(DPOConfig, inputs, output, *overrides)
    return config


def train(config: RewardTrainingConfig | DPOConfig) -> Any:
    """All of a run but leaving the process group, which belongs to the test."""
    from mrlhf.trainer import dpo, reward

    build: Callable[[Any], Any] = dpo.build_trainer if isinstance(config, DPOConfig) else reward.build_trainer
    trainer = build(config)
    trainer.train()
    if config.trainer.export:
        trainer.export()
    return trainer


def read_examples(inputs: Path, name: str) -> list[PreferenceExample]:
    tokenizer = load_tokenizer(str(inputs / "policy"), None)
    return load_preferences([str(inputs / name)], tokenizer, max_length=200).examples


# The unsharded reference: a row at a time, without padding unless the loss reads it.

PairLoss = Callable[[PreferenceExample], torch.Tensor]


def load_classifier(path: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, attn_implementation="eager").eval()
    # A configuration with a pad id makes transformers drop the gradient of its embedding; the loss itself has one.
    model.model.embed_tokens.padding_idx = None
    return model


def load_policy(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


def end_score(model: Any, ids: list[int]) -> torch.Tensor:
    score: torch.Tensor = model.score(model.model(input_ids=torch.tensor([ids])).last_hidden_state)[0, -1, 0]
    return score


def bradley_terry(model: Any, centering: float = 0.0) -> PairLoss:
    def loss(pair: PreferenceExample) -> torch.Tensor:
        chosen, rejected = (end_score(model, pair.prompt_ids + a) for a in (pair.chosen_ids, pair.rejected_ids))
        return -F.logsigmoid(chosen - rejected - pair.margin) + centering * (chosen + rejected) ** 2

    return loss


def deepspeed_chat(model: Any) -> PairLoss:
    """As DeepSpeed-Chat writes it: both rows padded to one width, pads masked, ends found by the pad id."""

    def loss(pair: PreferenceExample) -> torch.Tensor:
        rows = [pair.prompt_ids + a for a in (pair.chosen_ids, pair.rejected_ids)]
        width = max(map(len, rows)) + 3
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        hidden = model.model(input_ids=tokens, attention_mask=(tokens != 0).long()).last_hidden_state
        scores = model.score(hidden)[..., 0]
        start = int((tokens[0] != tokens[1]).nonzero()[0])
        end = max(int((row == 0).nonzero()[0]) for row in tokens)
        return -F.logsigmoid(scores[0, start:end] - scores[1, start:end]).mean()

    return loss


def response_logprobs(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    table = model(input_ids=torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    return table[len(prompt) - 1 : -1].gather(1, torch.tensor(answer)[:, None])[:, 0]


def dpo_with_sft(model: Any, reference: Any, beta: float, smoothing: float, sft_coef: float) -> PairLoss:
    def loss(pair: PreferenceExample) -> torch.Tensor:
        chosen, rejected = (response_logprobs(model, pair.prompt_ids, a) for a in (pair.chosen_ids, pair.rejected_ids))
        with torch.no_grad():
            ref_chosen, ref_rejected = (
                response_logprobs(reference, pair.prompt_ids, a).sum() for a in (pair.chosen_ids, pair.rejected_ids)
            )
        logits = beta * ((chosen.sum() - ref_chosen) - (rejected.sum() - ref_rejected))
        preference = -(1 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)
        return preference - sft_coef * chosen.mean()

    return loss


def torch_run(
    model: Any, pairs: Sequence[PreferenceExample], held_out: Sequence[PreferenceExample], loss: PairLoss
) -> dict[str, Any]:
    """Five steps of AdamW with clipping on 4 pairs each; losses, gradient norms, and the held-out loss at the end."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LR,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    losses, norms = [], []
    for step in range(5):
        batch = [pairs[(4 * step + i) % len(pairs)] for i in range(4)]
        optimizer.zero_grad()
        mean = torch.stack([loss(pair) for pair in batch]).mean()
        mean.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(mean.detach()))
    with torch.no_grad():
        validation = float(torch.stack([loss(pair) for pair in held_out]).mean())
    return {"loss": losses, "grad_norm": norms, "validation": validation}
