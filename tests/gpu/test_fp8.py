"""FP8 on a GPU: Transformer Engine's against bf16 and against emulation, in training passes and in generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mrlhf.megatron import device, spec
from mrlhf.megatron.fp8 import Fp8, environment_problems
from tests.distributed.megatron_tools import build, make_rows, micro_batches, request, weighted_nll
from tests.distributed.megatron_tools import count as count_wanted
from tools.make_tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
RECIPES = ("tensorwise", "delayed", "blockwise", "mxfp8")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model in a world of this one process."""
    import torch.distributed as dist

    device.install()
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    size = {"hidden_size": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 256}
    yield make_tiny_model(tmp_path_factory.mktemp("fp8") / "model", tokenizer=False, seed=8, **size)
    dist.destroy_process_group()


def usable(fp8: Fp8) -> Fp8:
    problems = environment_problems(
        fp8,
        cuda=True,
        transformer_engine=spec.transformer_engine_version(),
        capability=torch.cuda.get_device_capability(),
    )
    if problems:
        pytest.skip(problems[0])
    return fp8


def train(path: Path, fp8: Fp8 | None, passes: int = 4) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of some passes over the same rows with the same weights."""
    from mrlhf.megatron.optimizer import AdamSettings, Trainable
    from mrlhf.megatron.schedule import forward_backward

    _, groups, chunks = build(path, {}, dtype=torch.bfloat16, fp8=fp8)
    trainable = Trainable(chunks, groups, AdamSettings(lr=1e-3))
    trainable.train(True)
    rows = make_rows()
    batches = [
        type(batch)(*(getattr(batch, name).cuda() for name in ("tokens", "targets", "wanted", "weights")))
        for batch in micro_batches(rows, 2, 32)
    ]
    losses, norms = [], []
    for _ in range(passes):
        trainable.zero_grad()
        parts = forward_backward(
            trainable.chunks, batches, weighted_nll, count_wanted(rows), groups=groups,
            tokens=lambda batch: batch.tokens, request=request,
        )  # fmt: skip
        losses.append(float(sum(parts)) / count_wanted(rows))
        norms.append(trainable.prepare_step()[1])
    return losses, norms


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_is_near_bf16_and_not_equal(path: Path, recipe: Any) -> None:
    losses, norms = train(path, usable(Fp8("hybrid", recipe=recipe)))
    plain, plain_norms = train(path, None)
    assert all(1e-6 < abs(loss / plain[0] - 1) < 0.02 for loss in losses)
    assert all(abs(norm / plain_norms[0] - 1) < 0.1 for norm in norms)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_emulation_is_near_the_real_thing(path: Path, recipe: Any) -> None:
    real = train(path, usable(Fp8("hybrid", recipe=recipe)))
    emulated = train(path, Fp8("hybrid", recipe=recipe, emulated=True))
    plain = train(path, None)
    assert emulated[0] == pytest.approx(real[0], rel=0.01)
    assert emulated[1] == pytest.approx(real[1], rel=0.05)
    assert emulated[0] != plain[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_generation_of_a_few_rows(path: Path, recipe: Any) -> None:
    from mrlhf.roles.policy import PolicyModel
    from mrlhf.rollout.engine import GenerationRequest
    from mrlhf.rollout.sampling import SamplingParams

    fp8 = usable(Fp8("hybrid", recipe=recipe))
    config, groups, chunks = build(path, {}, dtype=torch.bfloat16, fp8=fp8)
    requests = [GenerationRequest(i, list(range(5, 8 + i)), 6) for i in range(3)]
    made = PolicyModel("actor", config, chunks, groups).engine(3).generate(
        requests, SamplingParams(temperature=0.0), stop_ids=[], seed=0, step=0
    )  # fmt: skip
    assert [len(generation.tokens) for generation in made] == [6, 6, 6]
