"""What only a GPU shows: Transformer Engine's layers, kernels on CUDA, the recorded trajectories on one device."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlhf.megatron import device, spec

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.fixture(autouse=True)
def _exact_matmul() -> Any:
    # TF32 keeps 10 bits of mantissa; the recorded numbers are fp32.
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(scope="module")
def world() -> Any:
    """A world of this one process."""
    import torch.distributed as dist

    device.install()
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_install_changes_nothing() -> None:
    import megatron.core.optimizer.clip_grads as clip_grads
    import megatron.core.tensor_parallel.layers as layers

    before = clip_grads.l2_norm_impl, torch.Tensor.cuda
    device.install()
    assert layers.torch is torch
    assert (clip_grads.l2_norm_impl, torch.Tensor.cuda) == before
    assert device.device() == torch.device("cuda", torch.cuda.current_device())


def test_transformer_engine_is_chosen_where_it_is_installed() -> None:
    assert spec.available_parts(torch.float32).layers == "local"
    parts = spec.available_parts(torch.bfloat16)
    expected = "transformer_engine" if spec.has_transformer_engine() else "local"
    assert parts.layers == expected
    if expected == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TENorm
        from megatron.core.transformer.transformer_config import TransformerConfig

        config = TransformerConfig(
            num_layers=2, hidden_size=64, num_attention_heads=4, normalization="RMSNorm",
            bf16=True, params_dtype=torch.bfloat16,
        )  # fmt: skip
        block = spec.block_spec(config, 0, None)
        assert block.layer_norm is TENorm
        attention = block.layer_specs[0].submodules.self_attention
        assert attention.submodules.linear_qkv is TELayerNormColumnParallelLinear


@pytest.mark.parametrize("name", ["standard_trajectory", "ds_chat_trajectory"])
def test_recorded_trajectory_on_one_gpu(name: str) -> None:
    """In a process of its own, with `replay`'s TF32 switches; every compared row must hold."""
    script = (
        "import sys, pathlib\n"
        "from mrlhf.trainer.parity import replay\n"
        "from mrlhf.trainer.recording import read_recording\n"
        "report, layout = replay(read_recording(pathlib.Path(sys.argv[1])), ['ppo.micro_batch_size=2'])\n"
        "print(layout)\n"
        "for name, row in report.rows.items(): print(name, row)\n"
        "assert len(report.rows) == 29 and report.holds\n"
    )
    environment = os.environ | {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", script, str(DATA / name)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fused_logprobs_on_cuda(world: Any, dtype: torch.dtype, temperature: float) -> None:
    import torch.distributed as dist

    from mrlhf.megatron.heads import fused_logprobs

    tokens, hidden, vocab, padded = 700, 96, 1900, 2048
    generator = torch.Generator(device="cuda").manual_seed(0)
    x, weight, up = (
        torch.randn(*shape, device="cuda", generator=generator)
        for shape in ((tokens, hidden), (padded, hidden), (2, tokens))
    )
    labels = torch.randint(0, vocab, (tokens,), device="cuda", generator=generator)
    ours = [(x / hidden**0.5).to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
    theirs = [t.detach().double().requires_grad_() for t in ours]
    logp, entropy = fused_logprobs(
        ours[0], ours[1], labels, group=dist.group.WORLD, vocab_size=vocab, temperature=temperature, with_entropy=True
    )
    assert entropy is not None
    table = torch.log_softmax((theirs[0] @ theirs[1].t())[:, :vocab] / temperature, -1)
    expected = table.gather(1, labels[:, None])[:, 0]
    expected_entropy = -(table.exp() * table).sum(-1)
    tolerance = 2e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(logp.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=tolerance, atol=tolerance)
    grads = torch.autograd.grad((logp * up[0] + entropy * up[1]).sum(), ours)
    wanted = torch.autograd.grad((expected * up[0] + expected_entropy * up[1]).sum(), theirs)
    for a, b in zip(grads, wanted, strict=True):
        assert float((a.double() - b).abs().max() / b.abs().max()) < (1e-4 if dtype is torch.float32 else 3e-2)


@pytest.mark.parametrize("name", ["standard_trajectory", "ds_chat_trajectory"])
def test_greedy_rows_equal_the_recorded_ones(world: Any, name: str) -> None:
    from mrlhf.rollout.engine import GenerationRequest, RolloutEngine
    from mrlhf.rollout.sampling import SamplingParams
    from tests.distributed.megatron_tools import build

    folder = DATA / name
    expected = json.loads((folder / "expected.json").read_text())
    config, groups, chunks = build(folder / "actor", {}, trainable=False)
    assert next(chunks[0].parameters()).device.type == "cuda"
    engine = RolloutEngine(
        chunks, groups, vocab_size=config.vocab_size, kv_heads=config.num_query_groups, head_dim=config.head_dim,
        max_length=config.max_position_embeddings, slots=3,
    )  # fmt: skip
    for key, stop in (("greedy", [2]), ("greedy_with_eos", expected["greedy_with_eos"]["eos_token_ids"])):
        prompts = expected[key]["prompts"]
        requests = [GenerationRequest(i, [t for t in p if t != 0], 12) for i, p in enumerate(prompts)]
        made = engine.generate(requests, SamplingParams(temperature=0.0), stop_ids=stop, seed=0, step=0)
        rows = [p + g.tokens + [0] * (12 - len(g.tokens)) for p, g in zip(prompts, made, strict=True)]
        assert rows == expected[key]["sequences"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_rows_give_the_numbers_of_padded_ones(world: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    """In bf16 by Transformer Engine where it is installed, in fp32 by torch's attention, document by document."""
    from tests.distributed.megatron_tools import Layout
    from tests.distributed.test_packing import measure
    from tools.make_tiny_model import make_tiny_model

    path = make_tiny_model(tmp_path / "model", hidden_size=256, ffn_hidden_size=256, tokenizer=False, seed=8)
    numbers = measure(path, Layout(), dtype)
    padded, packed, tolerance = numbers["padded"], numbers["packed"], 1e-4 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(packed["logprobs"], padded["logprobs"], rtol=tolerance, atol=tolerance)
    assert packed["loss"] == pytest.approx(padded["loss"], rel=tolerance)
    assert packed["norm"] == pytest.approx(padded["norm"], rel=tolerance)
