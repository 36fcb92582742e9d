"""The job that `ppo_step` gives to ours and to TRL: four random Llama-like models, a tokenizer, prompts."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True)
class Size:
    """One cell of the comparison.

    Attributes:
        name: of the cell.
        vocab: entries of the vocabulary.
        dtype: ``fp32`` or ``bf16``.
        rows: prompts of an iteration.
        prompt: tokens of each.
        response: tokens of each answer.
        minibatch: rows of one optimizer step; a forward pass takes as many.
        smollm2: SmolLM2-135M in place of a random model of 4 layers and hidden size 256.
    """

    name: str
    vocab: int
    dtype: str
    rows: int = 16
    prompt: int = 64
    response: int = 64
    minibatch: int = 8
    smollm2: bool = False


SIZES = {
    size.name: size
    for size in (
        Size("8k fp32", 8192, "fp32"),
        Size("32k fp32", 32_768, "fp32"),
        Size("8k bf16", 8192, "bf16"),
        Size("135M fp32", 49_152, "fp32", rows=8, minibatch=4, smollm2=True),
    )
}


def make_job(folder: Path, size: Size) -> None:
    """Write ``actor/``, ``reward/`` (the critic begins from it) and ``prompts.jsonl``; all prompts are equally long."""

    if size.smollm2:
        _smollm2(folder)
    else:
        from tools.make_tiny_model import DTYPES, make_tiny_model

        shape = {"hidden_size": 256, "num_layers": 4, "num_heads": 8, "num_kv_heads": 8, "ffn_hidden_size": 688}
        common = {**shape, "vocab_size": size.vocab, "init_std": 0.02, "dtype": DTYPES[size.dtype], "tokenizer": False}
        make_tiny_model(folder / "actor", seed=0, **common)
        make_tiny_model(folder / "reward", seed=1, classifier=True, **common)
        for name in ("actor", "reward"):
            words_tokenizer(size.vocab).save_pretrained(folder / name)
    with (folder / "prompts.jsonl").open("w") as file:
        for text in _texts(size):
            file.write(json.dumps({"prompt": text}) + "\n")


def _texts(size: Size) -> list[str]:
    import torch

    if size.smollm2:
        lines = (ROOT / "examples" / "data" / "smollm2_prompts.jsonl").read_text().splitlines()
        prompts = [json.loads(line)["prompt"] for line in lines]
        return [p if isinstance(p, str) else p[-1]["content"] for p in prompts][: size.rows * 4]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, size.vocab, (size.rows * 4, size.prompt), generator=generator)
    return [" ".join(f"w{i}" for i in row) for row in ids.tolist()]


def words_tokenizer(vocab: int):  # noqa: ANN201
    """Token ``i`` is the word ``wi``, so that text and ids are the same thing for everyone."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    entries = {name: i for i, name in enumerate(special)} | {f"w{i}": i for i in range(len(special), vocab)}
    tokenizer = Tokenizer(models.WordLevel(entries, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def _smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct as actor, and with a fresh scalar head as reward model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForSequenceClassification

    from tools.make_smollm2 import make_smollm2

    make_smollm2(folder / "actor")
    model = AutoModelForCausalLM.from_pretrained(folder / "actor")
    config = model.config
    config.num_labels = 1
    reward = LlamaForSequenceClassification(config)
    reward.model.load_state_dict(model.model.state_dict())
    reward.save_pretrained(folder / "reward")
    AutoTokenizer.from_pretrained(folder / "actor").save_pretrained(folder / "reward")
