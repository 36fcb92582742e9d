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


def _cached(path: Path, sizes: dict[str, Any], kv_heads: int, lean: bool, worth_a_cut: int) -> Any:
    """Logits at the end of each prompt, then after each further token: all rows at once, and one row alone.

    The prompts go through in one piece each, and in pieces of two tokens; the further tokens with the slots read in
    place, picked one by one, and in a pass together with a prompt.
    """
    from mrlhf.megatron import cached_attention
    from mrlhf.megatron.cached_attention import CacheContext, Segment
    from mrlhf.megatron.decode import Pipeline, layer_numbers
    from mrlhf.rollout.kv_cache import KVCache

    cached_attention._WORTH_A_CUT = worth_a_cut
    config, groups, chunks = build(path, sizes, trainable=False)
    slots, longest = len(PROMPTS), 16
    cache = KVCache(
        layer_numbers(chunks), slots + 3, longest, kv_heads // groups.tp.size(), config.head_dim,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    # What no token has written must not matter.
    cache.tensor.fill_(100.0)
    filler = groups.tp.size() if chunks[0].config.sequence_parallel else 1
    pipeline = Pipeline(chunks, groups, lean=lean)
    assert all((part is not None) == (lean and filler == 1) for part in pipeline._lean)
    rows: list[int] = []
    if pipeline.is_last(len(chunks) - 1) and pipeline._lean[-1] is not None:
        _record_rows(pipeline._lean[-1].layers[-1], rows)

    def run(
        steps: list[tuple[int, int, int]], pieces: list[tuple[int, list[int], int]], unwanted: int = slots + 1
    ) -> torch.Tensor | None:
        """A pass of single tokens ``(slot, token, position)`` and of pieces ``(slot, tokens, position)``.

        Logits come after all of these but the piece in the slot ``unwanted``.
        """
        tokens, places = [token for _, token, _ in steps], [slot for slot, _, _ in steps]
        positions, segments = [position for _, _, position in steps], []
        ends = list(range(len(steps)))
        extra = -(len(tokens) + sum(len(new) for _, new, _ in pieces)) % filler
        for slot, new, start in [*pieces, *([(slots + 1, [0] * extra, 0)] if extra else [])]:
            wanted = slot not in (unwanted, slots + 1)
            segments.append(Segment(len(tokens), len(tokens) + len(new), slot, start, wanted))
            tokens, places = tokens + new, places + [slot] * len(new)
            positions += range(start, start + len(new))
            ends += [len(tokens) - 1] if wanted else []
        context = CacheContext(
            cache, torch.tensor(places), torch.tensor(positions), max_sequence_length=longest,
            segments=segments, lengths=[position + 1 for _, _, position in steps],
            first_slot=0 if [slot for slot, _, _ in steps] == list(range(slots)) else None,
        )  # fmt: skip
        out = None
        for stage in range(len(chunks)):
            out = pipeline.run(stage, torch.tensor(tokens), context, torch.tensor(ends))
        pipeline.settle()
        if out is None:
            return None
        shards = [torch.empty_like(out) for _ in range(groups.tp.size())]
        torch.distributed.all_gather(shards, out.contiguous(), group=groups.tp)
        return torch.cat(shards, -1)[:, : config.vocab_size]

    def in_pieces() -> torch.Tensor | None:
        out = []
        for i, prompt in enumerate(PROMPTS):
            parts = [run([], [(i, prompt[at : at + 2], at)]) for at in range(0, len(prompt), 2)]
            out.append(parts[-1])
        return None if out[0] is None else torch.cat([part for part in out if part is not None])

    def further(i: int, step: int) -> tuple[int, int, int]:
        return i, CONTINUED[i][step], len(PROMPTS[i]) + step

    with torch.no_grad():
        steps = [run([], [(i, prompt, 0) for i, prompt in enumerate(PROMPTS)]), in_pieces()]
        for step in range(3):
            steps.append(run([further(i, step) for i in range(slots)], []))
        steps.append(run([further(1, 3)], []))
        mixed = run([further(i, 2) for i in range(slots)], [(slots, PROMPTS[0], 0)])
        steps.append(None if mixed is None else mixed[:slots])
        steps.append(None if mixed is None else mixed[slots:])
        # The beginning of a prompt whose logits nobody wants lies between the two.
        pieces = [(slots, PROMPTS[1][:3], 0), (slots + 2, PROMPTS[0], 0)]
        steps.append(run([further(i, 2) for i in range(slots)], pieces, unwanted=slots))
    # The last layer computes no more than what is asked for: 3 prompts, 7 pieces, 5 passes of single tokens and others.
    assert rows in ([], [3, *[1] * 7, 3, 3, 3, 1, 4, 4])
    assert bool(rows) == (steps[0] is not None and lean and filler == 1)
    return steps if steps[0] is not None else None


def _record_rows(layer: Any, rows: list[int]) -> None:
    mlp = layer.mlp

    def recorded(x: torch.Tensor) -> torch.Tensor:
        rows.append(x.size(0))
        out: torch.Tensor = mlp(x)
        return out

    layer.mlp = recorded


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cached_logits_equal_full_recomputation(run_ranks: Any, tmp_path: Path, layout: str) -> None:
    kv_heads = 4 if layout == "tp2" else 2
    world, sizes = LAYOUTS[layout]
    path = make_tiny_model(tmp_path / "model", num_kv_heads=kv_heads, tokenizer=False, seed=2)
    model = Reference(path).model
    with torch.no_grad():
        full = [model(torch.tensor([prompt + more])).logits[0] for prompt, more in zip(PROMPTS, CONTINUED, strict=True)]
    expected = [torch.stack([full[i][len(PROMPTS[i]) - 1 + step] for i in range(3)]) for step in (0, 0, 1, 2, 3)]
    expected += [full[1][-1:], expected[-1], expected[0][:1], torch.cat((expected[-1], expected[0][:1]))]
    # Each rank's stages by themselves, all slots read at once or in runs, and through Megatron's modules.
    for lean, worth_a_cut in ((True, 1 << 20), (True, 1), (False, 1 << 20)):
        found = run_ranks(_cached, world, path, sizes, kv_heads, lean, worth_a_cut)
        answers = [steps for steps in found if steps is not None]
        assert len(answers) == world // sizes.get("pipeline_model_parallel_size", 1)
        for steps in answers:
            for logits, right in zip(steps, expected, strict=True):
                torch.testing.assert_close(logits, right, rtol=1e-5, atol=2e-5)


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
