"""Weights in Megatron's distributed checkpoint format (torch_dist): written under one layout, read under any."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import sys
from collections.abc import Sequence
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

from mrlhf.checkpoint.names import EMBEDDING, OUTPUT_WEIGHT, all_parameters, unwrap
from mrlhf.errors import CheckpointError

_OUTPUT_LAYER = "output_layer."
_fork = multiprocessing.get_context("fork")


def _end_with_parent() -> None:
    """Let the kernel end this process with the one that started it: else every killed rank leaves one behind."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1  # noqa: N806
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def use_forked_results_queue() -> None:
    """Start Megatron's result queue from a fork, once a process, where there is no CUDA.

    Its own queue belongs to a spawned manager, which imports the user's main module again: 3.5 to 12 s at the first
    save, and an endless loop in a script without a ``__main__`` guard. With CUDA a fork is not safe, so it stays.
    """
    if not torch.cuda.is_available() and getattr(filesystem_async, "_results_queue", "absent") is None:
        manager = SyncManager(ctx=_fork)
        manager.start(_end_with_parent)
        filesystem_async._results_queue = manager.Queue()


def sharded_stage(chunk: Any, groups: ProcessGroupCollection) -> dict[str, Any]:
    """Megatron's sharded state dict of one stage, with the keys of its own ``GPTModel.sharded_state_dict``.

    That method asks ``parallel_state`` for the data-parallel rank where a tied head lives on a later stage than the
    embedding (``tie_embeddings_and_output_weights_state_dict``), and we never fill that global; so its two additions
    to the generic method are made here, from ``groups``: the tied copy, and room for another vocabulary padding.
    """
    model: Any = unwrap(chunk)
    state: dict[str, Any] = MegatronModule.sharded_state_dict(model, metadata={"dp_cp_group": groups.dp_cp})
    state.pop("output_layer._extra_state", None)
    if not model.post_process:
        return state
    if model.share_embeddings_and_output_weights:
        if not model.pre_process:
            state[OUTPUT_WEIGHT] = make_tp_sharded_tensor_for_checkpoint(
                tensor=model.shared_embedding_or_output_weight(),
                key=EMBEDDING,
                replica_id=(1, 0, groups.dp_cp.rank()),  # 1: a copy of the first stage's
                allow_shape_mismatch=True,
                tp_group=groups.tp,
                dp_cp_group=groups.dp_cp,
            )
    else:
        state[OUTPUT_WEIGHT].allow_shape_mismatch = True
    return state


def sharded_weights(chunks: Sequence[Any], groups: ProcessGroupCollection) -> dict[str, Any]:
    """The sharded state of all virtual stages: ``model``, or ``model0``, ``model1``, ..."""
    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    return {name: sharded_stage(chunk, groups) for name, chunk in zip(names, chunks, strict=True)}


def save_sharded_weights(chunks: Sequence[Any], folder: str | Path, *, groups: ProcessGroupCollection) -> None:
    """Write the weights into ``folder``, which exists and is empty; all ranks of the world call this together."""
    use_forked_results_queue()
    dist_checkpointing.save(sharded_weights(chunks, groups), str(folder))


@torch.no_grad()
def load_sharded_weights(
    chunks: Sequence[Any],
    folder: str | Path,
    *,
    groups: ProcessGroupCollection,
    vocab_size: int,
    with_head: bool = True,
) -> None:
    """Fill the stages from a torch_dist ``folder`` written under any layout; all ranks call this together.

    Values are cast to each parameter's dtype and rows beyond ``vocab_size`` become zero. With ``with_head`` False
    the output layer is left as it is and the folder's is not read. Any other difference between the names in the
    folder and in the model raises `CheckpointError`, on every rank, with the names.
    """
    if not (Path(folder) / "metadata.json").exists():
        raise CheckpointError(f"{folder}: not a complete Megatron checkpoint (no metadata.json)")
    wanted = sharded_weights(chunks, groups)
    for part in wanted.values():
        for key in list(part):
            if not with_head and key.startswith(_OUTPUT_LAYER):
                del part[key]
    try:
        loaded, missing, unexpected = dist_checkpointing.load(wanted, str(folder), strict=StrictHandling.RETURN_ALL)
    except (CheckpointingException, KeyError, OSError) as error:
        raise CheckpointError(f"{folder}: cannot be loaded: {error}") from error
    if not with_head:
        missing = {key for key in missing if not key.startswith(_OUTPUT_LAYER)}
    # Megatron's terms are those of the state dict: unexpected by the file, missing from the request. Transformer
    # Engine's extra state holds FP8 scales, which a weights folder from another machine need not have.
    problems = [f"missing: {key}" for key in sorted(unexpected) if not key.endswith("_extra_state")]
    problems += [f"not used: {key}" for key in sorted(missing) if "_extra_state" not in key]
    if problems:
        raise CheckpointError(f"{folder}: the tensors do not match the model: " + "; ".join(problems[:20]))
    fill_weights(chunks, {part: loaded[part] for part in wanted}, folder, with_head=with_head)
    zero_padding(chunks, groups, vocab_size)


def stand_by(folder: str | Path) -> None:
    """Take part in other ranks' `load_sharded_weights`, in which all ranks of the world describe what they want."""
    if (Path(folder) / "metadata.json").exists():
        dist_checkpointing.load({}, str(folder), strict=StrictHandling.RETURN_ALL)


def fill_weights(chunks: Sequence[Any], loaded: dict[str, Any], folder: str | Path, *, with_head: bool = True) -> None:
    """Copy what was loaded for `sharded_weights` into the stages. Raises `CheckpointError` for another set of names."""
    for chunk, state in zip(chunks, loaded.values(), strict=True):
        result = unwrap(chunk).load_state_dict(state, strict=False)
        absent = [key for key in result.missing_keys if not key.endswith("_extra_state")]
        if not with_head:
            absent = [key for key in absent if not key.startswith(_OUTPUT_LAYER)]
        if absent or result.unexpected_keys:
            raise CheckpointError(f"{folder}: not loaded: {absent}; unknown: {result.unexpected_keys}")


@torch.no_grad()
def zero_padding(chunks: Sequence[Any], groups: ProcessGroupCollection, vocab_size: int) -> None:
    """Set the embedding's and the output layer's rows beyond ``vocab_size`` to 0."""
    for name, param in all_parameters(chunks).items():
        if name == EMBEDDING or (name == OUTPUT_WEIGHT and param.shape[0] > 1):
            first = groups.tp.rank() * param.shape[0]
            param[max(vocab_size - first, 0) :].zero_()
