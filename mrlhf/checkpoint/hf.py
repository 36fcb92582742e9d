"""Loads Hugging Face folders into Megatron stages, tensor by tensor, each rank reading only its slices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from mrlhf.checkpoint.families import Family, Weight, family_by_name
from mrlhf.checkpoint.hf_config import read_head, read_model_config
from mrlhf.checkpoint.hf_export import export_hf
from mrlhf.checkpoint.names import (
    EMBEDDING,
    OUTPUT_BIAS,
    OUTPUT_WEIGHT,
    add_value_bias,
    all_parameters,
    check_stage,
    whole_model,
)
from mrlhf.checkpoint.safetensors_io import SafetensorsReader
from mrlhf.checkpoint.transforms import TensorRanks, read_shard
from mrlhf.errors import CheckpointError
from mrlhf.model_config import ModelConfig

__all__ = ["export_hf", "has_value_bias", "load_hf_weights", "read_head", "read_model_config"]

HeadInit = Literal["auto", "loaded", "fresh"]


def has_value_bias(path: str | Path) -> bool:
    """Whether the one-label classifier in the Hugging Face folder ``path`` has a bias on its head."""
    heads = family_by_name(read_model_config(path).family).heads
    with SafetensorsReader(path) as reader:
        return heads.value_bias.name in reader.names()


def _head_is_loaded(reader: SafetensorsReader, family: Family, head_init: str) -> bool:
    """Decide whether the value head comes from the file; refuse a classifier of several labels."""
    name = family.heads.value_weight.name
    present = name in reader.names()
    if head_init == "loaded" and not present:
        raise CheckpointError(
            f"{reader.folder}: no value head ({name}); give a one-label {family.value_architecture} checkpoint, or "
            "ask for a fresh head"
        )
    if head_init == "fresh" or not present:
        return False
    labels = reader.shape(name)[0]
    if labels != 1:
        raise CheckpointError(
            f"{reader.folder}: {name} has {labels} labels; a reward or value model needs num_labels 1"
        )
    return True


def _needed(
    reader: SafetensorsReader, config: ModelConfig, head: str, *, load_head: bool
) -> tuple[dict[str, Weight], set[str]]:
    """The whole model's weights to read from the file, and the file's tensors that may be left unread."""
    family = family_by_name(config.family)
    heads, names = family.heads, reader.names()
    weights = whole_model(config, head, value_bias=load_head and heads.value_bias.name in names)
    optional = {name for name in names if any(re.fullmatch(pattern, name) for pattern in family.tolerated)}
    if head == "value":
        optional.add(heads.lm.name)
        if not load_head:
            del weights[OUTPUT_WEIGHT]
            optional |= {heads.value_weight.name, heads.value_bias.name}
    elif config.tie_word_embeddings:
        optional.add(heads.lm.name)
    embedding = weights[EMBEDDING].sources[0]
    if config.tie_word_embeddings and embedding not in names and heads.lm.name in names:
        # One shared tensor, saved under its other name.
        for name in (EMBEDDING, OUTPUT_WEIGHT):
            if name in weights and weights[name].sources == (embedding,):
                weight = weights[name]
                weights[name] = Weight(weight.name, weight.kind, (heads.lm.name,), weight.shapes)
    return weights, optional


def _check_file(reader: SafetensorsReader, weights: dict[str, Weight], optional: set[str]) -> None:
    """Every tensor of the file is used or known to be optional, every needed one is there, with its shape.

    This looks at headers only and at the whole model, so every rank comes to the same verdict.
    """
    shapes = {
        name: shape for weight in weights.values() for name, shape in zip(weight.sources, weight.shapes, strict=True)
    }
    names = reader.names()
    problems = [f"missing: {name}" for name in sorted(set(shapes) - names)]
    problems += [f"not used: {name}" for name in sorted(names - set(shapes) - optional)]
    if problems:
        shown = "\n".join(f"  - {problem}" for problem in problems[:20])
        rest = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError(f"{reader.folder}: the tensors do not match the model:\n{shown}{rest}")
    for name, shape in shapes.items():
        if reader.shape(name) != shape:
            raise CheckpointError(
                f"{reader.file_of(name)}: {name} has shape {reader.shape(name)}, config.json implies {shape}"
            )


def _check_tied_duplicate(reader: SafetensorsReader, config: ModelConfig, weights: dict[str, Weight]) -> None:
    """A head that is stored although the model is tied must equal the embedding; compared 4,096 rows at a time."""
    lm_name, embedding = family_by_name(config.family).heads.lm.name, weights[EMBEDDING].sources[0]
    if not config.tie_word_embeddings or lm_name not in reader.names() or embedding == lm_name:
        return
    if reader.shape(lm_name) == reader.shape(embedding):
        starts = range(0, config.vocab_size, 4096)
        if all(
            torch.equal(reader.read(lm_name, 0, s, s + 4096), reader.read(embedding, 0, s, s + 4096)) for s in starts
        ):
            return
    raise CheckpointError(
        f"{reader.folder}: config.json says tie_word_embeddings, but {lm_name} differs from {embedding}"
    )


def fresh_value_head(hidden_size: int, seed: int) -> torch.Tensor:
    """A new value head ``[1, hidden]`` fp32: normal with standard deviation ``1/sqrt(hidden + 1)``.

    The initialisation of Stiennon et al. 2020 (appendix B.1), as in TRL's reference implementation. It depends on
    ``seed`` alone, so every rank and every layout has the same head.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, hidden_size, generator=generator) / (hidden_size + 1) ** 0.5


