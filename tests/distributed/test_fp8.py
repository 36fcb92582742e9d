"""Emulated FP8 in whole models: accuracy, layouts, every kind of pass; and the groups of Megatron's delayed recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import test_packing as packing
from tests.distributed.megatron_tools import (
    PP2,
    SP,
    TP2,
    VPP2,
    Layout,
    accumulate,
    build,
    count,
    make_rows,
    own_rows,
    total_loss,
    whole_gradient,
)
from tools.make_tiny_model import make_tiny_model

TENSORWISE: dict[str, Any] = {"format": "hybrid", "emulated": True}
DELAYED: dict[str, Any] = {**TENSORWISE, "recipe": "delayed", "amax_history_len": 4}
LAYOUTS = {
    "tp2": Layout(2, TP2),
    "tp2sp": Layout(2, TP2 | SP),
    "pp2vpp2": Layout(2, PP2 | VPP2),
}
KINDS = {"tensorwise": TENSORWISE, "delayed": DELAYED}
STEPS = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("fp8") / "model", tokenizer=False, seed=8)


def passes(path: Path, layout: Layout, fp8: dict[str, Any] | None, out: Path) -> dict[str, Any]:
    """Losses and norms of some passes over the same rows with the same weights, the whole gradient, all scales."""
    from mrlhf.megatron.fp8 import Fp8, scaling_state
    from mrlhf.megatron.optimizer import AdamSettings, Trainable

    options = dict(fp8 or {})
    recomputed = options.pop("recomputed", False)
    fp8_options = Fp8(**options) if fp8 else None
    config, groups, chunks = build(path, layout.sizes, fp8=fp8_options, recompute=recomputed)
    trainable = Trainable(chunks, groups, AdamSettings(lr=1e-3))
    trainable.train(True)
    rows = make_rows()
    losses, norms = [], []
    for _ in range(STEPS):
        part = accumulate(trainable, rows, layout.rows, count(rows))
        last = groups.pp.rank() == groups.pp.size() - 1
        losses.append(total_loss(part if last else 0.0, groups) / count(rows))
        norms.append(trainable.prepare_step()[1])
    assert own_rows(rows, groups)
    gradient = whole_gradient(trainable, config, path, out / "gradient")
    return {"losses": losses, "norms": norms, "gradient": gradient, "scales": scaling_state(chunks)}


def passes_of_kinds(path: Path, layout: Layout, kinds: dict[str, Any], out: Path) -> dict[str, Any]:
    return {name: passes(path, layout, fp8, out / name) for name, fp8 in kinds.items()}


@pytest.fixture(scope="module")
def alone(path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from tests.ranks import run_ranks

    kinds = {"fp32": None, **KINDS, "e4m3": {**TENSORWISE, "format": "e4m3"}}
    (found,) = run_ranks(passes_of_kinds, 1, path, Layout(), kinds, tmp_path_factory.mktemp("alone"))
    again = {name: {**fp8, "recomputed": True} for name, fp8 in KINDS.items()}
    (found["recomputed"],) = run_ranks(passes_of_kinds, 1, path, Layout(), again, tmp_path_factory.mktemp("again"))
    result: dict[str, Any] = found
    return result


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Of whole gradients, relative."""
    apart = torch.stack([(ours[name] - theirs[name]).double().norm() for name in theirs]).norm()
    return float(apart / torch.stack([value.double().norm() for value in theirs.values()]).norm())


@pytest.mark.parametrize("kind", ["tensorwise", "delayed", "e4m3"])
def test_loss_and_gradient_are_those_of_fp32_within_the_accuracy_of_fp8(alone: dict[str, Any], kind: str) -> None:
    ours, exact = alone[kind], alone["fp32"]
    for loss, norm in zip(ours["losses"], ours["norms"], strict=True):
        assert 1e-6 < abs(loss / exact["losses"][0] - 1) < 0.01
        assert 1e-5 < abs(norm / exact["norms"][0] - 1) < 0.05
    assert 0.005 < difference(ours["gradient"], exact["gradient"]) < 0.3
    assert (len(set(ours["losses"])) > 1) is (kind == "delayed"), "delayed scales move while weights rest"


