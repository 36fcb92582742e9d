"""A real model: SmolLM2-135M-Instruct (30 layers, 9 heads, 3 KV heads, tied), against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.hf_tools import assert_same_tensors, forward_stages, load_stages, round_trip
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def tokens(smollm2: str) -> torch.Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "Write two sentences about the sea, then tell me what 17 times 3 is."}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids: torch.Tensor = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    return ids


@pytest.fixture(scope="module")
def logits(smollm2: str, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        result: torch.Tensor = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)(tokens).logits
    return result


def _model_logits(path: str, layout: Any, tokens: torch.Tensor) -> Any:
    return forward_stages(*load_stages(path, layout), tokens)


def test_it_is_a_language_model(smollm2: str, logits: torch.Tensor, tokens: torch.Tensor) -> None:
    """The dequantized weights make sense: the prompt's own tokens are far likelier than chance (log 49152 = 10.8)."""
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    assert loss < 5


@pytest.mark.parametrize("layout", [(1, 1, None), (3, 1, None), (1, 2, None)], ids=str)
def test_logits_equal_transformers(smollm2: str, tokens: torch.Tensor, logits: torch.Tensor, layout: Any) -> None:
    found = run_ranks(_model_logits, layout[0] * layout[1], smollm2, layout, tokens)[-1]
    assert found.shape == logits.shape
    assert (found - logits).abs().max() < 1e-3
    assert torch.equal(found.argmax(-1), logits.argmax(-1))


def test_export_and_reload_is_bitwise(smollm2: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    out = tmp_path / "out"
    run_ranks(round_trip, 2, smollm2, str(out), (1, 2, None), "lm", torch.float32, {})
    assert_same_tensors(smollm2, out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.tie_word_embeddings
    assert GenerationConfig.from_pretrained(out).eos_token_id == [2, 0]
    chat = [{"role": "user", "content": "hi"}]
    text = AutoTokenizer.from_pretrained(out).apply_chat_template(chat, tokenize=False)
    assert "<|im_start|>user\nhi<|im_end|>" in text
