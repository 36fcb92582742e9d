"""Every collective and message of a rank: kind, group, dtype, shape and bytes, counted by phase."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "recv",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}


@dataclass(frozen=True, order=True)
class Message:
    """One collective, or one message between two ranks, as this rank sees it.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``gather``, ``send``, ``recv``, ...
        group: ``tp``, ``pp``, ``dp``, ... (see `group_names`).
        ranks: size of the group; 2 for a message between two.
        dtype: of the elements.
        shape: of what travels: the reduced, sent or broadcast tensor; the whole of what is gathered or scattered.
        element_bytes: bytes of an element.
        peer: the other rank of a message between two, else -1.
    """

    kind: str
    group: str
    ranks: int
    dtype: str
    shape: tuple[int, ...]
    element_bytes: int
    peer: int = -1

    @property
    def bytes(self) -> int:
        """Of ``shape``."""
        return math.prod(self.shape) * self.element_bytes

    @property
    def sent(self) -> float:
        """Bytes that this rank sends in a ring (Patarasuk and Yuan 2009), or as one of the two ends."""
        share = (self.ranks - 1) / self.ranks
        factor = {"all_reduce": 2 * share, "recv": 0.0, "barrier": 0.0, "send": 1.0}.get(self.kind, share)
        return factor * self.bytes


class Traffic:
    """Counts messages by phase.

    Attributes:
        phase: what is going on.
        counts: phase -> message -> how often.
    """

    def __init__(self, names: Mapping[str, str], stage_ranks: Collection[int]) -> None:
        """Begin.

        Args:
            names: group name of torch's -> name in reports, see `group_names`.
            stage_ranks: ranks of the pipeline group: messages between them are of ``pp``, whatever group carries them
                (Megatron uses the world's for one direction where there are two stages).
        """
        self.names = dict(names)
        self.stage_ranks = frozenset(stage_ranks)
        self.phase = ""
        self.counts: dict[str, Counter[Message]] = {}

    def note(self, func: Any, args: Any) -> None:
        """Count a ``c10d`` operation as the dispatcher sees it."""
        group = next(
            found for arg in args if isinstance(arg, torch.ScriptObject) and (found := _group(arg)) is not None
        )
        size = group.size()
        if size == 1:
            return
        operation = func.__name__.split(".")[0]
        kind, name = _NAMES[operation], self.names.get(group.group_name, "world")
        peer = -1
        if kind in ("send", "recv"):
            peer = dist.get_global_rank(group, args[2])
            size, name = 2, "pp" if peer in self.stage_ranks else name
        counted = self.counts.setdefault(self.phase, Counter())
        for tensor in _travelling(operation, kind, args):
            shape = () if kind == "barrier" else tuple(int(n) for n in tensor.shape)
            if operation in ("allgather_", "reduce_scatter_", "gather_"):
                shape = (size * shape[0], *shape[1:]) if shape else (size,)
            counted[Message(kind, name, size, _dtype(tensor), shape, tensor.element_size(), peer)] += 1


class Recorder(TorchDispatchMode):
    """Counts the messages of a real run while it is active."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the operation happen, and count it where it communicates."""
        if func.namespace == "c10d":
            self.traffic.note(func, args)
        return func(*args, **(kwargs or {}))


def group_names(groups: Any) -> dict[str, str]:
    """Torch's names of a model's process groups -> ``tp``, ``pp``, ``dp``, ...

    Without context parallelism Megatron's ``dp_cp`` holds the same ranks as ``dp``, and is named so.
    """
    found: dict[str, str] = {}
    alone = groups.cp.size() == 1
    for attribute in ("tp", "pp", "dp", "cp", "dp_cp", "tp_cp", "mp", "embd", "tp_dp_cp", "ep"):
        group = getattr(groups, attribute, None)
        if group is not None:
            name = attribute.removesuffix("_cp") if alone and attribute != "tp_dp_cp" else attribute
            found.setdefault(group.group_name, name)
    return found


def _group(value: Any) -> dist.ProcessGroup | None:
    try:
        return dist.ProcessGroup.unbox(value)
    except (RuntimeError, TypeError):
        return None


def _travelling(operation: str, kind: str, args: Any) -> list[torch.Tensor]:
    """The tensors that travel, one a message: of what is put together or divided, the whole."""
    if operation in ("allgather_", "reduce_scatter_", "gather_"):
        # One part of equal ones; the whole is as many times as large as the group.
        return [tree_leaves(args[0] if operation == "reduce_scatter_" else args[1])[0]]
    if kind == "reduce_scatter":
        return tree_leaves(args[1])
    return tree_leaves(args[0])


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
