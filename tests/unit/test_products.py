"""16-bit products in fp32: which processors need them, and that the result is rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mrlhf.errors import ConfigError
from mrlhf.megatron.cpu_products import attention, linear
from mrlhf.parallel import products
from mrlhf.parallel.products import are_widened, chosen, has_fast, has_fast_bf16, is_fast, is_widened, product
from mrlhf.parallel.tiled_head import fused_logprobs

BF16, FP16 = torch.bfloat16, torch.float16
X86 = {"architecture": "x86_64", "avx2": True}
AVX512 = X86 | {"avx512_f": True, "avx512_vnni": True}
PROCESSORS: dict[str, tuple[bool, dict[str, Any], bool, bool]] = {
    # oneDNN takes bf16, instructions, fast in bf16, fast in fp16
    "AVX2 (Zen 3)": (False, X86 | {"f16c": True}, False, False),
    "AVX-512 (Cascade Lake)": (True, AVX512, False, False),
    "AVX-512 bf16 (Zen 4)": (True, AVX512 | {"avx512_bf16": True}, True, False),
    "AMX (Sapphire Rapids)": (
        True, AVX512 | {"avx512_bf16": True, "avx512_fp16": True, "amx_tile": True, "amx_bf16": True}, True, True,
    ),
    "AVX-NE-CONVERT (Sierra Forest)": (True, X86 | {"avx_ne_convert": True}, True, True),
    "AMX, oneDNN switched off": (False, AVX512 | {"amx_bf16": True, "amx_fp16": True}, False, False),
    "Arm with bf16": (True, {"architecture": "aarch64", "sve": True}, True, True),
    "Arm without": (False, {"architecture": "aarch64"}, False, False),
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors(name: str) -> None:
    by_onednn, instructions, bf16, fp16 = PROCESSORS[name]
    assert is_fast(BF16, by_onednn, instructions) is bf16
    assert is_fast(FP16, by_onednn, instructions) is fp16


@pytest.mark.parametrize("answers", [(), ("_is_avx512_bf16_supported",), ("_is_amx_tile_supported",)])
def test_a_torch_that_answers_single_questions(monkeypatch: pytest.MonkeyPatch, answers: tuple[str, ...]) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(products, "by_onednn", lambda dtype: True)
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda name=name: name in answers, raising=False)
    has_fast.cache_clear()
    try:
        assert has_fast_bf16() is bool(answers)
        assert not has_fast(FP16)
    finally:
        has_fast.cache_clear()


def test_the_environment_forces_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.zeros(1, dtype=BF16)
    for value, widened in (("fp32", True), ("native", False), ("auto", not has_fast_bf16()), ("", not has_fast_bf16())):
        monkeypatch.setenv(products.VARIABLE, value)
        assert are_widened(BF16) is widened
        assert is_widened(half) is widened
        assert not any(are_widened(dtype) for dtype in (torch.float32, torch.float64, torch.int64))
        assert not is_widened(half.to("meta"))
    monkeypatch.setenv(products.VARIABLE, "native")
    with chosen("fp32"):
        assert are_widened(BF16)
    assert not are_widened(BF16)


def test_a_misspelt_environment_is_named() -> None:
    assert products.problems({products.VARIABLE: "auto"}) == products.problems({}) == []
    (message,) = products.problems({products.VARIABLE: "fp64"})
    assert "MRLHF_CPU_PRODUCTS is 'fp64'; give auto, native, fp32" in message
    with pytest.raises(ConfigError):
        products.setting({products.VARIABLE: "fp64"})


def draw(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded_once(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Within half a unit in the last place of the exact product, but for what a sum in fp32 loses."""
    exact, sums = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    half_unit = torch.finfo(out.dtype).eps / 2
    assert bool(((out.double() - exact).abs() <= half_unit * exact.abs() + 2e-6 * sums + 1e-7).all())


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 300, 40), (2, 64, 5000), (64, 96, 4000), (65, 33, 70), (300, 129, 31)])
def test_a_product_is_the_fp32_product_rounded_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, m: int, k: int, n: int
) -> None:
    rows, columns = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype, seed=1)
    orders = [(rows, columns.t()), (rows, columns.t().contiguous()), (rows.t().contiguous().t(), columns.t())]
    for large in (products.LARGE, 3000):
        monkeypatch.setattr(products, "LARGE", large)
        for a, b in orders:
            for out in (product(a, b), product(b.t(), a.t()).t()):
                assert out.dtype is dtype
                assert_rounded_once(out, a, b)
    assert torch.equal(product(rows[:0], columns.t()), torch.empty(0, n, dtype=dtype))


