"""SDPAttention against an explicit softmax; cached attention against full recomputation by transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from mrlhf.megatron.attention import SDPAttention, padded_causal_mask
from tests.distributed.megatron_tools import PP2, SP, TP2, VPP2, Reference, build
from tools.make_tiny_model import make_tiny_model


def attention(scale: float | None = None, **options: Any) -> SDPAttention:
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0, **options)
    return SDPAttention(config, layer_number=1, softmax_scale=scale)


def tensors(s: int, b: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(s, b, n, dim, generator=generator, dtype=dtype).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]


def explicit(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    s, b, heads, dim = query.shape
    key, value = (x.repeat_interleave(heads // x.size(2), dim=2) for x in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) * (scale or dim**-0.5)
    hidden = torch.ones(s, s, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bhst,tbhd->sbhd", weights, value).reshape(s, b, heads * dim)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_equals_an_explicit_softmax(kv_heads: int, scale: float | None) -> None:
    inputs = tensors(11, 2, 4, kv_heads, 8, torch.float64)
    upstream = torch.randn(11, 2, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, theirs = attention(scale)(*inputs), explicit(*inputs, scale)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(a, b)


def largest_allocation(work: Callable[[], torch.Tensor]) -> int:
    """Bytes of the largest single allocation of the forward and the backward."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work().sum().backward()
    sizes = [event.bytes() for event in record.profiler.kineto_results.events() if event.name() == "[memory]"] \
        if hasattr(record.profiler.kineto_results.events()[0], "bytes") else []  # fmt: skip
    sizes += [event.self_cpu_memory_usage for event in record.events()]
    return max(sizes)


def test_no_score_matrix_is_held() -> None:
    s = 2048
    scores = s * s * 4
    module = attention()
    assert largest_allocation(lambda: explicit(*tensors(s, 1, 1, 1, 8, torch.float32))) >= scores
    assert largest_allocation(lambda: module(*tensors(s, 1, 1, 1, 8, torch.float32))) < scores / 8


def test_what_it_cannot_do_is_refused() -> None:
    inputs = tensors(3, 1, 4, 4, 8, torch.float32)
    with pytest.raises(ValueError, match="no attention bias"):
        attention()(*inputs, attention_bias=torch.zeros(1))
    divided = attention()
    divided.cp_group = "a group"
    with pytest.raises(ValueError, match="neither packed rows nor a mask under context parallelism"):
        divided(*inputs, attention_mask=torch.zeros(1, 1, 3, 3, dtype=torch.bool))


PROMPTS = [[5, 9, 11], [7, 8, 30, 41, 66, 3, 12, 90], [50]]
CONTINUED = [[21, 4, 60, 33], [10, 11, 12, 13], [96, 3, 77, 8]]
LAYOUTS = {
    "tp1": (1, {}),
    "tp2": (2, TP2),
    "tp2sp": (2, TP2 | SP),
    "pp2": (2, PP2),
    "pp2vpp2": (2, PP2 | VPP2),
    "tp2sp-pp2": (4, TP2 | SP | PP2),
}


def _cached(path: Path, sizes: dict[str, Any], kv_heads: int) -> Any:
    """Logits at the end of each prompt, then after each further token, all rows at once and one row alone."""
    from mrlhf.megatron.attention import CacheContext
    from mrlhf.megatron.decode import layer_numbers, packed_forward
    from mrlhf.rollout.kv_cache import KVCache

    config, groups, chunks = build(path, sizes, trainable=False)
    slots, longest = len(PROMPTS), 16
    cache = KVCache(
        layer_numbers(chunks), slots, longest, kv_heads // groups.tp.size(), config.head_dim,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    # What no token has written must not matter.
    cache.keys.fill_(100.0)
    cache.values.fill_(100.0)
    filler = groups.tp.size() if chunks[0].config.sequence_parallel else 1

    def run(rows: list[tuple[int, list[int], int]], decode: bool) -> torch.Tensor | None:
        tokens, places, positions, segments, ends = [], [], [], [], []
        for slot, new, start in rows:
            segments.append((len(tokens), len(tokens) + len(new)))
            tokens += new
            places += [slot] * len(new)
            positions += range(start, start + len(new))
            ends.append(len(tokens) - 1)
        extra = -len(tokens) % filler
        if extra:
            segments.append((len(tokens), len(tokens) + extra))
            tokens, places, positions = tokens + [0] * extra, places + [slots] * extra, positions + list(range(extra))
        context = CacheContext(
            cache, torch.tensor(places), torch.tensor(positions), max_sequence_length=longest,
            segments=None if decode else segments,
            rows=slice(0, slots) if decode and not extra and len(rows) == slots else None,
        )  # fmt: skip
        out = packed_forward(chunks, torch.tensor(tokens), context, torch.tensor(ends), groups=groups)
        if out is None:
            return None
        shards = [torch.empty_like(out) for _ in range(groups.tp.size())]
        torch.distributed.all_gather(shards, out.contiguous(), group=groups.tp)
        return torch.cat(shards, -1)[:, : config.vocab_size]

    with torch.no_grad():
        steps = [run([(i, prompt, 0) for i, prompt in enumerate(PROMPTS)], decode=False)]
        for step in range(3):
            steps.append(run([(i, [CONTINUED[i][step]], len(PROMPTS[i]) + step) for i in range(slots)], decode=True))
        steps.append(run([(1, [CONTINUED[1][3]], len(PROMPTS[1]) + 3)], decode=True))
    return steps if steps[0] is not None else None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cached_logits_equal_full_recomputation(run_ranks: Any, tmp_path: Path, layout: str) -> None:
    kv_heads = 4 if layout == "tp2" else 2
    world, sizes = LAYOUTS[layout]
    path = make_tiny_model(tmp_path / "model", num_kv_heads=kv_heads, tokenizer=False, seed=2)
    model = Reference(path).model
    with torch.no_grad():
        full = [model(torch.tensor([prompt + more])).logits[0] for prompt, more in zip(PROMPTS, CONTINUED, strict=True)]
    answers = [steps for steps in run_ranks(_cached, world, path, sizes, kv_heads) if steps is not None]
    assert len(answers) == world // sizes.get("pipeline_model_parallel_size", 1)
    for steps in answers:
        for step, logits in enumerate(steps[:4]):
            expected = torch.stack([full[i][len(PROMPTS[i]) - 1 + step] for i in range(3)])
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(steps[4], full[1][-1:], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_masked_keys_are_not_seen_by_any_query_and_the_padding_still_gets_numbers(kv_heads: int) -> None:
    """A row of 4 keys in 7 slots: real queries as ever, queries on the padding as if the row's keys ended at 4."""
    query, key, value = tensors(7, 2, 4, kv_heads, 8, torch.float64)
    lengths = torch.tensor([4, 7])
    ours = attention()(query, key, value, padded_causal_mask(lengths, 7))
    plain = explicit(query, key, value)
    torch.testing.assert_close(ours[:, 1], plain[:, 1])
    torch.testing.assert_close(ours[:4, 0], plain[:4, 0])
    for slot in range(4, 7):
        # The same query right after the last key: there the causal order alone hides nothing and shows all 4 keys.
        moved = query.clone()
        moved[3] = query[slot]
        torch.testing.assert_close(ours[slot, 0], explicit(moved[:4], key[:4], value[:4])[3, 0])
    gradient = torch.autograd.grad(ours.sum(), key)[0]
    assert torch.equal(gradient[4:, 0], torch.zeros_like(gradient[4:, 0]))
    assert bool(gradient[4:, 1].ne(0).any())
