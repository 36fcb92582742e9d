"""FP8 against the definition of its formats (arXiv:2209.05433), the rules for scales, and a layer's three products."""

from __future__ import annotations

import math

import pytest
import torch

from mrlhf.megatron.fp8 import Fp8
from mrlhf.megatron.fp8_linear import Fp8Product, Quantizers
from mrlhf.megatron.fp8_scaling import (
    E4M3,
    E5M2,
    DelayedScales,
    amax_of,
    current_scale,
    dequantize,
    largest,
    product,
    quantize,
)

ONE = torch.tensor(1.0)
# Bits of exponent and mantissa, exponent bias, largest finite value.
FORMATS = {E4M3: (4, 3, 7, 448.0), E5M2: (5, 2, 15, 57344.0)}


def values(dtype: torch.dtype) -> list[float]:
    """Every finite magnitude of a format from its definition, in order; the place of one is also its code."""
    exponent_bits, mantissa_bits, bias, top = FORMATS[dtype]
    result = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            power = 2.0 ** (max(exponent, 1) - bias)
            result.append((fraction if exponent == 0 else 1 + fraction) * power)
    return [value for value in result if value <= top]


def rounded(x: float, dtype: torch.dtype) -> float:
    """The nearest value of a format, ties to the even code; beyond the largest the largest."""
    table = values(dtype)
    distances = [abs(abs(x) - value) for value in table]
    best = min(distances)
    nearest = [code for code, distance in enumerate(distances) if distance == best]
    code = nearest[0] if len(nearest) == 1 else next(code for code in nearest if code % 2 == 0)
    return math.copysign(table[code], x)


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_formats_hold_what_their_definition_says(dtype: torch.dtype) -> None:
    table = values(dtype)
    assert table[-1] == largest(dtype) == FORMATS[dtype][3]
    assert quantize(torch.tensor(table), ONE, dtype).float().tolist() == table
    smallest = {E4M3: 2.0**-9, E5M2: 2.0**-16}[dtype]
    assert table[1] == smallest


@pytest.mark.parametrize("dtype", FORMATS)
def test_rounding_is_to_the_nearest_with_ties_to_even(dtype: torch.dtype) -> None:
    table = values(dtype)
    middles = [(low + high) / 2 for low, high in zip(table, table[1:], strict=False)]
    drawn = torch.randn(500, generator=torch.Generator().manual_seed(1)) * largest(dtype) / 3
    inputs = [*middles, *(-m for m in middles), *drawn.tolist(), largest(dtype) * 1.01, -largest(dtype) * 2]
    assert quantize(torch.tensor(inputs), ONE, dtype).float().tolist() == [rounded(x, dtype) for x in inputs]


@pytest.mark.parametrize("dtype", FORMATS)
def test_infinity_saturates_and_nan_stays(dtype: torch.dtype) -> None:
    q = quantize(torch.tensor([math.inf, -math.inf, math.nan, 1e30]), ONE, dtype).float()
    assert q[:2].tolist() == [largest(dtype), -largest(dtype)]
    assert q[2].isnan()
    assert q[3] == largest(dtype)


def test_a_scale_is_the_largest_value_over_amax_and_no_power_of_two() -> None:
    assert current_scale(torch.tensor(3.0), E4M3) == torch.tensor(448.0) / 3
    assert current_scale(torch.tensor(3.0), E5M2) == torch.tensor(57344.0) / 3
    # Nothing to scale by: a tensor of zeros, an infinite one; a scale beyond fp32 becomes the largest fp32 number.
    assert current_scale(torch.tensor(0.0), E4M3) == 1
    assert current_scale(torch.tensor(math.inf), E4M3) == 1
    assert current_scale(torch.tensor(1e-37), E4M3) == torch.finfo(torch.float32).max
    tiny = torch.tensor([1e-37])
    q = quantize(tiny, current_scale(tiny[0], E4M3), E4M3)
    assert 0 < float(q.float()) < 448