@pytest.mark.parametrize("layout", [pytest.param("tp2", marks=pytest.mark.slow), "tp2sp", "pp2vpp2"])
def test_layouts_agree_within_the_rounding_of_fp8(
    run_ranks: Any, path: Path, tmp_path: Path, alone: dict[str, Any], layout: str
) -> None:
    kinds = {**KINDS, "recomputed": {**DELAYED, "recomputed": True}}
    ranks = run_ranks(passes_of_kinds, LAYOUTS[layout].world, path, LAYOUTS[layout], kinds, tmp_path)
    # Several micro-batches are under way at once in a pipeline; each is computed again with the scales it had.
    for name in ("losses", "norms"):
        assert ranks[0]["recomputed"][name] == ranks[0]["delayed"][name]
    for kind in KINDS:
        ours, one = ranks[0][kind], alone[kind]
        # Shards of a tensor have scales of their own under tensorwise scaling; else every value is rounded alike.
        shards = "tp" in layout and kind == "tensorwise"
        assert ours["losses"] == pytest.approx(one["losses"], rel=0.01 if shards else 1e-4)
        assert ours["norms"] == pytest.approx(one["norms"], rel=0.05 if shards else 2e-3)
        assert difference(ours["gradient"], one["gradient"]) < (0.35 if shards else 0.1)
        assert abs(ours["losses"][0] / alone["fp32"]["losses"][0] - 1) > 1e-6
    if "tp" in layout:
        first, second = (rank["delayed"]["scales"] for rank in ranks)
        assert len(first) == 2 * 4 * 4, "forward and backward scales of four products in four layers"
        for name, state in first.items():
            assert torch.equal(state["scale"], second[name]["scale"]), name
            assert torch.equal(state["history"], second[name]["history"]), name
            assert bool((state["scale"] != 1).all()), name


def test_recomputed_layers_change_nothing(alone: dict[str, Any]) -> None:
    for kind, again in alone["recomputed"].items():
        assert again["losses"] == alone[kind]["losses"]
        assert again["norms"] == alone[kind]["norms"]
        assert again["scales"].keys() == alone[kind]["scales"].keys()
        for name, state in again["scales"].items():
            assert torch.equal(state["history"], alone[kind]["scales"][name]["history"]), name


def of_layers(path: Path) -> dict[str, Any]:
    """Kinds of linear layers in a model whose ends stay as they are, and in the heads."""
    from mrlhf.megatron.fp8 import Fp8
    from mrlhf.megatron.fp8_linear import Fp8ColumnParallelLinear, Fp8RowParallelLinear

    fp8 = Fp8(**TENSORWISE, first_last_layers_bf16=1)
    result: dict[str, Any] = {}
    for head in ("lm", "value"):
        names = []
        for chunk in build(path, VPP2 | PP2 if dist.get_world_size() > 1 else {}, head=head, fp8=fp8)[2]:
            offset = chunk.decoder.layers[0].layer_number - 1
            for name, module in chunk.named_modules():
                if isinstance(module, Fp8ColumnParallelLinear | Fp8RowParallelLinear):
                    parts = name.split(".")
                    parts[2] = str(int(parts[2]) + offset)
                    names.append(".".join(parts))
        result[head] = names
    return result


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ends_and_heads_stay_out(run_ranks: Any, path: Path, world: int) -> None:
    ranks = run_ranks(of_layers, world, path)
    places = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
    expected = sorted(f"decoder.layers.{layer}.{place}" for layer in (1, 2) for place in places)
    for head in ("lm", "value"):
        assert sorted(name for rank in ranks for name in rank[head]) == expected


