"""Random models and rows for the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mrlhf.checkpoint.random_init import draw_weights
from mrlhf.checkpoint.transforms import TensorRanks
from mrlhf.data.sft import SFTExample, sft_batch
from mrlhf.megatron import device
from mrlhf.megatron.groups import build_groups
from mrlhf.megatron.model import build_model
from mrlhf.megatron.optimizer import AdamSettings, Trainable
from mrlhf.model_config import ModelConfig
from mrlhf.planner import ParallelSizes
from mrlhf.roles.model import TrainedModel
from mrlhf.types import RolloutBatch

SHAPES = {
    "small": {"hidden_size": 256, "num_layers": 4, "heads": 8, "kv_heads": 8, "ffn_hidden_size": 688},
    "135M": {"hidden_size": 576, "num_layers": 30, "heads": 9, "kv_heads": 3, "ffn_hidden_size": 1536},
}
"""Sizes of layers: those of the small comparisons, and SmolLM2-135M's."""


def llama(shape: str = "small", *, vocab: int, length: int, tied: bool = False) -> ModelConfig:
    """A Llama of one of the `SHAPES`."""
    sizes = SHAPES[shape]
    return ModelConfig(
        family="llama",
        hidden_size=sizes["hidden_size"],
        num_layers=sizes["num_layers"],
        num_attention_heads=sizes["heads"],
        num_query_groups=sizes["kv_heads"],
        head_dim=sizes["hidden_size"] // sizes["heads"],
        ffn_hidden_size=sizes["ffn_hidden_size"],
        vocab_size=vocab,
        max_position_embeddings=length,
        tie_word_embeddings=tied,
    )


def build_trained(
    sizes: ParallelSizes, *, vocab: int, length: int, shape: str = "small", dtype: torch.dtype = torch.float32
) -> TrainedModel:
    """A language model with fresh weights and its optimizer; all ranks of the world call this together."""
    device.install()
    config, groups = llama(shape, vocab=vocab, length=length), build_groups(sizes)
    device.seed_rng_tracker(0, groups.tp.rank(), pp_rank=groups.pp.rank(), dp_rank=groups.dp_cp.rank())
    chunks = build_model(config, sizes, groups, head="lm", trainable=True, dtype=dtype)
    draw_weights(chunks, config, ranks=TensorRanks.of(groups))
    return TrainedModel("model", config, Trainable(chunks, groups, AdamSettings(lr=1e-4)), groups)


def make_rows(lengths: Sequence[int], *, vocab: int) -> RolloutBatch:
    """Rows of random tokens of these lengths; all but the first token of each are learned."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]
    return sft_batch([SFTExample(row, [False] + [True] * (len(row) - 1), 0) for row in ids], pad_id=0)