@torch.no_grad()
def set_fresh_value_head(chunks: Sequence[Any], config: ModelConfig, seed: int) -> None:
    """Give the value head on this rank, if it is here, its initial values (see `fresh_value_head`); bias zero."""
    params = all_parameters(chunks)
    if OUTPUT_WEIGHT in params:
        params[OUTPUT_WEIGHT].copy_(fresh_value_head(config.hidden_size, seed))
    if OUTPUT_BIAS in params:
        params[OUTPUT_BIAS].zero_()


@torch.no_grad()
def load_hf_weights(
    chunks: Sequence[Any],
    model_config: ModelConfig,
    path: str | Path,
    *,
    ranks: TensorRanks,
    head: str = "lm",
    head_init: HeadInit = "auto",
    seed: int = 0,
) -> None:
    """Fill this rank's stages from a Hugging Face folder, in place.

    ``chunks`` are the rank's virtual stages (wrapped or not); values are cast to each parameter's dtype. Rows that
    pad the vocabulary become zero. With ``head="value"`` the head comes from a one-label classification checkpoint
    (``head_init="loaded"``; a bias that it has is added to the model's head), is new (``"fresh"``), or is loaded
    where the folder has one (``"auto"``); the LM head of a language model is then skipped. Load before the optimizer
    is built: it copies the parameters.

    Raises `CheckpointError`, on every rank alike, naming each tensor that is missing, unused or of the wrong shape.
    """
    with SafetensorsReader(path) as reader:
        family = family_by_name(model_config.family)
        load_head = head == "value" and _head_is_loaded(reader, family, head_init)
        weights, optional = _needed(reader, model_config, head, load_head=load_head)
        _check_file(reader, weights, optional)
        if head == "lm":
            _check_tied_duplicate(reader, model_config, weights)
        if load_head and OUTPUT_BIAS in weights:
            add_value_bias(chunks)
        fresh = head == "value" and not load_head
        if fresh:
            set_fresh_value_head(chunks, model_config, seed)
        params = {
            name: param
            for name, param in all_parameters(chunks).items()
            if not (fresh and name in (OUTPUT_WEIGHT, OUTPUT_BIAS))
        }
        check_stage(chunks, weights if not fresh else weights | whole_model(model_config, "value", value_bias=True))
        for name, param in params.items():
            read_shard(weights[name], reader.read, model_config, param.data, ranks)
