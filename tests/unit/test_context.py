"""The parts of a row under context parallelism."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks


def test_zigzag_by_hand() -> None:
    from mrlhf.megatron.context import all_parts, part_of_rank

    assert part_of_rank(8, 0, 2).tolist() == [0, 1, 6, 7]
    assert part_of_rank(8, 1, 2).tolist() == [2, 3, 4, 5]
    assert part_of_rank(12, 2, 3).tolist() == [4, 5, 6, 7]
    assert all_parts(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert part_of_rank(5 * 2, 0, 1).tolist() == list(range(10))
    with pytest.raises(ValueError, match="10 slots cannot be cut into 2 x CP 2 equal pieces"):
        part_of_rank(10, 0, 2)


def parts_and_whole() -> None:
    """Attention and a gather over two ranks against one rank, with gradients; every rank computes the same loss."""
    from mrlhf.megatron.context import gather_keys, hidden_keys, part_of_rank, whole_rows

    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    width, dim = 12, 4
    q, k, v = (torch.randn(width, 1, 1, dim, dtype=torch.float64, requires_grad=True) for _ in range(3))
    weight = torch.randn(1, width, dtype=torch.float64)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=~hidden).sum(-1)[:, 0]

    later = torch.arange(width)[None] > torch.arange(width)[:, None]
    expected = attend(q, k, v, later)
    (expected.exp() * weight).sum().backward()
    gradients = [x.grad.clone() for x in (q, k, v)]  # type: ignore[union-attr]

    mine = part_of_rank(width, dist.get_rank(), 2)
    ours = [x.detach()[mine].requires_grad_(True) for x in (q, k, v)]
    part = attend(
        ours[0], gather_keys(ours[1], group), gather_keys(ours[2], group), hidden_keys(len(mine), group, q.device)
    )
    whole = whole_rows(part, 1, group)
    torch.testing.assert_close(whole, expected.detach(), rtol=1e-12, atol=1e-12)
    (whole.exp() * weight).sum().backward()
    for own, gradient in zip(ours, gradients, strict=True):
        torch.testing.assert_close(own.grad, gradient[mine], rtol=1e-12, atol=1e-12)
    logits = torch.arange(2 * width * 3).view(2, width, 3)
    assert torch.equal(whole_rows(logits[:, mine], 1, group), logits)


def test_parts_give_results_and_gradients_of_the_whole() -> None:
    run_ranks(parts_and_whole, 2)
