#!/usr/bin/env python
"""Write a tiny random Llama as a Hugging Face folder, with a tokenizer: something to try the trainer on.

python tools/make_tiny_model.py --target runs/tiny
python tools/make_tiny_model.py --target runs/tiny-reward --classifier --seed 1
"""

from __future__ import annotations

import argparse
import string
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()

PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"
SPECIAL = [PAD, BOS, EOS, UNK]  # ids 0, 1, 2, 3
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog and the cat looks at the small bird in the old tree",
    "what is the best way to learn something new? ask a question, read the answer and try it again",
    "user: tell me a story about a friendly robot. assistant: once upon a time there was a robot",
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of at most ``vocab_size`` entries: byte-level BPE from 260 entries on, single characters below."""
    if vocab_size >= len(SPECIAL) + 256:
        tokenizer = Tokenizer(models.BPE(unk_token=None))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(CORPUS, trainer)
    else:
        characters = " " + string.ascii_lowercase + ".,?!'\n" + string.digits + ":" + string.ascii_uppercase
        characters += "".join(sorted(set(string.punctuation) - set(characters)))
        entries = SPECIAL + list(characters)[: vocab_size - len(SPECIAL)]
        tokenizer = Tokenizer(models.WordLevel({entry: i for i, entry in enumerate(entries)}, unk_token=UNK))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK, padding_side="right"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny_model(
    target: str | Path,
    *,
    hidden_size: int = 64,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    ffn_hidden_size: int = 128,
    vocab_size: int = 97,
    max_position_embeddings: int = 256,
    init_std: float = 0.1,
    tied: bool = False,
    classifier: bool = False,
    tokenizer: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "5GB",
    **config: object,
) -> Path:
    """Write the model folder ``target``; further keywords go to ``LlamaConfig``."""
    torch.manual_seed(seed)
    values: dict[str, object] = {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "intermediate_size": ffn_hidden_size,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "initializer_range": init_std,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **config,
    }
    if classifier:
        model = LlamaForSequenceClassification(LlamaConfig(num_labels=1, **values))
    else:
        model = LlamaForCausalLM(LlamaConfig(**values))
        model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # All norms and biases at 1 and 0 would hide a tensor that lands in the wrong place.
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter), alpha=init_std)
    folder = Path(target)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        build_tokenizer(vocab_size).save_pretrained(folder)
    return folder


def main(argv: list[str] | None = None) -> int:
    """Read the flags and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder to write")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--num-kv-heads", type=int, default=2)
    parser.add_argument("--ffn-hidden-size", type=int, default=128)
    parser.add_argument("--vocab-size", type=int, default=97)
    parser.add_argument("--max-position-embeddings", type=int, default=256)
    parser.add_argument("--init-std", type=float, default=0.1)
    parser.add_argument("--tied", action="store_true", help="share embedding and output weights")
    parser.add_argument("--classifier", action="store_true", help="a one-label classifier (reward model or critic)")
    parser.add_argument("--no-tokenizer", dest="tokenizer", action="store_false")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args(argv))
    options["dtype"] = DTYPES[options["dtype"]]
    print(make_tiny_model(options.pop("target"), **options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
