"""The optimizer under every layout, against torch.optim.AdamW on the unsharded model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlhf.megatron.optimizer import AdamSettings
from tests.distributed.megatron_tools import (
    PP2,
    SP,
    TP2,
    VPP2,
    Layout,
    Reference,
    accumulate,
    build,
    count,
    make_rows,
    total_loss,
    whole,
)
from tools.make_tiny_model import make_tiny_model

STEPS = 3
# A large epsilon: entries with a tiny gradient would otherwise move by the sign of their rounding error.
SETTINGS = AdamSettings(
    lr=1e-2, min_lr=1e-3, lr_schedule="cosine", warmup_steps=2, total_steps=4, weight_decay=0.1, beta1=0.8, beta2=0.9,
    eps=1e-3, clip_grad=0.5,
)  # fmt: skip
# The cosine goes from the second step to where a fifth would be: the third has a third of it behind it.
RATES = [0.5e-2, 1e-2, 1e-3 + 9e-3 * 0.5 * (1 + math.cos(math.pi / 3))]

LAYOUTS = {
    "one": Layout(rows=4),
    "tp2": Layout(2, TP2),
    "tp2sp": Layout(2, TP2 | SP),
    "pp2": Layout(2, PP2),
    "dp2": Layout(2),
    "dp2-distributed": Layout(2, distributed=True),
    "tp2sp-dp2-distributed": Layout(4, TP2 | SP, distributed=True),
    "pp2vpp2-dp2-distributed": Layout(4, PP2 | VPP2, distributed=True),
}
TIED = {"tied-pp2": Layout(2, PP2), "tied-tp2sp-pp2-distributed": Layout(4, TP2 | SP | PP2, distributed=True)}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    root = tmp_path_factory.mktemp("optimizer")
    return {
        tied: make_tiny_model(root / str(tied), tied=tied, attention_bias=True, mlp_bias=True, tokenizer=False, seed=6)
        for tied in (False, True)
    }


def reference_run(path: Path) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms before clipping, and the weights after the steps."""
    reference, rows = Reference(path), make_rows()
    parameters = list(reference.model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": SETTINGS.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(SETTINGS.beta1, SETTINGS.beta2), eps=SETTINGS.eps)
    losses, norms = [], []
    for rate in RATES:
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses.append(reference.accumulate(rows, count(rows)))
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, SETTINGS.clip_grad)))
        optimizer.step()
    return losses, norms, reference.named()


@pytest.fixture(scope="module")
def references(paths: dict[bool, Path]) -> dict[bool, Any]:
    return {tied: reference_run(path) for tied, path in paths.items()}


