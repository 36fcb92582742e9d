"""Packed rows against the same rows padded: results, loss and gradients, under every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mrlhf.types import RolloutBatch
from tests.distributed.megatron_tools import PP2, SP, TP2, VOCAB, VPP2, Layout, build
from tools.make_tiny_model import make_tiny_model

# Micro-batches of 21, 8, 12 and 29 tokens: two of them need filling under TP 2.
LENGTHS = (3, 18, 7, 1, 2, 10, 25, 4)
PLAN = [[0, 1], [2, 3], [4, 5], [6, 7]]
LAYOUTS = {
    "one": Layout(),
    "tp2sp": Layout(2, TP2 | SP),
    "pp2": Layout(2, PP2),
    "pp2vpp2": Layout(2, PP2 | VPP2),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("packing") / "model", tokenizer=False, seed=8)


def make_batch(multiple: int) -> RolloutBatch:
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    batch = RolloutBatch.from_sequences(
        [r[:1] for r in rows], [r[1:] for r in rows], pad_id=0, pad_to_multiple=multiple
    )
    slots = torch.arange(batch.width - 1)
    mask = torch.rand(batch.size, batch.width - 1, generator=generator) < 0.7
    return batch.replace(response_mask=mask & (slots < (batch.lengths - 1).unsqueeze(1)))


def measure(path: Path, layout: Layout, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Log-probs, loss, norm and this rank's gradients, padded and packed; the value head's numbers too."""
    from mrlhf.megatron import device
    from mrlhf.megatron.optimizer import AdamSettings, Trainable
    from mrlhf.roles.language_model import learned_request, nll_loss
    from mrlhf.roles.model import RoleModel, TrainedModel

    config, groups, chunks = build(path, layout.sizes, dtype=dtype)
    model = TrainedModel("model", config, Trainable(chunks, groups, AdamSettings(lr=1e-3)), groups)
    values = RoleModel("value", config, build(path, layout.sizes, head="value", dtype=dtype)[2], groups)
    batch = make_batch(groups.tp.size() if model.trainable.config.sequence_parallel else 1)
    batch = batch.to(device.device())
    assert batch.response_mask is not None
    result: dict[str, Any] = {"lengths": batch.lengths}
    for name, packed in (("padded", False), ("packed", True)):
        gradients = model.gradients(
            batch, PLAN, nll_loss, float(batch.response_mask.sum()), learned_request, packed=packed
        )
        result[name] = {
            "logprobs": model.per_token(batch, PLAN, learned_request, packed=packed),
            "values": values.per_token(batch, PLAN, packed=packed),
            "norm": gradients.norm,
            "loss": float(gradients.metrics["loss"].result()) if gradients.metrics else None,
            "gradients": {n: p.main_grad.clone() for c in chunks for n, p in c.named_parameters()},
        }
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_rows_give_the_numbers_of_padded_ones(run_ranks: Any, path: Path, layout: str) -> None:
    for rank in run_ranks(measure, LAYOUTS[layout].world, path, LAYOUTS[layout]):
        padded, packed, lengths = rank["padded"], rank["packed"], rank["lengths"]
        torch.testing.assert_close(packed["logprobs"], padded["logprobs"], rtol=1e-5, atol=2e-5)
        assert bool(padded["logprobs"].lt(0).any())
        tokens = torch.arange(packed["values"].size(1)) < lengths.unsqueeze(1)
        torch.testing.assert_close(packed["values"][tokens], padded["values"][tokens], rtol=1e-5, atol=2e-5)
        assert bool(packed["values"][tokens].ne(0).all())
        assert not packed["values"][~tokens].any()
        assert packed["norm"] == pytest.approx(padded["norm"], rel=1e-5)
        assert packed["loss"] == (None if padded["loss"] is None else pytest.approx(padded["loss"], rel=1e-6))
        for name, expected in padded["gradients"].items():
            # 97 ids leave the second tensor rank nothing but padding of the vocabulary, with gradients of 0.
            error, scale = float((packed["gradients"][name] - expected).abs().max()), float(expected.abs().max())
            assert error <= 2e-5 * scale, name
            assert scale > 0 or "embedding" in name or "output_layer" in name, name


def test_rows_are_laid_out_without_padding_and_filled_up_at_the_end() -> None:
    from mrlhf.megatron.packing import pack_rows

    packing = pack_rows([2, 3], 5, multiple=4, device=torch.device("cpu"))
    rows = torch.tensor([[11, 12, 0, 0, 0], [21, 22, 23, 0, 0]])
    assert packing.pack(rows).tolist() == [[11, 12, 21, 22, 23, 0, 0, 0]]
    assert packing.positions.tolist() == [[0, 1, 0, 1, 2, 0, 1, 2]]
    assert packing.documents.cu_seqlens_q.tolist() == [0, 2, 5, 8]
    assert packing.documents.max_seqlen_q == 3
    assert packing.documents.segments == ((0, 2), (2, 5), (5, 8))
    output = torch.arange(16.0).view(2, 1, 8)
    expected = [[0, 1, 0, 0, 0], [2, 3, 4, 0, 0]], [[8, 9, 0, 0, 0], [10, 11, 12, 0, 0]]
    assert packing.unpack(output).tolist() == [*expected]


def test_a_request_is_packed_with_its_mask() -> None:
    from mrlhf.megatron.model import LogprobRequest
    from mrlhf.megatron.packing import pack_rows

    packing = pack_rows([1, 2], 3, multiple=2, device=torch.device("cpu"))
    targets = torch.tensor([[1, 2, 3], [4, 5, 6]])
    request = packing.pack_request(LogprobRequest(targets, targets > 0, temperature=0.5, with_entropy=True))
    assert (request.temperature, request.with_entropy) == (0.5, True)
    assert request.targets.tolist() == [[1, 4, 5, 0]]
    assert request.wanted.tolist() == [[True, True, True, False]]
    assert packing.pack_request(None) is None


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_a_row_without_tokens_is_refused(lengths: list[int]) -> None:
    from mrlhf.megatron.packing import pack_rows

    with pytest.raises(ValueError, match="cannot be packed"):
        pack_rows(lengths, 4, multiple=1, device=torch.device("cpu"))


def test_an_attention_mask_for_packed_rows_is_refused() -> None:
    from mrlhf.megatron.attention import SDPAttention
    from mrlhf.megatron.packing import PackedDocuments
    from tests.distributed.test_attention import attention

    module = attention()
    assert isinstance(module, SDPAttention)
    rows = torch.zeros(3, 4, 8)
    with pytest.raises(ValueError, match="without a mask"):
        module(rows, rows, rows, torch.zeros(1, 1, 3, 3, dtype=torch.bool), packed_seq_params=PackedDocuments("thd"))
    with pytest.raises(ValueError, match="as thd"):
        module(rows, rows, rows, packed_seq_params=PackedDocuments("sbhd"))


def test_documents_are_also_found_in_megatrons_own_description() -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    from mrlhf.megatron.packing import pack_rows
    from tests.distributed.test_attention import attention

    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(5, 4, 8, generator=generator) for _ in range(3)]
    ours = pack_rows([2, 3], 3, multiple=1, device=torch.device("cpu")).documents
    theirs = PackedSeqParams("thd", cu_seqlens_q=ours.cu_seqlens_q, cu_seqlens_kv=ours.cu_seqlens_kv)
    expected = attention()(*rows, packed_seq_params=ours)
    assert torch.equal(attention()(*rows, packed_seq_params=theirs), expected)
    alone = attention()(*(x[2:].unsqueeze(1) for x in rows)).squeeze(1)
    torch.testing.assert_close(expected[2:], alone)