def tokens_of_products(path: Path) -> dict[str, Any]:
    """Tokens of every product of some passes of each kind, and how far packed rows are from padded ones."""
    from mrlhf.megatron.fp8 import Fp8
    from mrlhf.megatron.fp8_linear import Quantizers
    from mrlhf.megatron.optimizer import AdamSettings, Trainable
    from mrlhf.planner import ParallelSizes, token_multiple
    from mrlhf.roles.language_model import learned_request, nll_loss
    from mrlhf.roles.model import TrainedModel
    from mrlhf.rollout.engine import GenerationRequest, RolloutEngine
    from mrlhf.rollout.sampling import SamplingParams

    layout = TP2 | SP if dist.get_world_size() > 1 else {}
    fp8 = Fp8(**TENSORWISE)
    config, groups, chunks = build(path, layout, fp8=fp8)
    tokens: list[int] = []
    original = Quantizers.operands

    def counted(self: Any, x: torch.Tensor, weight: torch.Tensor, **options: Any) -> Any:
        tokens.append(x.size(0))
        return original(self, x, weight, **options)

    Quantizers.operands = counted  # type: ignore[method-assign]
    model = TrainedModel("model", config, Trainable(chunks, groups, AdamSettings(lr=1e-3)), groups)
    multiple = token_multiple(ParallelSizes(world_size=dist.get_world_size(), **layout), fp8.token_multiple)
    batch = packing.make_batch(multiple)
    assert batch.response_mask is not None
    logprobs = {}
    for packed in (False, True):
        denominator = float(batch.response_mask.sum())
        model.gradients(batch, packing.PLAN, nll_loss, denominator, learned_request, packed=packed)
        logprobs[packed] = model.per_token(batch, packing.PLAN, learned_request, packed=packed)
    trained = len(tokens)
    engine = RolloutEngine(
        model.chunks, groups, vocab_size=config.vocab_size, kv_heads=config.num_query_groups,
        head_dim=config.head_dim, max_length=64, slots=3,
    )  # fmt: skip
    requests = [GenerationRequest(i, [5, 6, 7][: i + 1], 6) for i in range(3)]
    made = engine.generate(requests, SamplingParams(temperature=0.0), stop_ids=[], seed=0, step=0)
    Quantizers.operands = original  # type: ignore[method-assign]
    return {
        "multiple": multiple, "tokens": tokens[:trained], "generation": tokens[trained:], "logprobs": logprobs,
        "made": [g.tokens for g in made], "mask": batch.response_mask,
    }  # fmt: skip


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_pass_has_tokens_in_multiples(run_ranks: Any, path: Path, world: int) -> None:
    for rank in run_ranks(tokens_of_products, world, path):
        assert rank["multiple"] == 16 * world
        assert {n % rank["multiple"] for n in rank["tokens"]} == {0}
        assert {n % rank["multiple"] for n in rank["generation"]} == {0}
        assert min(rank["generation"]) == rank["multiple"], "a decoding step of three rows is filled up"
        apart = (rank["logprobs"][True] - rank["logprobs"][False])[rank["mask"]].abs()
        # The scale is that of all tokens of a pass, padding included, so that packed rows are rounded otherwise.
        assert 0 < float(apart.max()) < 0.3
        assert [len(tokens) for tokens in rank["made"]] == [6, 6, 6]


def greedy_by_whole_passes(path: Path) -> dict[str, Any]:
    """Greedy continuation by the engine with its cache, and log-probs of its choices by a pass over whole rows."""
    from mrlhf.megatron.fp8 import Fp8
    from mrlhf.roles.policy import PolicyModel
    from mrlhf.rollout.engine import GenerationRequest
    from mrlhf.rollout.sampling import SamplingParams
    from mrlhf.trainer.parity import probe_logits

    config, groups, chunks = build(path, {}, fp8=Fp8(**TENSORWISE))
    policy = PolicyModel("actor", config, chunks, groups)
    prompt = list(range(5, 21))
    (made,) = policy.engine(1).generate(
        [GenerationRequest(0, prompt, 12)], SamplingParams(temperature=0.0), stop_ids=[], seed=0, step=0
    )
    ids = torch.tensor([prompt + made.tokens])
    _, _, best = probe_logits(policy, ids, multiple=16)
    return {"made": made.tokens, "best": best[0, len(prompt) - 1 : -1].tolist()}


def test_generation_has_the_same_rounded_weights(run_ranks: Any, path: Path) -> None:
    (found,) = run_ranks(greedy_by_whole_passes, 1, path)
    agree = sum(a == b for a, b in zip(found["made"], found["best"], strict=True))
    assert agree >= 10, "activations are rounded a little otherwise, since a pass has other tokens"


def groups_in_forward(path: Path) -> dict[str, Any]:
    """Which group Megatron finds for the delayed recipe inside a stage's forward, and outside."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    _, groups, chunks = build(path, {})
    found: list[Any] = []

    def look(self: Any, *args: Any, **kwargs: Any) -> None:
        ready = parallel_state.model_parallel_is_initialized()
        found.append(parallel_state.get_amax_reduction_group(True, True) if ready else None)

    original, GPTModel.forward = GPTModel.forward, look  # type: ignore[method-assign]
    for fields in ({}, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}, {"fp8": "hybrid", "fp8_recipe": "delayed"}):
        for name, value in fields.items():
            setattr(chunks[0].config, name, value)
        chunks[0]()
    GPTModel.forward = original  # type: ignore[method-assign]
    return {
        "inside": [None if group is None else dist.get_process_group_ranks(group) for group in found],
        "outside": parallel_state.model_parallel_is_initialized(),
    }


def test_megatron_finds_the_ranks_that_share_largest_values(run_ranks: Any, path: Path) -> None:
    # Not the world, which Transformer Engine would take: two replicas are not in step.
    for rank, found in enumerate(run_ranks(groups_in_forward, 2, path)):
        assert found == {"inside": [None, None, [rank]], "outside": False}
