"""Products in the form that generation on a CPU uses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mrlhf.megatron import packed
from mrlhf.parallel.products import by_onednn, chosen


def operands(rows: int, columns: int, bias: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, 256, generator=generator) for n in (rows, columns))
    return x, weight, torch.randn(columns, generator=generator) if bias else None


@pytest.mark.parametrize("rows", [0, 1, 8, 64, 65, 300])
@pytest.mark.parametrize("columns", [40, 767, 768, 1500])
@pytest.mark.parametrize("bias", [True, False])
def test_both_orders_of_a_weight_give_the_same_product(rows: int, columns: int, bias: bool) -> None:
    x, weight, added = operands(rows, columns, bias)
    assert packed.can_pack(weight) == (columns >= 768)
    with torch.no_grad():
        out = packed.product(weight, added)(x)
    assert out.is_contiguous()
    expected = F.linear(x.double(), weight.double(), None if added is None else added.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


def test_a_weight_may_be_a_view_and_the_rows_may_be_strided() -> None:
    x, weight, _ = operands(5, 3000, False)
    with torch.no_grad():
        out = packed.product(weight[::2])(x.repeat(1, 2)[:, :256])
    torch.testing.assert_close(out, x @ weight[::2].t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_of_16_bits_is_taken_as_it_is_in_fp32(dtype: torch.dtype) -> None:
    x, weight, added = operands(7, 1024, True)
    weight = weight.to(dtype)
    with torch.no_grad():
        out = packed.product(weight, added.to(dtype) if added is not None else None, torch.float32)(x)
    expected = x.double() @ weight.double().t() + added.to(dtype).double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


def test_16_bits_are_put_in_order_only_where_the_processor_multiplies_them() -> None:
    weight = torch.zeros(1024, 256, dtype=torch.bfloat16)
    with chosen("fp32"):
        assert not packed.can_pack(weight)
    with chosen("native"):
        assert packed.can_pack(weight) == by_onednn(torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(packed.product(weight)(torch.ones(2, 256).bfloat16()), torch.zeros(2, 1024).bfloat16())
    assert not packed.can_pack(weight.double())
