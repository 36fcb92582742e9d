"""Offloading on CUDA: pinned memory, both directions beside other work."""

from __future__ import annotations

import pytest
import torch

from mrlhf.megatron.offload import HostCopy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

MEBIBYTE = 1 << 20


def test_memory_comes_and_goes_beside_other_work() -> None:
    """The content is that of the work given before each way out, and whoever waits for the way back sees all of it."""
    kept = torch.zeros(16 * MEBIBYTE, device="cuda")
    scratch = torch.zeros(8 * MEBIBYTE, device="cuda")
    busy = torch.randn(2048, 2048, device="cuda")
    copy = HostCopy(lambda: [kept], lambda: [scratch])
    for number in range(1, 4):
        # The device has not done this yet when the way out is asked for.
        for _ in range(20):
            busy = torch.tanh(busy @ busy)
        kept.fill_(float(number))
        before = torch.cuda.memory_allocated()
        copy.offload()
        assert before - torch.cuda.memory_allocated() == copy.bytes_away == 96 * MEBIBYTE
        # Takes the memory that has become free while the copy may still be under way.
        other = torch.full((24 * MEBIBYTE,), -1.0, device="cuda")
        del other
        copy.prefetch()
        scratch.zero_()
        for _ in range(20):
            busy = torch.tanh(busy @ busy)
        copy.load()
        assert bool((kept == number).all())
        assert not bool(scratch.any())
    assert all(host.is_pinned() for host in copy._host.values())