def test_a_product_without_tiles_is_that_of_fp32() -> None:
    a, b = draw(70, 50), draw(50, 90, seed=1)
    assert torch.equal(product(a, b), (a.float() @ b.float()).bfloat16())


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_and_its_gradients(bias: bool) -> None:
    x, weight = draw(3, 5, 40).requires_grad_(), draw(30, 40, seed=1).requires_grad_()
    added = draw(30, seed=2).requires_grad_() if bias else None
    upstream = draw(3, 5, 30, seed=3)
    with chosen("fp32"):
        out = linear(x, weight, added)
        out.backward(upstream)
        with torch.no_grad():
            assert torch.equal(linear(x, weight, added), out)
    assert x.grad is not None
    assert weight.grad is not None
    flat, grad = x.detach().view(15, 40), upstream.view(15, 30)
    plain = (flat.float() @ weight.detach().float().t()).bfloat16().view(3, 5, 30)
    assert torch.equal(out, plain if added is None else plain + added)
    assert_rounded_once(x.grad.view(15, 40), grad, weight.detach())
    assert_rounded_once(weight.grad, grad.t(), flat)
    if added is not None:
        assert torch.equal(added.grad, grad.sum(0))


def test_fp32_and_native_are_torchs_own() -> None:
    x, weight = draw(4, 20), draw(9, 20, seed=1)
    with chosen("fp32"):
        assert torch.equal(linear(x.float(), weight.float()), F.linear(x.float(), weight.float()))
    with chosen("native"):
        assert torch.equal(linear(x, weight), F.linear(x, weight))
        q = draw(1, 2, 5, 8)
        assert torch.equal(attention(q, q, q), F.scaled_dot_product_attention(q, q, q, is_causal=True))


def test_what_is_kept_for_the_backward_pass_is_in_16_bits() -> None:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    x, weight, q = draw(7, 16).requires_grad_(), draw(5, 16, seed=1), draw(2, 4, 6, 8).requires_grad_()
    with chosen("fp32"), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        linear(x, weight)  # frozen: the input is not needed
        assert [t.shape for t in kept] == [weight.shape]
        linear(x, weight.clone().requires_grad_())
        assert sorted(t.shape for t in kept[1:]) == [weight.shape, x.shape]
        assert {t.dtype for t in kept} == {BF16}
        kept.clear()
        attention(q, q[:, :2], q[:, :2])
    assert sorted((t.dim(), t.dtype is BF16) for t in kept) == [(3, False), *[(4, True)] * 4]


@pytest.mark.parametrize("kind", ["causal", "bool mask", "added mask"])
def test_attention_and_its_gradients(kind: str) -> None:
    inputs = [draw(2, heads, 6, 8, seed=seed) for seed, heads in enumerate((4, 2, 2))]
    upstream = draw(2, 4, 6, 8, seed=5)
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    mask: torch.Tensor | None = None
    if kind != "causal":
        mask = seen if kind == "bool mask" else torch.zeros(6, 6, dtype=BF16).masked_fill_(~seen, float("-inf"))

    def run(dtype: torch.dtype, products_: Any) -> list[torch.Tensor]:
        made = [t.detach().clone().to(dtype).requires_grad_() for t in inputs]
        added = mask if mask is None or mask.dtype is torch.bool else mask.to(dtype)
        with chosen(products_):
            out = attention(*made, mask=added, scale=0.3)
            out.backward(upstream.to(dtype))
            with torch.no_grad():
                torch.testing.assert_close(attention(*made, mask=added, scale=0.3), out)
        return [out.detach(), *(t.grad for t in made)]  # type: ignore[misc]

    for ours, exact in zip(run(BF16, "fp32"), run(torch.float64, "native"), strict=True):
        assert ours.dtype is BF16
        # One rounding of the result; that of the output enters the gradients.
        torch.testing.assert_close(ours.double(), exact, rtol=0.008, atol=0.01)


def test_log_probs_of_bf16_weights_have_fp32_logits() -> None:
    hidden, weight = draw(50, 24).requires_grad_(), (draw(90, 24, seed=1) * 3).requires_grad_()
    targets = torch.arange(50)
    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    table = torch.log_softmax(exact_hidden @ exact_weight.t(), -1)
    expected = table[torch.arange(50), targets]
    (expected.sum() - 0.1 * (table.exp() * table).sum()).backward()
    with chosen("fp32"):
        logprobs, entropy = fused_logprobs(
            hidden, weight, targets, group=None, vocab_size=90, with_entropy=True, tile_tokens=16, tile_vocab=32
        )
        assert entropy is not None
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
    # Logits in bf16 would be off by 0.05.
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-4, atol=1e-4)
    for ours, exact in ((hidden, exact_hidden), (weight, exact_weight)):
        assert ours.grad is not None
        assert exact.grad is not None
        assert ours.grad.dtype is BF16
        error = (ours.grad.double() - exact.grad).abs().max() / exact.grad.abs().max()
        assert float(error) < 0.004
