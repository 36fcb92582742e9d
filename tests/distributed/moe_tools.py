"""Tiny mixture-of-experts folders, and transformers' stacked experts by the names in its folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.distributed.megatron_tools import SP, TP2

FAMILIES = ("mixtral", "qwen3_moe")
EP2, EP4 = ({"expert_model_parallel_size": n} for n in (2, 4))
ETP1 = {"expert_tensor_parallel_size": 1}
TP2SP = TP2 | SP
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 97, "max_position_embeddings": 256, "initializer_range": 0.2,
    "num_experts_per_tok": 2, "num_local_experts": 4, "sliding_window": None,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_QWEN3 = {"head_dim": 16, "moe_intermediate_size": 24, "norm_topk_prob": False, "mlp_only_layers": [1]}


def write_moe(
    folder: Path, family: str, *, seed: int = 0, classifier: bool = False, tokenizer: bool = False, **others: Any
) -> Path:
    """A model with norms that are not 1; Qwen3-MoE has a dense layer and weights that do not add up to 1."""
    import transformers

    from tools.make_tiny_model import build_tokenizer

    torch.manual_seed(seed)
    prefix = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}[family]
    sizes = _SIZES | (_QWEN3 if family == "qwen3_moe" else {}) | others
    kind = "ForSequenceClassification" if classifier else "ForCausalLM"
    config = getattr(transformers, f"{prefix}Config")(**sizes, **({"num_labels": 1} if classifier else {}))
    model = getattr(transformers, f"{prefix}{kind}")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            elif parameter.dim() > 1 and float(parameter.std()) < 0.05:
                # Not all classes of transformers initialise the router.
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    if tokenizer:
        build_tokenizer(sizes["vocab_size"]).save_pretrained(folder)
    return folder


def by_expert(tensors: dict[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
    """Stacked experts, or their gradients, taken apart and named as on disk."""
    mixtral = family == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    found = {}
    for name, tensor in tensors.items():
        where, _, part = name.partition("experts.")
        if mixtral:
            where, name = where.replace(".mlp.", ".block_sparse_moe."), name.replace(".mlp.", ".block_sparse_moe.")
        if part == "gate_up_proj":
            for expert, value in enumerate(tensor):
                first, second = value.chunk(2)
                found[f"{where}experts.{expert}.{gate}.weight"] = first
                found[f"{where}experts.{expert}.{up}.weight"] = second
        elif part == "down_proj":
            found |= {f"{where}experts.{expert}.{down}.weight": value for expert, value in enumerate(tensor)}
        else:
            found[name] = tensor
    return found