def test_the_largest_magnitude_passes_over_nan() -> None:
    assert amax_of(torch.tensor([1.0, -3.0, math.nan])) == 3
    assert amax_of(torch.tensor([1.0, -math.inf])) == math.inf
    assert amax_of(torch.empty(0, 4)) == 0
    assert amax_of(torch.tensor([-2.0], dtype=torch.bfloat16)).dtype is torch.float32


def test_scaled_values_come_back_within_half_a_step() -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(2)) * 0.02
    scale = current_scale(amax_of(x), E4M3)
    back = dequantize(quantize(x, scale, E4M3), scale)
    # Normal numbers have a relative error of at most 2^-4; subnormal ones an absolute one of 2^-10 before scaling.
    allowed = (x.abs() * 2**-4).clamp(min=float(2**-10 / scale)) * 1.001
    assert bool(((back - x).abs() <= allowed).all())
    assert bool(((back - x).abs() > 0).any())
    assert back.abs().max() == pytest.approx(float(x.abs().max()), rel=1e-6)
    # At scale 1 weights of this size lie among the few subnormal values.
    assert float((dequantize(quantize(x, ONE, E4M3), ONE) - x).abs().mean()) > 1.3 * float((back - x).abs().mean())


def delayed(algorithm: str = "max", *, length: int = 3, margin: int = 0, tensors: int = 1) -> DelayedScales:
    return DelayedScales(tensors, E4M3, history_len=length, algorithm=algorithm, margin=margin)  # type: ignore[arg-type]


def test_delayed_scales_follow_the_history() -> None:
    scales, newest = delayed(), delayed("most_recent")
    assert scales.scale.tolist() == [1.0]
    expected = {"max": [448 / 4, 448 / 4, 448 / 4, 448 / 2, 448 / 2], "most_recent": [448 / x for x in (4, 2, 1, 2, 1)]}
    for step, amax in enumerate([4.0, 2.0, 1.0, 2.0, 1.0]):
        for each in (scales, newest):
            each.record(torch.tensor([amax]))
            each.update()
            assert each.scale.tolist() == [expected[each.algorithm][step]], (step, each.algorithm)
    # The first row collects for the next update, the newest is the last.
    assert scales.history.flatten().tolist() == [0.0, 2.0, 1.0]


def test_uses_before_an_update_count_together_and_a_margin_halves() -> None:
    scales = delayed(margin=1)
    for amax in (1.0, 7.0, 2.0):
        scales.record(torch.tensor([amax]))
    scales.update()
    assert scales.scale.tolist() == [32.0]


def test_nothing_usable_leaves_a_delayed_scale_alone() -> None:
    scales = delayed(tensors=4)
    scales.record(torch.tensor([1.0, 2.0, 4.0, 8.0]))
    scales.update()
    before, history = scales.scale.clone(), scales.history.clone()
    scales.record(torch.tensor([0.0, math.inf, 1e-45, 2.0]))
    scales.update()
    assert scales.scale[:2].tolist() == before[:2].tolist()
    assert torch.equal(scales.history[:, 0], history[:, 0]), "nothing was seen, so nothing is remembered"
    assert scales.history[:, 1].tolist() == [0.0, 2.0, math.inf]
    assert scales.scale[2:].tolist() == [112.0, 56.0]
    one = delayed(length=1)
    for amax, scale in ((4.0, 112.0), (2.0, 224.0)):
        one.record(torch.tensor([amax]))
        one.update()
        assert one.scale.tolist() == [scale]
    tiny = delayed(length=1)
    tiny.record(torch.tensor([1e-40]))
    tiny.update()
    assert tiny.scale.tolist() == [torch.finfo(torch.float32).max]


