"""Vocabulary log-probs and the tiled head without sharding."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mrlhf.parallel import vocab
from mrlhf.parallel.tiled_head import fused_logprobs
from mrlhf.parallel.vocab import shard_columns, vocab_parallel_logprobs


def reference(logits, targets, vocab_size, temperature=1.0):
    logp = torch.log_softmax(logits.double()[:, :vocab_size] / temperature, -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1)


def draw(n=11, width=16, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, width, generator=generator, dtype=torch.float64) * 3).to(dtype)
    return logits, torch.randint(0, width - 3, (n,), generator=generator)


def test_b2_padded_column_takes_no_part():
    logp, entropy = vocab_parallel_logprobs(
        torch.tensor([[1.0, 2.0, 3.0, 0.0]]), torch.tensor([2]), None, with_entropy=True, vocab_size=3
    )
    assert logp.item() == pytest.approx(-0.4076, abs=5e-5)
    assert entropy.item() == pytest.approx(0.8324, abs=5e-5)


def test_d7_temperature():
    logits, targets = torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1])
    logp, entropy = vocab_parallel_logprobs(logits, targets, None, temperature=2, with_entropy=True, vocab_size=2)
    torch.testing.assert_close(logp, torch.tensor([-0.3133, -1.3133]), atol=5e-5, rtol=0)
    assert entropy[0].item() == pytest.approx(0.5822, abs=5e-5)
    _, entropy = vocab_parallel_logprobs(logits, targets, None, with_entropy=True, vocab_size=2)
    assert entropy[0].item() == pytest.approx(0.3653, abs=5e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradcheck(temperature):
    logits, targets = draw(5, 7)
    logits.requires_grad_()

    def function(x):
        return vocab_parallel_logprobs(x, targets, None, temperature=temperature, with_entropy=True, vocab_size=5)

    assert torch.autograd.gradcheck(function, (logits,))


def test_fp64_is_exact_and_bf16_is_computed_in_fp32():
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)):
        logits, targets = draw(300, 13 + 3, dtype)
        logp, entropy = vocab_parallel_logprobs(logits, targets, None, with_entropy=True, vocab_size=13)
        expected = reference(logits, targets, 13)
        assert logp.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(logp.double(), expected[0], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(entropy.double(), expected[1], rtol=tolerance, atol=tolerance)


def test_bf16_logits_are_widened_before_the_temperature_divides_them():
    logits, targets = draw(40, 13 + 3, torch.bfloat16)
    upstream = torch.arange(40) / 40

    def both(x):
        logp, entropy = vocab_parallel_logprobs(x, targets, None, temperature=0.7, with_entropy=True, vocab_size=13)
        return logp, entropy, torch.autograd.grad((logp * upstream).sum() + entropy.sum(), x)[0]

    half, full = both(logits.requires_grad_()), both(logits.detach().float().requires_grad_())
    assert torch.equal(half[0], full[0])
    assert torch.equal(half[1], full[1])
    assert torch.equal(half[2], full[2].bfloat16())


def test_chunks_do_not_change_the_result(monkeypatch):
    logits, targets = draw(50, 16)
    logits.requires_grad_()
    whole = vocab_parallel_logprobs(logits, targets, None, with_entropy=True, vocab_size=13)
    grad = torch.autograd.grad((whole[0] * torch.arange(50)).sum() + whole[1].sum(), logits)[0]
    monkeypatch.setattr("mrlhf.parallel.vocab._CPU_CHUNK", 48)
    parts = vocab_parallel_logprobs(logits, targets, None, with_entropy=True, vocab_size=13)
    assert torch.equal(torch.stack(whole), torch.stack(parts))
    assert torch.equal(grad, torch.autograd.grad((parts[0] * torch.arange(50)).sum() + parts[1].sum(), logits)[0])


def test_extreme_logits_and_masked_logits():
    logits = torch.tensor([[1e4, -1e4, 0.0], [0.0, float("-inf"), 0.0]], requires_grad=True)
    logp, entropy = vocab_parallel_logprobs(logits, torch.tensor([1, 0]), None, with_entropy=True, vocab_size=3)
    torch.testing.assert_close(logp, torch.tensor([-2e4, -0.6931472]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, 0.6931472]))
    (logp.sum() + entropy.sum()).backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-1.0, 1.0, 0.0], [0.5, 0.0, -0.5]]))


def test_nan_surfaces_but_not_through_a_masked_position():
    logits = torch.tensor([[float("nan"), 1.0], [0.0, 1.0]], requires_grad=True)
    logp, entropy = vocab_parallel_logprobs(logits, torch.tensor([1, 1]), None, with_entropy=True, vocab_size=2)
    assert logp[0].isnan()
    assert not logp[1].isnan()
    kept = torch.tensor([False, True])
    (torch.where(kept, logp, 0.0).sum() + torch.where(kept, entropy, 0.0).sum()).backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[1].abs().sum() > 0


def test_refusals():
    logits = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"span \[0, 3\].*\[0, 3\)"):
        vocab_parallel_logprobs(logits, torch.tensor([0, 3]), None, vocab_size=3)
    with pytest.raises(ValueError, match="cannot hold a vocabulary of 5"):
        vocab_parallel_logprobs(logits, torch.tensor([0, 3]), None, vocab_size=5)
    with pytest.raises(ValueError, match="temperature"):
        vocab_parallel_logprobs(logits, torch.tensor([0, 3]), None, vocab_size=4, temperature=0)
    with pytest.raises(ValueError, match="targets"):
        vocab_parallel_logprobs(logits, torch.tensor([0]), None, vocab_size=4)
    assert shard_columns(4, None, 3) == (0, 3)


def head_inputs(n=37, h=6, width=24, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(n, h, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(width, h, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, width - 4, (n,), generator=generator)


def test_fused_gradcheck():
    hidden, weight, targets = head_inputs(5, 3, 9)

    def function(x, w):
        return fused_logprobs(x, w, targets, group=None, vocab_size=7, temperature=1.3, with_entropy=True,
                              tile_tokens=2, tile_vocab=3)  # fmt: skip

    targets = targets.clamp(max=6)
    assert torch.autograd.gradcheck(function, (hidden, weight))


@pytest.mark.parametrize("tile", [(512, 1024), (8, 5), (5, 7), (1, 20)])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kept", [0, 100, 1 << 20])
def test_fused_matches_unfused(tile, with_entropy, masked, kept, monkeypatch):
    monkeypatch.setattr("mrlhf.parallel.tiled_head._BLOCK_TOKENS", 16)
    monkeypatch.setattr("mrlhf.parallel.tiled_head._CPU_KEPT", kept)
    hidden, weight, targets = head_inputs()
    mask = torch.arange(37) % 3 != 0 if masked else None
    upstream = torch.linspace(-1, 1, 37, dtype=torch.float64)

    def gradients(logp, entropy):
        loss = (logp * upstream).sum() + (0 if entropy is None else (entropy * upstream.flip(0)).sum())
        return torch.autograd.grad(loss, (hidden, weight))

    logp, entropy = fused_logprobs(hidden, weight, targets, group=None, vocab_size=20, temperature=0.8, mask=mask,
                                   with_entropy=with_entropy, tile_tokens=tile[0], tile_vocab=tile[1])  # fmt: skip
    expected, expected_entropy = reference(hidden @ weight.t(), targets, 20, 0.8)
    if masked:
        expected, expected_entropy = (torch.where(mask, x, 0.0) for x in (expected, expected_entropy))
    torch.testing.assert_close(logp, expected)
    assert (entropy is not None) == with_entropy
    if with_entropy:
        torch.testing.assert_close(entropy, expected_entropy)
    torch.testing.assert_close(
        gradients(logp, entropy), gradients(expected, expected_entropy if with_entropy else None), rtol=1e-9, atol=1e-12
    )


def test_fused_ignores_masked_nan_and_zero_upstream_rows():
    hidden, weight, targets = head_inputs()
    clean = torch.autograd.grad(
        fused_logprobs(hidden, weight, targets, group=None, vocab_size=20)[0][5:].sum(), (hidden, weight)
    )
    bad = hidden.detach().clone()
    bad[:5] = float("nan")
    bad.requires_grad_()
    targets[:5] = -7
    mask = torch.arange(37) >= 5
    logp, _ = fused_logprobs(bad, weight, targets, group=None, vocab_size=20, mask=mask)
    assert torch.equal(logp[:5], torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(torch.autograd.grad(logp.sum(), (bad, weight)), clean)
    targets[:5] = 0
    logp, _ = fused_logprobs(bad, weight, targets, group=None, vocab_size=20)
    assert logp[:5].isnan().all()
    torch.testing.assert_close(torch.autograd.grad(torch.where(mask, logp, 0.0).sum(), (bad, weight)), clean)


def test_fused_bf16_gradients_are_summed_in_fp32(monkeypatch):
    # Sums over 64 vocabulary tiles and 128 token tiles: a running bf16 sum would be off by far more than one rounding.
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(1024, 8, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(64, 8, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(0, 64, (1024,), generator=generator)
    logp, _ = fused_logprobs(hidden, weight, targets, group=None, vocab_size=64, tile_tokens=8, tile_vocab=1)
    grads = torch.autograd.grad(logp.sum(), (hidden, weight))
    exact = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    expected_logp = reference(exact[0] @ exact[1].t(), targets, 64)[0]
    expected = torch.autograd.grad(expected_logp.sum(), exact)
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp.double(), expected_logp, rtol=0, atol=0.05)  # bf16 logits up to 16: half ulp .03
    for got, want in zip(grads, expected, strict=True):
        assert got.dtype == torch.bfloat16
        error = (got.double() - want).norm() / want.norm()
        assert error < 0.006  # bf16's 2**-8 once or twice; a running bf16 sum measured above .01


@pytest.mark.parametrize("kept", [0, 100, 1 << 20])
def test_fused_second_backward_pass(kept, monkeypatch):
    monkeypatch.setattr("mrlhf.parallel.tiled_head._CPU_KEPT", kept)
    hidden, weight, targets = head_inputs()
    logp, entropy = fused_logprobs(
        hidden, weight, targets, group=None, vocab_size=20, with_entropy=True, tile_tokens=8, tile_vocab=5
    )
    loss = logp.sum() + entropy.square().sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    # Fewer rows the second time: what was kept was of all of them.
    some = torch.autograd.grad(logp[3:9].sum(), (hidden, weight), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight)), first)
    expected, _ = reference(hidden @ weight.t(), targets, 20)
    torch.testing.assert_close(some, torch.autograd.grad(expected[3:9].sum(), (hidden, weight)))


@pytest.mark.parametrize("tile_vocab", [2, 5, 20])
def test_fused_logits_of_minus_infinity(tile_vocab):
    """Tokens that weights rule out: their part of probabilities, entropy and the weight's gradient is 0."""
    hidden, weight, targets = head_inputs()
    hidden = hidden.detach().abs().requires_grad_()
    ruled_out = torch.tensor([0, 1, 7, 19])
    weight = weight.detach().index_fill(0, ruled_out, float("-inf")).requires_grad_()
    targets = torch.where(torch.isin(targets, ruled_out), 2, targets)
    logp, entropy = fused_logprobs(
        hidden, weight, targets, group=None, vocab_size=20, with_entropy=True, tile_tokens=8, tile_vocab=tile_vocab
    )
    kept = [i for i in range(20) if i not in ruled_out]
    rest = weight.detach()[kept].requires_grad_()
    places = torch.tensor([kept.index(int(t)) for t in targets])
    expected, expected_entropy = reference(hidden @ rest.t(), places, len(kept))
    torch.testing.assert_close(logp, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    (got,) = torch.autograd.grad((logp + entropy).sum(), weight)
    (want,) = torch.autograd.grad((expected + expected_entropy).sum(), rest)
    torch.testing.assert_close(got[kept], want)
    assert got[ruled_out].abs().max() == 0


def test_fused_no_wanted_position_keeps_the_graph():
    hidden, weight, targets = head_inputs()
    logp, _ = fused_logprobs(hidden, weight, targets, group=None, vocab_size=20, mask=torch.zeros(37, dtype=torch.bool))
    grads = torch.autograd.grad(logp.sum(), (hidden, weight))
    assert all(g.abs().max() == 0 for g in grads)


def test_fused_frozen_weight():
    hidden, weight, targets = head_inputs()
    frozen = weight.detach()
    got = torch.autograd.grad(fused_logprobs(hidden, frozen, targets, group=None, vocab_size=20)[0].sum(), hidden)
    want = torch.autograd.grad(fused_logprobs(hidden, weight, targets, group=None, vocab_size=20)[0].sum(), hidden)
    torch.testing.assert_close(got, want)


def test_fused_peak_memory_is_a_few_tiles():
    """In a process of its own; the logits alone would be 128 MiB in fp32, a tile is 4 MiB, and 48 MiB are kept."""
    script = Path(__file__).parents[2] / "benchmarks" / "logprob.py"
    request = {"name": "ours", "size": [2048, 32, 16384], "backward": True, "what": "memory"}
    output = subprocess.run([sys.executable, str(script), "--serve"], input=json.dumps(request), check=True,
                            capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "."},
                            cwd=script.parents[1]).stdout  # fmt: skip
    assert json.loads(output.splitlines()[-1])["answer"]["figure"] < 64


@pytest.mark.parametrize("with_entropy", [False, True])
def test_statistics_of_a_shard_without_finite_logits(with_entropy):
    """The sums of such a row are 0 and its kept softmax too, so that other shards decide alone."""
    logits = torch.tensor([[float("-inf")] * 3, [0.0, float("-inf"), math.log(3.0)]])
    local, kept = torch.zeros(4 if with_entropy else 3, 2), torch.full((2, 3), float("nan"))
    vocab._shard_statistics(logits, 3, 1.0, local, kept)
    torch.testing.assert_close(local[0], torch.tensor([float("-inf"), math.log(3.0)]))
    torch.testing.assert_close(local[1], torch.tensor([0.0, 4 / 3]))
    torch.testing.assert_close(kept, torch.tensor([[0.0, 0.0, 0.0], [0.25, 0.0, 0.75]]))
    if with_entropy:
        torch.testing.assert_close(local[3], torch.tensor([0.0, -math.log(3.0) / 3]))
