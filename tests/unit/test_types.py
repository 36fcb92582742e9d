"""RolloutBatch: layout, checks, selection, and metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrlhf import rl
from mrlhf.types import Metric, RolloutBatch, gather_rows, labels, merge_metrics


def example(**changes: Any) -> RolloutBatch:
    batch = RolloutBatch.from_sequences(
        [[5, 6], [5]],
        [[7, 2], [8, 9, 2]],
        pad_id=0,
        pad_to_multiple=4,
        sample_ids=[10, 11],
        group_ids=[3, 3],
        truncated=[False, True],
    )
    return batch.replace(**changes)


def test_layout() -> None:
    batch = example()
    assert batch.tokens.tolist() == [[5, 6, 7, 2, 0, 0, 0, 0], [5, 8, 9, 2, 0, 0, 0, 0]]
    assert batch.tokens.dtype == batch.prompt_lengths.dtype == torch.int64
    assert batch.lengths.tolist() == [4, 4]
    assert (batch.size, batch.width, batch.pad_id) == (2, 8, 0)
    assert labels(batch.tokens).tolist() == [[6, 7, 2, 0, 0, 0, 0], [8, 9, 2, 0, 0, 0, 0]]
    assert batch.prompt(0) == [5, 6]
    assert batch.response(1) == [8, 9, 2]
    assert batch.truncated.tolist() == [False, True]
    assert batch.sample_ids.tolist() == [10, 11]


def test_the_docstring_example() -> None:
    batch = RolloutBatch.from_sequences([[5, 6]], [[7, 2]], pad_id=0)
    assert batch.tokens.tolist() == [[5, 6, 7, 2, 0]]
    mask, _ = rl.response_masks(batch.prompt_lengths, batch.response_lengths, width=4, semantics="standard")
    assert mask.tolist() == [[False, True, True, False]]
    assert labels(batch.tokens)[mask].tolist() == [7, 2]


def test_defaults_of_from_sequences() -> None:
    batch = RolloutBatch.from_sequences([[1], [2, 3]], [[], [4]], pad_id=9)
    assert batch.sample_ids.tolist() == batch.group_ids.tolist() == [0, 1]
    assert not batch.truncated.any()
    assert batch.tokens.tolist() == [[1, 9, 9, 9], [2, 3, 4, 9]]


def test_e3_masks_come_from_lengths_where_pad_is_eos() -> None:
    batch = RolloutBatch.from_sequences([[4]], [[5, 6, 2]], pad_id=2, pad_to_multiple=6)
    mask, _ = rl.response_masks(batch.prompt_lengths, batch.response_lengths, width=5, semantics="standard")
    assert batch.tokens[0, 1:].tolist() == [5, 6, 2, 2, 2]
    assert mask.int().tolist() == [[1, 1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.zeros(2, 8)}, r"tokens must be int64 \[B, S\], not float32 \[2, 8\]"),
        ({"prompt_lengths": torch.tensor([2])}, r"prompt_lengths must be int64 \[2\], not int64 \[1\]"),
        ({"response_lengths": torch.tensor([2.0, 3.0])}, r"response_lengths must be int64 \[2\], not float32"),
        ({"truncated": torch.tensor([0, 1])}, "truncated must be bool"),
        ({"response_lengths": torch.tensor([2, 7])}, "8 slots; the longest row has 8 tokens and needs 9"),
        ({"response_lengths": torch.tensor([2, 2])}, "row 1 is not right-padded"),
        ({"prompt_lengths": torch.tensor([2, 0])}, "the shortest have 0 and 2"),
        ({"values": torch.zeros(2, 8)}, r"values must be float \[2, 7\], not float32 \[2, 8\]"),
        ({"values": torch.zeros(2, 7, dtype=torch.int64)}, "values must be float"),
        ({"response_mask": torch.zeros(2, 7)}, r"response_mask must be bool \[2, 7\]"),
        ({"scores": torch.zeros(2, 1)}, r"scores must be float \[2\]"),
        ({"kl": [1.0]}, "kl must be a tensor, not list"),
        ({"pad_to_multiple": 3}, "width 8 of tokens is not a multiple of pad_to_multiple=3"),
        ({"scores": torch.zeros(2, device="meta")}, "scores is on meta, tokens are on cpu"),
    ],
)
def test_checks(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        example(**changes)


def test_from_sequences_checks() -> None:
    with pytest.raises(ValueError, match="2 prompts and 1 responses"):
        RolloutBatch.from_sequences([[1], [2]], [[3]], pad_id=0)
    with pytest.raises(ValueError, match="prompts need at least 1 token"):
        RolloutBatch.from_sequences([[]], [[3]], pad_id=0)


def test_left_padding_is_refused() -> None:
    with pytest.raises(ValueError, match="row 0 is not right-padded"):
        example(tokens=torch.tensor([[0, 0, 0, 5, 6, 7, 2, 0], [5, 8, 9, 2, 0, 0, 0, 0]]))


def full() -> RolloutBatch:
    frame = torch.arange(14.0).view(2, 7)
    return example(
        values=frame,
        old_logprobs=frame + 100,
        response_mask=frame > 3,
        scores=torch.tensor([1.0, 2.0]),
        kl=frame.double(),
    )


def test_select_and_to() -> None:
    batch = full()
    for rows in (
        [1],
        torch.tensor([1]),
        torch.tensor([False, True]),
        slice(1, 2),
        torch.tensor([1], dtype=torch.int32),
    ):
        one = batch.select(rows)
        assert one.tokens.tolist() == [[5, 8, 9, 2, 0, 0, 0, 0]]
        assert one.values.tolist() == [[7, 8, 9, 10, 11, 12, 13]]
        assert one.scores.tolist() == [2.0]
        assert one.sample_ids.tolist() == [11]
        assert one.returns is None
        assert one.pad_to_multiple == 4
    swapped = batch.select([1, 0, 1])
    assert swapped.sample_ids.tolist() == [11, 10, 11]
    assert batch.select([]).size == 0
    moved = batch.to("cpu")
    assert moved.tensors().keys() == batch.tensors().keys()
    assert torch.equal(moved.kl, batch.kl)


def test_trim_keeps_the_slot_and_the_multiple() -> None:
    batch = RolloutBatch.from_sequences([[5], [5]], [[1] * 2, [1] * 8], pad_id=0, pad_to_multiple=4)
    batch = batch.replace(values=torch.arange(22.0).view(2, 11))
    short = batch.select([0]).trim()
    assert short.tokens.tolist() == [[5, 1, 1, 0]]
    assert short.values.tolist() == [[0, 1, 2]]
    # a row that would fill the multiple exactly needs one more slot
    assert RolloutBatch.from_sequences([[5]], [[1] * 3], pad_id=0, pad_to_multiple=4).width == 8
    wide = short.trim(8)
    assert wide.tokens.tolist() == [[5, 1, 1, 0, 0, 0, 0, 0]]
    assert wide.values.shape == (1, 7)
    for width in (3, 6):
        with pytest.raises(ValueError, match="at least 4"):
            short.trim(width)


def test_cat() -> None:
    batch = full()
    longer = RolloutBatch.from_sequences([[5]], [[1] * 8], pad_id=0, pad_to_multiple=4, sample_ids=[12])
    frame = torch.ones(1, 11)
    longer = longer.replace(
        values=frame, old_logprobs=frame, response_mask=frame > 0, scores=torch.tensor([3.0]), kl=frame.double()
    )
    both = RolloutBatch.cat([batch, longer])
    assert both.tokens.shape == (3, 12)
    assert both.values.shape == (3, 11)
    assert both.sample_ids.tolist() == [10, 11, 12]
    assert both.kl.dtype == torch.float64
    assert torch.equal(both.select([0, 1]).trim().values, batch.trim().values)
    assert RolloutBatch.cat([batch.select([]), longer]).size == 1
    assert RolloutBatch.cat([batch.select([]), batch.select([])]).size == 0
    with pytest.raises(ValueError, match="only some of the batches carry scores"):
        RolloutBatch.cat([batch, longer.replace(scores=None)])
    with pytest.raises(ValueError, match="pad id 0 and 7"):
        RolloutBatch.cat([example(), RolloutBatch.from_sequences([[5]], [[1]], pad_id=7, pad_to_multiple=4)])
    with pytest.raises(ValueError, match="nothing"):
        RolloutBatch.cat([])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.lists(st.integers(0, 9), max_size=9)),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 8),
)
def test_round_trip(rows: list[tuple[list[int], list[int]]], multiple: int) -> None:
    # token ids include the pad id 0: lengths alone say where a row ends
    prompts, responses = [p for p, _ in rows], [r for _, r in rows]
    batch = RolloutBatch.from_sequences(prompts, responses, pad_id=0, pad_to_multiple=multiple)
    assert [batch.prompt(i) for i in range(batch.size)] == prompts
    assert [batch.response(i) for i in range(batch.size)] == responses
    assert batch.width % multiple == 0
    assert batch.width > max(len(p) + len(r) for p, r in rows) >= batch.width - multiple
    again = RolloutBatch.cat([batch.select([i]).trim() for i in range(batch.size)])
    assert torch.equal(again.tokens, batch.tokens)
    mask, _ = rl.response_masks(
        batch.prompt_lengths, batch.response_lengths, width=batch.width - 1, semantics="standard"
    )
    assert labels(batch.tokens)[mask].tolist() == [t for r in responses for t in r]


def test_gather_rows() -> None:
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    picked = gather_rows(x, torch.tensor([2, 0]))
    assert picked.tolist() == [2.0, 3.0]
    picked.sum().backward()
    assert x.grad.tolist() == [[0, 0, 1], [1, 0, 0]]


def test_metrics_merge() -> None:
    parts = [
        {"loss": Metric("mean", torch.tensor(6.0), 2), "top": Metric("max", 1.0, 1), "low": Metric("min", 1.0, 1)},
        {"loss": Metric("mean", 1.0, 5), "top": Metric("max", -math.inf, 0), "low": Metric("min", -2.0, 1)},
        {"other": Metric("mean", 0.0, 0)},
    ]
    merged = merge_metrics(parts)
    assert (merged["loss"].result(), merged["top"].result(), merged["low"].result()) == (1.0, 1.0, -2.0)
    assert math.isnan(merged["other"].result())
    assert math.isnan(Metric("max", 1.0, 1).merge(Metric("max", math.nan, 1)).result())
    assert Metric("mean", 0.1, 1).merge(Metric("mean", 0.2, 1)).result() == (0.1 + 0.2) / 2  # not through fp32
    with pytest.raises(ValueError, match="max here and by min there"):
        Metric("max", 1.0, 1).merge(Metric("min", 1.0, 1))
