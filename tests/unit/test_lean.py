"""Products of a few rows in the forms that generation on a CPU uses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mrlhf.megatron.lean import linear


@pytest.mark.parametrize("rows", [1, 8, 9, 64, 65])
@pytest.mark.parametrize("columns", [40, 2048, 2500])
@pytest.mark.parametrize("bias", [True, False])
def test_every_form_is_the_same_product(rows: int, columns: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, 48, generator=generator) for n in (rows, columns))
    added = torch.randn(columns, generator=generator) if bias else None
    with torch.no_grad():
        out = linear(x, weight, added)
    assert out.is_contiguous()
    torch.testing.assert_close(out, F.linear(x, weight, added), rtol=1e-5, atol=1e-5)


def test_other_dtypes_take_the_ordinary_form() -> None:
    x, weight = torch.randn(4, 16).bfloat16(), torch.randn(3000, 16).bfloat16()
    assert torch.equal(linear(x, weight), F.linear(x, weight))
