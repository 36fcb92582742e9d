"""A model of a run's checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

from mrlhf.checkpoint.convert import conversion_sizes, world, world_size
from mrlhf.checkpoint.hf_config import model_config_from_dict
from mrlhf.checkpoint.hf_export import DEFAULT_SHARD_SIZE, export_hf
from mrlhf.checkpoint.names import OUTPUT_BIAS, OUTPUT_WEIGHT, add_value_bias
from mrlhf.checkpoint.saved import locate, verify
from mrlhf.checkpoint.sharded import fill_weights, sharded_weights, zero_padding
from mrlhf.checkpoint.training_state import TENSORS, load_tensors, read_state
from mrlhf.data.templates import read_template
from mrlhf.errors import CheckpointError
from mrlhf.megatron.groups import build_groups
from mrlhf.megatron.model import build_model


def export_state(
    source: str | Path,
    target: str | Path,
    role: str | None,
    *,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    dtype: torch.dtype | None = None,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> None:
    """Turn one model of a checkpoint into a Hugging Face folder, whatever layout the run had.

    Args:
        source: a checkpoint, or the output folder of a run, whose newest one is taken.
        target: the folder to write.
        role: ``actor``, ``critic``, ``ema`` or ``model``; None where the checkpoint has one model only.
        tensor_model_parallel_size: of this conversion, as `import_hf`.
        pipeline_model_parallel_size: likewise.
        dtype: written; by default the wider of the start's and the run's.
        max_shard_size: bytes of one file.
        overwrite: an existing target is replaced.

    Raises:
        CheckpointError: no complete checkpoint, a damaged file, no such role, or the run's start model has gone.
    """
    checkpoint = locate(Path(source))
    state = read_state(checkpoint.path)
    role = _role(checkpoint.path, state, role)
    name = state["averages"].get(role, role)
    saved, settings = state["models"][name], state["common"]["config"]
    config = model_config_from_dict(saved["config"], f"{checkpoint.path}: {name}")
    origin = Path(settings[f"{name}.path"])
    if not origin.is_dir():
        raise CheckpointError(
            f"{checkpoint.path}: the run began with {origin}, which is not there; its config.json is needed for an "
            "export; move it back, or run from the directory that the run was started in"
        )
    verify(checkpoint)
    run_dtype = torch.float32 if name != role else getattr(torch, saved["dtype"].removeprefix("torch."))
    sizes = conversion_sizes(config, tensor_model_parallel_size, pipeline_model_parallel_size, world_size())
    with world():
        groups = build_groups(sizes)
        head, bias = _head(checkpoint.path, name)
        chunks = build_model(config, sizes, groups, head=head, dtype=run_dtype, trainable=False)  # type: ignore[arg-type]
        if bias:
            add_value_bias(chunks)
        _load(chunks, checkpoint.path, role, groups)
        zero_padding(chunks, groups, config.vocab_size)
        export_hf(
            chunks,
            config,
            target,
            source_folder=origin,
            groups=groups,
            head=head,
            dtype=dtype or torch.promote_types(getattr(torch, config.dtype), run_dtype),
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            tokenizer=settings["tokenizer.path"],
            chat_template=read_template(settings["tokenizer.chat_template"]),
        )


def is_run_folder(path: str | Path) -> bool:
    """Whether ``path`` is a checkpoint, or a folder that has some."""
    try:
        locate(Path(path))
    except CheckpointError:
        return False
    return True


def _role(path: Path, state: dict[str, Any], role: str | None) -> str:
    roles = [*state["models"], *state["averages"]]
    if role is None and len(roles) == 1:
        return str(roles[0])
    if role is None or role not in roles:
        raise CheckpointError(f"{path}: holds {', '.join(roles)}; choose one with --role, not {role!r}")
    return role


def _head(path: Path, name: str) -> tuple[str, bool]:
    """The kind of head, and whether it has a bias; a tied language model has no output layer of its own."""
    found = dist_checkpointing.load_tensors_metadata(str(path / TENSORS))
    weight = found.get(f"{name}.{OUTPUT_WEIGHT}")
    value = weight is not None and weight.global_shape[0] == 1
    return "value" if value else "lm", f"{name}.{OUTPUT_BIAS}" in found


@torch.no_grad()
def _load(chunks: Any, path: Path, role: str, groups: Any) -> None:
    wanted = sharded_weights(chunks, groups)
    add_prefix_for_sharding(wanted, f"{role}.")
    loaded = load_tensors(path, wanted, f"{path}")
    fill_weights(chunks, {part: loaded[part] for part in wanted}, path)