def by_hand(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """``x`` rounded through a format, value by value, in double precision."""
    scaled = (x.float() * torch.tensor(scale)).flatten().tolist()
    return torch.tensor([rounded(v, dtype) for v in scaled], dtype=torch.float64).view(x.shape) / scale


@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layers_three_products_by_hand(fp8_format: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    x, weight, grad = (
        (torch.randn(shape, generator=generator) * size).to(dtype).requires_grad_()
        for shape, size in (((2, 5, 8), 3.0), ((6, 8), 0.1), ((2, 5, 6), 1e-3))
    )
    output = Fp8Product.apply(x, weight, Quantizers(Fp8(fp8_format), (), recomputed=False), True)  # type: ignore[arg-type]
    output.backward(grad.detach())

    def operand(t: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
        flat = t.detach().reshape(-1, t.size(-1))
        return by_hand(flat, float(torch.tensor(largest(fp8)) / flat.abs().max().float()), fp8)

    qx, qw = operand(x, E4M3), operand(weight, E4M3)
    qg = operand(grad, E5M2 if fp8_format == "hybrid" else E4M3)
    allowed = 2e-6 if dtype is torch.float32 else 2**-8
    for ours, exact in ((output, qx @ qw.T), (x.grad, qg @ qw), (weight.grad, qg.T @ qx)):
        assert ours is not None
        assert ours.dtype is dtype
        scale = float(exact.abs().max())
        error = float((ours.detach().double().reshape(exact.shape) - exact).abs().max())
        assert error <= allowed * scale
    plain = x.detach().double().reshape(-1, 8) @ weight.detach().double().T
    assert 1e-3 < float((output.detach().double().reshape(-1, 6) - plain).norm() / plain.norm()) < 0.06


def test_a_delayed_layer_uses_the_scales_of_the_passes_before() -> None:
    fp8 = Fp8("hybrid", recipe="delayed", amax_history_len=2)
    quantizers = Quantizers(fp8, (), recomputed=False)
    x, weight = torch.full((4, 8), 2.0, requires_grad=True), torch.full((3, 8), 0.5, requires_grad=True)
    huge = torch.full((4, 8), 500.0)
    output = Fp8Product.apply(huge, weight.detach(), quantizers, False)
    assert output[0, 0] == 448 * 0.5 * 8, "the first scale is 1, and 500 saturates"
    assert quantizers.forward_scales.scale.tolist() == [1.0, 1.0], "a pass without gradient changes no scale"
    Fp8Product.apply(x, weight, quantizers, True).backward(torch.full((4, 3), 4.0))
    assert quantizers.forward_scales.scale.tolist() == [pytest.approx(448 / 500), 896.0], "but it is remembered"
    assert quantizers.backward_scales.scale.tolist() == [57344 / 4]


def test_a_recomputed_pass_has_the_scales_of_the_first_one_and_changes_nothing() -> None:
    quantizers = Quantizers(Fp8("hybrid", recipe="delayed"), (), recomputed=True).train()
    weight = torch.ones(3, 8)
    first = [torch.full((4, 8), size) for size in (3.0, 5.0)]
    outputs = [Fp8Product.apply(x, weight, quantizers, False) for x in first]
    state = {name: buffer.clone() for name, buffer in quantizers.named_buffers()}
    for x, output in zip(first, outputs, strict=True):
        assert torch.equal(Fp8Product.apply(x, weight, quantizers, True), output)
    assert all(torch.equal(buffer, state[name]) for name, buffer in quantizers.named_buffers())
    quantizers.eval()
    Fp8Product.apply(first[0], weight, quantizers, False)
    assert quantizers.used.take() is None, "an evaluation pass comes once"


def test_products_of_extreme_scales_stay_finite() -> None:
    x = torch.full((2, 4), 1e-30)
    scale = current_scale(amax_of(x), E4M3)
    q = quantize(x, scale, E4M3)
    assert product(q, scale, quantize(torch.ones(4, 2), ONE, E4M3), ONE).tolist() == [[pytest.approx(4e-30)] * 2] * 2
    zeros = torch.zeros(2, 4)
    assert (
        product(quantize(zeros, current_scale(amax_of(zeros), E4M3), E4M3), ONE, q.t(), scale).tolist()
        == [[0.0] * 2] * 2
    )
