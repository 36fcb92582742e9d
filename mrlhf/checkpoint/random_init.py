"""Fresh weights for a model that starts from nothing, the same under every layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mrlhf.checkpoint.families import Weight
from mrlhf.checkpoint.names import OUTPUT_BIAS, all_parameters, check_stage, whole_model
from mrlhf.checkpoint.transforms import TensorRanks, read_shard
from mrlhf.model_config import ModelConfig


@torch.no_grad()
def draw_weights(
    chunks: Sequence[Any], config: ModelConfig, *, ranks: TensorRanks, head: str = "lm", seed: int = 0
) -> None:
    """Fill this rank's stages with Megatron's initialisation, in place.

    Matrices are normal with deviation ``init_std``, those that write to the residual stream (attention output and
    second feed-forward matrix) with ``init_std / sqrt(2 * layers)``
    (``megatron.core.utils.init_method_normal, scaled_init_method_normal``); norms are 1 and biases 0. Each unsharded
    Hugging Face tensor is drawn in fp32 by a generator of its own, seeded with ``seed`` and its name, and this rank
    keeps its part. So weights depend on neither layout nor dtype; a rank holds one whole tensor at a time.

    Args:
        chunks: the rank's stages, not yet known to any optimizer.
        config: the architecture.
        ranks: place of this rank among the tensor ranks.
        head: ``"lm"`` or ``"value"``.
        seed: of the draw.
    """
    params = all_parameters(chunks)
    weights = whole_model(config, head, value_bias=OUTPUT_BIAS in params)
    check_stage(chunks, weights)
    for name, param in params.items():
        read_shard(weights[name], _reader(weights[name], config, seed), config, param.data, ranks)


def _reader(weight: Weight, config: ModelConfig, seed: int) -> Callable[[str, int, int, int | None], torch.Tensor]:
    deviation = config.init_std / math.sqrt(2 * config.num_layers) if weight.kind == "row" else config.init_std

    def read(name: str, dim: int, start: int, stop: int | None) -> torch.Tensor:
        """Part of the drawn tensor, as a reader of files gives it."""
        tensor = _draw(name, weight.shapes[weight.sources.index(name)], deviation, seed)
        return tensor.narrow(dim, start, (tensor.shape[dim] if stop is None else stop) - start)

    return read


def _draw(name: str, shape: tuple[int, ...], deviation: float, seed: int) -> torch.Tensor:
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    mixed = hashlib.sha256(f"weights {seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(mixed[:8], "little") >> 1)
    return torch.randn(shape, generator=generator) * deviation
