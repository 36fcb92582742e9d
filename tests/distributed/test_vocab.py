"""Vocabulary log-probs and the tiled head on real tensor-parallel ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mrlhf.parallel.tiled_head import fused_logprobs
from mrlhf.parallel.vocab import vocab_parallel_logprobs


class CountCollectives(TorchDispatchMode):
    """Records every ``c10d`` operator and the number of elements it sends."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            elements = sum(a.numel() for a in args if isinstance(a, torch.Tensor))
            self.calls.append((func._schema.name.split("::")[1], elements))
        return func(*args, **(kwargs or {}))


def shard(full):
    width = full.shape[-1] // dist.get_world_size()
    return full[..., dist.get_rank() * width : (dist.get_rank() + 1) * width].contiguous()


def both(logits, targets, vocab_size, with_entropy, temperature=1.0):
    """Results and gradient of this shard, the collectives of forward and backward."""
    local = shard(logits).requires_grad_()
    with CountCollectives() as forward:
        logp, entropy = vocab_parallel_logprobs(
            local, targets, dist.group.WORLD, temperature=temperature, with_entropy=with_entropy, vocab_size=vocab_size
        )
    upstream = torch.linspace(-1, 1, len(targets), dtype=logp.dtype)
    loss = (logp * upstream).sum() + (0 if entropy is None else (entropy * upstream.flip(0)).sum())
    with CountCollectives() as backward:
        loss.backward()
    return (logp.detach(), None if entropy is None else entropy.detach(), local.grad, forward.calls, backward.calls)


def _b1_b2():
    local = shard(torch.zeros(1, 4)).requires_grad_()
    logp, _ = vocab_parallel_logprobs(local, torch.tensor([3]), dist.group.WORLD, vocab_size=4)
    logp.sum().backward()
    b2 = vocab_parallel_logprobs(
        shard(torch.tensor([[1.0, 2.0, 3.0, 0.0]])), torch.tensor([2]), dist.group.WORLD, with_entropy=True,
        vocab_size=3,
    )  # fmt: skip
    return logp.item(), local.grad.tolist(), [x.item() for x in b2]


def test_b1_gradient_on_every_shard_and_b2_padding(run_ranks):
    results = run_ranks(_b1_b2, 2)
    for logp, _, b2 in results:
        assert logp == pytest.approx(-1.3863, abs=5e-5)
        assert b2 == pytest.approx([-0.4076, 0.8324], abs=5e-5)
    assert results[0][1] == [[-0.25, -0.25]]
    assert results[1][1] == [[-0.25, 0.75]]


@pytest.mark.parametrize("tp", [2, 4])
def test_matches_unsharded(run_ranks, tp):
    generator = torch.Generator().manual_seed(0)
    n, width = 9, 24
    logits = torch.randn(n, width, generator=generator, dtype=torch.float64) * 4
    for vocab_size in (24, 19, 6):  # 6: three of four shards are padding only
        targets = torch.randint(0, vocab_size, (n,), generator=generator)
        for with_entropy in (False, True):
            whole = logits.clone().requires_grad_()
            logp = torch.log_softmax(whole[:, :vocab_size] / 0.7, -1)
            entropy = -(logp.exp() * logp).sum(1)
            logp = logp.gather(1, targets[:, None])[:, 0]
            upstream = torch.linspace(-1, 1, n, dtype=torch.float64)
            loss = (logp * upstream).sum() + ((entropy * upstream.flip(0)).sum() if with_entropy else 0)
            loss.backward()
            results = run_ranks(both, tp, logits, targets, vocab_size, with_entropy, 0.7)
            for got_logp, got_entropy, _, forward, backward in results:
                torch.testing.assert_close(got_logp, logp.detach())
                if with_entropy:
                    torch.testing.assert_close(got_entropy, entropy.detach())
                # one all-gather; the operator's tensors are its input and its output, 3 or 4 numbers per token
                floats = (4 if with_entropy else 3) * n
                assert [name for name, _ in forward] == ["_allgather_base_"]
                assert forward[0][1] == floats * (tp + 1)
                assert backward == []
            torch.testing.assert_close(torch.cat([r[2] for r in results], 1), whole.grad)


def _bf16(logits, targets):
    whole = vocab_parallel_logprobs(logits, targets, None, with_entropy=True, vocab_size=logits.shape[1])
    return whole, both(logits, targets, logits.shape[1], True)


def test_bf16_shards_are_summed_in_fp32(run_ranks):
    logits = (torch.randn(16, 256, generator=torch.Generator().manual_seed(1)) * 4).bfloat16()
    for (whole, entropy), sharded in run_ranks(_bf16, 2, logits, torch.arange(16) * 16):
        assert sharded[0].dtype == torch.float32
        torch.testing.assert_close(sharded[0], whole, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(sharded[1], entropy, rtol=1e-5, atol=1e-5)
        assert sharded[2].dtype == torch.bfloat16


def _fused(hidden, weight, targets, mask, vocab_size):
    rows = weight.shape[0] // dist.get_world_size()
    hidden = hidden.clone().requires_grad_()
    local = weight[dist.get_rank() * rows : (dist.get_rank() + 1) * rows].clone().requires_grad_()
    with CountCollectives() as forward:
        logp, entropy = fused_logprobs(
            hidden, local, targets, group=dist.group.WORLD, vocab_size=vocab_size, temperature=1.2, mask=mask,
            with_entropy=True, tile_tokens=4, tile_vocab=3,
        )  # fmt: skip
    with CountCollectives() as backward:
        (logp.sum() - 2 * (entropy * logp.detach()).sum()).backward()
    return logp.detach(), entropy.detach(), hidden.grad, local.grad, forward.calls, backward.calls


@pytest.mark.parametrize("tp", [2, 4])
def test_fused_matches_unsharded(run_ranks, tp):
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(10, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(16, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(10) % 4 != 1
    for vocab_size in (16, 5):
        targets = torch.randint(0, vocab_size, (10,), generator=generator)
        logp = torch.log_softmax((hidden @ weight.t())[:, :vocab_size] / 1.2, -1)
        entropy = torch.where(mask, -(logp.exp() * logp).sum(1), 0.0)
        logp = torch.where(mask, logp.gather(1, targets[:, None])[:, 0], 0.0)
        loss = logp.sum() - 2 * (entropy * logp.detach()).sum()
        grads = torch.autograd.grad(loss, (hidden, weight))
        results = run_ranks(_fused, tp, hidden.detach(), weight.detach(), targets, mask, vocab_size)
        for result in results:
            torch.testing.assert_close(result[0], logp.detach())
            torch.testing.assert_close(result[1], entropy.detach())
            assert result[4] == [("_allgather_base_", 4 * int(mask.sum()) * (tp + 1))]
            assert result[5] == []
        torch.testing.assert_close(sum(r[2] for r in results), grads[0])
        torch.testing.assert_close(torch.cat([r[3] for r in results]), grads[1])