def train(
    path: Path, layout: Layout, out: Path, settings: AdamSettings = SETTINGS, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    from mrlhf.megatron.optimizer import Trainable

    config, groups, chunks = build(path, layout.sizes, dtype=dtype)
    trainable = Trainable(chunks, groups, settings, distributed_optimizer=layout.distributed)
    rows = make_rows()
    result: dict[str, Any] = {"losses": [], "norms": [], "rates": [], "updated": []}
    for _ in range(STEPS):
        result["rates"].append(trainable.learning_rate)
        result["losses"].append(total_loss(accumulate(trainable, rows, layout.rows, count(rows)), groups))
        updated, norm = trainable.step()
        trainable.advance_schedule()
        result["norms"].append(norm)
        result["updated"].append(updated)
    result["weights"] = whole(trainable.modules, config, path, groups, out)
    result["tied"] = [
        (p.detach() if groups.embd is not None else None)
        for m in trainable.modules
        for n, p in m.named_parameters()
        if n in ("embedding.word_embeddings.weight", "output_layer.weight")
    ]
    result["tp_rank"] = groups.tp.rank()
    return result


@pytest.mark.parametrize("layout", [*LAYOUTS, *TIED])
def test_three_steps_are_those_of_torchs_adamw(
    run_ranks: Any, paths: Any, references: Any, tmp_path: Path, layout: str
) -> None:
    tied, chosen = layout in TIED, (LAYOUTS | TIED)[layout]
    losses, norms, weights = references[tied]
    assert min(norms) > 2 * SETTINGS.clip_grad  # clipping has work to do
    results = run_ranks(train, chosen.world, paths[tied], chosen, tmp_path / "out")
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
        assert result["norms"] == pytest.approx(norms, rel=2e-5)
        assert result["rates"] == pytest.approx(RATES, rel=1e-12)
        assert result["updated"] == [True] * STEPS
    ours = results[0]["weights"]
    assert ours.keys() == weights.keys()
    for name, value in weights.items():
        # The weights moved by about 1e-2.
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    if tied:
        for tensor_rank in {r["tp_rank"] for r in results}:
            copies = [t for r in results if r["tp_rank"] == tensor_rank for t in r["tied"]]
            assert len(copies) == 2
            assert torch.equal(copies[0], copies[1])


def _unclipped(path: Path, layout: Layout, out: Path) -> tuple[float, Any, Any]:
    from dataclasses import replace

    results = [train(path, layout, out, replace(SETTINGS, clip_grad=clip)) for clip in (0.0, 0.5)]
    return results[0]["norms"][0] - results[1]["norms"][0], results[0]["weights"], results[1]["weights"]


def test_clip_grad_zero_measures_and_does_not_clip(run_ranks: Any, paths: Any, tmp_path: Path) -> None:
    difference, free, clipped = run_ranks(_unclipped, 1, paths[False], Layout(rows=8), tmp_path / "out")[0]
    assert difference == 0.0
    name = "model.layers.0.mlp.up_proj.weight"
    assert float((free[name] - clipped[name]).abs().max()) > 1e-3


def _groups(path: Path, sizes: dict[str, Any], head: str, distributed: bool) -> dict[str, float]:
    from mrlhf.megatron.optimizer import Trainable

    _, groups, chunks = build(path, sizes, head=head, value_bias=head == "value")
    trainable = Trainable(chunks, groups, SETTINGS, distributed_optimizer=distributed)
    names = {p: n for m in trainable.modules for n, p in m.named_parameters()}
    decay = {}
    for group in trainable.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in names:
                assert group["weight_decay"] == pytest.approx(SETTINGS.weight_decay * group["wd_mult"])
                decay[names[parameter]] = group["weight_decay"]
    assert distributed or len(decay) == len(names)
    return decay


@pytest.mark.parametrize("head", ["lm", "value"])
def test_weight_decay_spares_norms_and_biases(run_ranks: Any, paths: Any, tmp_path: Path, head: str) -> None:
    path = paths[False]
    if head == "value":
        path = make_tiny_model(
            tmp_path / "rm", classifier=True, attention_bias=True, mlp_bias=True, tokenizer=False, seed=1
        )
        from safetensors.torch import load_file, save_file

        tensors = load_file(path / "model.safetensors") | {"score.bias": torch.zeros(1)}
        save_file(tensors, path / "model.safetensors")
    decay = {k: v for part in run_ranks(_groups, 2, path, PP2, head, False) for k, v in part.items()}
    kinds = {True: set(), False: set()}
    for name, value in decay.items():
        kinds[value > 0].add(".".join(part for part in name.split(".") if not part.isdigit()))
    layer = "decoder.layers."
    matrices = {f"{layer}self_attention.linear_qkv.weight", f"{layer}self_attention.linear_proj.weight",
                f"{layer}mlp.linear_fc1.weight", f"{layer}mlp.linear_fc2.weight",
                "embedding.word_embeddings.weight", "output_layer.weight"}  # fmt: skip
    assert kinds[True] == matrices
    vectors = {f"{layer}input_layernorm.weight", f"{layer}pre_mlp_layernorm.weight", "decoder.final_layernorm.weight"}
    vectors |= {name.replace("weight", "bias") for name in matrices if "linear" in name}
    assert kinds[False] == (vectors | {"output_layer.bias"} if head == "value" else vectors)


# The lowest rate is that of the step after the last of `total_steps`.
SCHEDULES = {
    ("constant", 0, 5): [1.0] * 7,
    ("constant", 4, 5): [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0],
    ("linear", 0, 4): [1.0, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1],
    ("linear", 2, 6): [0.5, 1.0, 0.82, 0.64, 0.46, 0.28, 0.1],
    ("cosine", 2, 4): [0.5, 1.0, 0.775, 0.325, 0.1, 0.1, 0.1],
    ("cosine", 0, 3): [1.0, 0.775, 0.325, 0.1, 0.1, 0.1, 0.1],
}


def _rates(path: Path) -> dict[Any, list[float]]:
    from mrlhf.megatron.optimizer import Trainable

    result = {}
    for kind, warmup, total in SCHEDULES:
        _, groups, chunks = build(path, {})
        settings = AdamSettings(
            lr=2e-3, min_lr=2e-4, lr_schedule=kind, warmup_steps=warmup, total_steps=total, weight_decay=0.1
        )
        trainable = Trainable(chunks, groups, settings)
        rates = []
        for _ in range(7):
            rates.append(trainable.learning_rate / 2e-3)
            assert len({group["lr"] for group in trainable.optimizer.param_groups}) == 1
            trainable.advance_schedule()
        result[kind, warmup, total] = rates
    return result


def test_learning_rates_by_hand(run_ranks: Any, paths: Any) -> None:
    for key, rates in run_ranks(_rates, 1, paths[False])[0].items():
        assert rates == pytest.approx(SCHEDULES[key], rel=1e-9), key


@pytest.mark.parametrize("distributed", [False, True])
def test_bf16_stays_near_fp32(run_ranks: Any, paths: Any, references: Any, tmp_path: Path, distributed: bool) -> None:
    world, sizes = (4, TP2 | SP) if distributed else (2, TP2 | SP)
    layout = Layout(world, sizes, distributed=distributed)
    losses, norms, _ = references[False]
    for result in run_ranks(train, world, paths[False], layout, tmp_path / "out", SETTINGS, torch.bfloat16):
        assert result["updated"] == [True] * STEPS
        # bf16 has 8 bits; the losses are means over about 50 tokens.
        assert result["losses"] == pytest.approx(losses, rel=4e-3)
        assert result["norms"] == pytest.approx(norms, rel=4e-2)
        assert result["losses"] != pytest.approx(losses, rel=1e-7)


def _overflow(path: Path) -> list[Any]:
    from mrlhf.megatron.optimizer import Trainable

    _, groups, chunks = build(path, TP2, dtype=torch.float16)
    trainable = Trainable(chunks, groups, AdamSettings(lr=1e-2))
    optimizer = trainable.optimizer.chained_optimizers[0]
    parameters = list(trainable.modules[0].parameters())
    rows, log = make_rows(), []
    scale = float(optimizer.get_loss_scale())
    for spoiled in (True, True, True, False):
        before = [p.detach().clone() for p in parameters]
        optimizer.grad_scaler._scale.fill_(min(float(optimizer.get_loss_scale()), 1024.0) if not spoiled else scale)
        accumulate(trainable, rows, 4, count(rows))
        if spoiled and groups.tp.rank() == 1:
            parameters[0].main_grad[0, 0] = torch.inf
        updated, norm = trainable.step()
        same = all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
        log.append((updated, same, norm, float(optimizer.get_loss_scale()) / scale))
        scale = float(optimizer.get_loss_scale())
    return log


def test_fp16_overflow_on_one_rank_skips_the_update_everywhere(run_ranks: Any, paths: Any, references: Any) -> None:
    for log in run_ranks(_overflow, 2, paths[False]):
        for updated, same, _, _ in log[:3]:
            assert (updated, same) == (False, True)
        # Megatron halves the scale after `hysteresis` overflows in a row, 2 by default.
        assert [ratio for *_, ratio in log[:3]] == [1.0, 0.5, 0.5]
        updated, same, norm, _ = log[3]
        assert (updated, same) == (True, False)
        assert norm == pytest.approx(references[False][1][0], rel=2e-2)
