"""Mixture-of-experts models without training: log-probs, generation, folders, the load balancing loss, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mrlhf.planner import ParallelSizes
from tests.distributed.hf_tools import assert_same_tensors, edit_copy, load_message
from tests.distributed.megatron_tools import PP2, Batch, Layout, Reference, build, make_rows, micro_batches, request
from tests.distributed.moe_tools import EP2, EP4, ETP1, FAMILIES, TP2SP, write_moe

CP2 = {"context_parallel_size": 2}
PROMPTS = [[5, 9, 33], [7], [12, 80, 4, 4, 19, 40], [61, 62], [3, 17, 90, 21]]
LAYOUTS = {
    "ep2": Layout(2, EP2),
    "tp2sp-ep4etp1": Layout(4, TP2SP | EP4 | ETP1),
    "ep2-pp2": Layout(4, EP2 | PP2),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("moe")
    return {family: write_moe(root / family, family, seed=8) for family in FAMILIES}


def everything(path: Path, layout: Layout, out: Path) -> dict[str, Any]:
    """Log-probs of uneven shares of rows, greedy texts of uneven shares of prompts, and both kinds of folders."""
    from mrlhf.checkpoint.hf import export_hf
    from mrlhf.checkpoint.sharded import load_sharded_weights, save_sharded_weights
    from mrlhf.megatron.schedule import forward_only
    from mrlhf.rollout.engine import GenerationRequest, RolloutEngine
    from mrlhf.rollout.sampling import SamplingParams

    config, groups, chunks = build(path, layout.sizes)
    dp, rows = groups.dp.rank(), make_rows()
    # The first replica has five rows of the eight, the last none where there are three or more.
    mine: list[Batch] = rows[:5] if dp == 0 else rows[5:] if dp == 1 else []
    outputs = forward_only(
        chunks,
        micro_batches(mine, 1, multiple=2),
        lambda batch, output: torch.where(batch.wanted, output, 0.0),
        groups=groups,
        tokens=lambda batch: batch.tokens,
        request=request,
    )
    engine = RolloutEngine(
        chunks, groups, vocab_size=config.vocab_size, kv_heads=config.num_query_groups, head_dim=config.head_dim,
        max_length=64, slots=2,
    )  # fmt: skip
    numbered = list(enumerate(PROMPTS))
    wanted = numbered[:4] if dp == 0 else numbered[4:] if dp == 1 else []
    requests = [GenerationRequest(number, prompt, 3 + 2 * number) for number, prompt in wanted]
    made = engine.generate(requests, SamplingParams(temperature=0.0), stop_ids=[], seed=0, step=0)
    # Then the first replica has all prompts, and nobody else any.
    requests = [GenerationRequest(number, prompt, 3) for number, prompt in (numbered if dp == 0 else [])]
    alone = engine.generate(requests, SamplingParams(temperature=0.0), stop_ids=[], seed=0, step=0)
    export_hf(chunks, config, out / "hf", source_folder=path, groups=groups)
    if dist.get_rank() == 0:
        (out / "weights").mkdir()
    dist.barrier()
    save_sharded_weights(chunks, out / "weights", groups=groups)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))
    load_sharded_weights(chunks, out / "weights", groups=groups, vocab_size=config.vocab_size)
    export_hf(chunks, config, out / "again", source_folder=path, groups=groups)
    return {
        "logprobs": outputs,
        "texts": {g.sample_id: g.tokens for g in made},
        "alone": [g.tokens for g in alone],
        "dp": dp,
    }


def other_layout(path: Path, folder: Path, sizes: dict[str, Any], out: Path) -> None:
    from mrlhf.checkpoint.hf import export_hf
    from mrlhf.checkpoint.sharded import load_sharded_weights

    config, groups, chunks = build(path, sizes)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))
    load_sharded_weights(chunks, folder, groups=groups, vocab_size=config.vocab_size)
    export_hf(chunks, config, out, source_folder=path, groups=groups)


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", "ep2-pp2"),
        pytest.param("qwen3_moe", "tp2sp-ep4etp1", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "ep2", marks=pytest.mark.slow),
    ],
)
def test_logprobs_generation_and_folders(run_ranks: Any, paths: Any, tmp_path: Path, family: str, name: str) -> None:
    path, layout = paths[family], LAYOUTS[name]
    results = run_ranks(everything, layout.world, path, layout, tmp_path)
    reference, rows = Reference(path), make_rows()
    with torch.no_grad():
        expected = [torch.where(row.wanted, reference.logprobs(row), 0.0) for row in rows]
        texts = {i: greedy(reference.model, prompt, 3 + 2 * i) for i, prompt in enumerate(PROMPTS)}
    last = {r["dp"]: r["logprobs"] for r in results if r["logprobs"]}
    ours = [output for dp in sorted(last) for output in last[dp]]
    assert len(ours) == len(rows)
    for output, value in zip(ours, expected, strict=True):
        torch.testing.assert_close(output[:, : value.size(1)], value, rtol=1e-5, atol=1e-5)
    found: dict[int, list[int]] = {}
    for result in results:
        found |= result["texts"]
    assert found == texts
    for result in results:
        assert result["alone"] == ([texts[i][:3] for i in range(len(PROMPTS))] if result["dp"] == 0 else [])
    assert_same_tensors(tmp_path / "hf", path)
    assert_same_tensors(tmp_path / "again", path)
    run_ranks(other_layout, 1, path, tmp_path / "weights", {}, tmp_path / "alone")
    assert_same_tensors(tmp_path / "alone", path)


def balance(path: Path, sizes: dict[str, Any]) -> Any:
    """Gradients of the load balancing loss alone, and its value."""
    from mrlhf.megatron.balance import take_load_balancing_loss
    from mrlhf.megatron.optimizer import AdamSettings, Trainable
    from mrlhf.megatron.schedule import forward_backward
    from tests.distributed.megatron_tools import own_rows

    config, groups, chunks = build(path, sizes, moe_aux_loss_coef=0.5)
    trainable = Trainable(chunks, groups, AdamSettings(lr=0.0))
    trainable.train()
    trainable.zero_grad()
    batches = micro_batches(own_rows(make_rows((8,) * 8), groups), 1)
    forward_backward(
        trainable.chunks, batches, lambda _, output: (output.sum() * 0.0, None), 1.0, groups=groups,
        tokens=lambda batch: batch.tokens, request=request,
    )  # fmt: skip
    value = take_load_balancing_loss(trainable.config, groups, len(batches))
    again = take_load_balancing_loss(trainable.config, groups, len(batches))
    total = torch.tensor(value)
    dist.all_reduce(total, group=groups.dp)
    _, norm = trainable.prepare_step()
    return float(total) / groups.dp.size(), norm, again


def switch_loss(path: Path) -> tuple[float, float]:
    """The mean over rows and layers of E x sum over experts of (share of the choices) x (mean probability)."""
    model, rows = Reference(path).model, make_rows((8,) * 8)
    total, losses = torch.zeros(()), []
    for row in rows:
        for logits in model(row.tokens, output_router_logits=True).router_logits:
            probabilities = logits.float().softmax(-1)
            chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(2).indices, 1.0)
            loss = logits.size(1) * (chosen.mean(0) / 2 * probabilities.mean(0)).sum()
            losses.append(float(loss.detach()))
            total = total + loss
    (0.5 * total / len(rows)).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return sum(losses) / len(losses), float(torch.stack([g.norm() for g in grads]).norm())


@pytest.mark.parametrize(
    "layouts",
    [
        (Layout(1), Layout(2, EP2)),
        pytest.param((Layout(2, TP2SP | EP2 | ETP1), Layout(2, PP2), Layout(4, EP2 | CP2)), marks=pytest.mark.slow),
    ],
)
def test_the_load_balancing_loss_is_that_of_switch_transformers(run_ranks: Any, paths: Any, layouts: Any) -> None:
    value, norm = switch_loss(paths["mixtral"])
    assert value > 1.01
    for layout in layouts:
        for result in run_ranks(balance, layout.world, paths["mixtral"], layout.sizes):
            assert result == (pytest.approx(value, rel=1e-5), pytest.approx(norm, rel=1e-4), 0.0)


def messages(paths: dict[str, str]) -> dict[str, str]:
    return {name: load_message(path) for name, path in paths.items()}


def test_missing_and_unknown_experts_are_named(run_ranks: Any, paths: Any, tmp_path: Path) -> None:
    name = "model.layers.2.block_sparse_moe.experts.3.w2.weight"
    bad = {
        "missing": edit_copy(str(paths["mixtral"]), tmp_path / "a", lambda tensors: tensors.pop(name)),
        "more": edit_copy(
            str(paths["mixtral"]),
            tmp_path / "b",
            lambda tensors: tensors.update({name.replace("experts.3", "experts.4"): tensors[name]}),
        ),
    }
    (found,) = run_ranks(messages, 1, bad)
    assert f"missing: {name}" in found["missing"]
    assert f"not used: {name.replace('experts.3', 'experts.4')}" in found["more"]


def older_save(dense: Path, out: Path) -> bool:
    """A state whose description knows nothing of experts, as older versions wrote it: is it the same layout still?"""
    import json
    from dataclasses import asdict

    from mrlhf.checkpoint.training_state import SavedModel, load_state, save_state
    from mrlhf.megatron.optimizer import AdamSettings, Trainable

    config, groups, chunks = build(dense, {})
    models = {"model": SavedModel(Trainable(chunks, groups, AdamSettings(lr=1e-3)), config)}
    layout = asdict(ParallelSizes())
    save_state(out, models, averages={}, common={}, per_rank="here", layout=layout)
    description = json.loads((out / "state.json").read_text())
    for name in ("num_experts", "num_experts_per_token", "moe_ffn_hidden_size", "normalize_topk", "dense_layers"):
        del description["models"]["model"]["config"][name]
    del description["models"]["model"]["config"]["qk_norm"], description["layout"]["expert_tensor_parallel_size"]
    (out / "state.json").write_text(json.dumps(description))
    return load_state(out, models, averages={}, layout=layout).same_layout


def test_states_of_older_versions_go_on(run_ranks: Any, tmp_path: Path) -> None:
    from tools.make_tiny_model import make_tiny_model

    dense = make_tiny_model(tmp_path / "dense", tokenizer=False)
    (tmp_path / "state").mkdir()
    assert run_ranks(older_save, 1, dense, tmp_path / "state") == [True]
