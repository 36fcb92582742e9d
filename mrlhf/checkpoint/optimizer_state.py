"""Adam's state in the shape of the parameters, whoever keeps it: a plain optimizer, or one divided over DP ranks.

Megatron's own state dicts have other names in each of its optimizers, and reloading its distributed optimizer with
torch's Adam needs repairs (``DistributedOptimizer.load_state_dict`` gives all parameters one shared step counter, and
``_set_main_param_and_optimizer_states`` looks for it among the tensors). One form of our own, in the shapes of the
model, needs neither, and is the same with the distributed optimizer on and off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mrlhf.megatron.optimizer import Trainable
from mrlhf.parallel.collectives import all_gather_objects

MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN = "main"
"""The fp32 copy of a bf16 or fp16 parameter."""

Tensors = dict[int, dict[str, torch.Tensor]]
"""``id(parameter)`` -> kind -> fp32 tensor of the parameter's shape."""


def kinds(trainable: Trainable) -> tuple[str, ...]:
    """What is kept of each parameter: both moments, and the fp32 copy where the model itself is not fp32."""
    reduced = trainable.config.bf16 or trainable.config.fp16
    return (*MOMENTS, MAIN) if reduced else MOMENTS


def gather_tensors(trainable: Trainable) -> Tensors:
    """The state of every parameter on this rank; all ranks of the model call this together.

    A plain optimizer's own tensors are returned. A distributed optimizer's are put together on the first
    data-parallel rank, in memory of the CPU; the other ranks get nothing.
    """
    found: Tensors = {}
    for optimizer in _optimizers(trainable):
        if isinstance(optimizer, DistributedOptimizer):
            found.update(_gather(optimizer, kinds(trainable)))
        else:
            found.update(_plain(optimizer, kinds(trainable)))
    return found


def empty_tensors(trainable: Trainable) -> Tensors:
    """Where a load may put the state of every parameter on this rank; `set_tensors` takes it from there."""
    found: Tensors = {}
    for optimizer in _optimizers(trainable):
        if isinstance(optimizer, DistributedOptimizer):
            for parameter in _parameters(optimizer):
                found[id(parameter)] = {kind: torch.zeros(parameter.shape) for kind in kinds(trainable)}
        else:
            found.update(_plain(optimizer, kinds(trainable)))
    return found


@torch.no_grad()
def set_tensors(trainable: Trainable, tensors: Tensors) -> None:
    """Go on from ``tensors``, of which a distributed optimizer takes this rank's part."""
    for optimizer in _optimizers(trainable):
        if isinstance(optimizer, DistributedOptimizer):
            for parameter, part, state in _shards(optimizer, kinds(trainable)):
                for kind, tensor in state.items():
                    tensor.copy_(tensors[id(parameter)][kind].reshape(-1)[part])
        else:
            for key, state in _plain(optimizer, kinds(trainable)).items():
                for kind, tensor in state.items():
                    if tensor is not tensors[key][kind]:
                        tensor.copy_(tensors[key][kind])


def counters(trainable: Trainable) -> dict[str, Any]:
    """The plain numbers: Adam's step, the place in the schedule, the loss scale; all ranks of the model call this."""
    step = max((_step(optimizer.optimizer) for optimizer in _optimizers(trainable)), default=0)
    found: dict[str, Any] = {
        "step": max(all_gather_objects(step, trainable.groups.intra_dist_opt)),
        "schedule": int(trainable.schedule.num_steps),
    }
    for optimizer in _optimizers(trainable):
        if getattr(optimizer, "grad_scaler", None) is not None:
            saved = optimizer.grad_scaler.state_dict()
            found["scaler"] = {name: float(value) if name == "scale" else int(value) for name, value in saved.items()}
    return found


def set_counters(trainable: Trainable, saved: dict[str, Any]) -> None:
    """Go on from `counters`; the course of the learning rate is the configuration's."""
    for optimizer in _optimizers(trainable):
        _set_step(optimizer.optimizer, saved["step"])
        if getattr(optimizer, "grad_scaler", None) is not None and "scaler" in saved:
            scale = torch.tensor([saved["scaler"]["scale"]], dtype=torch.float32)
            optimizer.grad_scaler.load_state_dict({**saved["scaler"], "scale": scale})
    trainable.schedule.num_steps = saved["schedule"]
    trainable.schedule.step(increment=0)


def _optimizers(trainable: Trainable) -> Iterator[Any]:
    """Those of the chain that have parameters."""
    for optimizer in trainable.optimizer.chained_optimizers:
        if not getattr(optimizer, "is_stub_optimizer", False):
            _fill(optimizer.optimizer)
            yield optimizer


def _fill(inner: Any) -> None:
    """Give every parameter the state that Adam would make at its first step."""
    for group in inner.param_groups:
        for parameter in group["params"]:
            state = inner.state[parameter]
            if state or not parameter.numel():
                continue
            for kind in MOMENTS:
                state[kind] = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.preserve_format)
            if _counts_by_parameter(inner):
                state["step"] = torch.tensor(0.0)


def _counts_by_parameter(inner: Any) -> bool:
    """torch's Adam counts steps in each parameter's state, Transformer Engine's and Apex's in the group."""
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def _step(inner: Any) -> int:
    if _counts_by_parameter(inner):
        return max((int(state["step"]) for state in inner.state.values() if "step" in state), default=0)
    return max((int(group.get("step", 0)) for group in inner.param_groups), default=0)


def _set_step(inner: Any, step: int) -> None:
    if _counts_by_parameter(inner):
        for state in inner.state.values():
            # Each its own: torch counts in place.
            state["step"] = torch.tensor(float(step))
    else:
        for group in inner.param_groups:
            group["step"] = step


def _plain(optimizer: Any, wanted: tuple[str, ...]) -> Tensors:
    """The optimizer's own tensors; ``param_groups`` holds fp32 copies where the model is not fp32."""
    pairs: list[tuple[Any, Any]] = []
    if MAIN in wanted:
        for models, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            pairs += zip(models, mains, strict=True)
        pairs += [(parameter, parameter) for group in optimizer.fp32_from_fp32_groups for parameter in group]
    else:
        pairs = [(p, p) for group in optimizer.optimizer.param_groups for p in group["params"]]
    found: Tensors = {}
    for parameter, main in pairs:
        state = optimizer.optimizer.state[main]
        found[id(parameter)] = {kind: state[kind] for kind in MOMENTS}
        if main is not parameter:
            found[id(parameter)][MAIN] = main.detach()
    return found


def _parameters(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    for buffer in optimizer.buffers:
        yield from buffer.param_index_map


def _shards(
    optimizer: Any, wanted: tuple[str, ...]
) -> Iterator[tuple[torch.nn.Parameter, slice, dict[str, torch.Tensor]]]:
    """Each parameter that has a part on this rank, which part of its elements that is, and the state of the part."""
    for parameter, (group, order) in optimizer.model_param_group_index_map.items():
        main = optimizer.optimizer.param_groups[group]["params"][order]
        state = {kind: optimizer.optimizer.state[main][kind] for kind in MOMENTS}
        if MAIN in wanted:
            state[MAIN] = main.detach()
        part = optimizer._get_model_param_range_map(parameter)["param"]
        yield parameter, slice(part.start, part.end), state


def _gather(optimizer: Any, wanted: tuple[str, ...]) -> Tensors:
    """Put the parts of all data-parallel ranks together on the first of them, a bucket at a time."""
    group = optimizer.data_parallel_group
    states = {id(parameter): state for parameter, _, state in _shards(optimizer, wanted)}
    found: Tensors = {}
    for number, ranges in enumerate(optimizer.gbuf_ranges):
        buffer = optimizer.buffers[number]
        for dtype_ranges in ranges.values():
            for bucket, bucket_ranges in zip(buffer.buckets, dtype_ranges, strict=True):
                numel = bucket.grad_data.numel() // group.size()
                for kind in wanted:
                    shard = torch.zeros(numel, device=bucket.grad_data.device)
                    for parameter, places in bucket_ranges["param_map"].items():
                        local = places["gbuf_local"]
                        shard[local.start : local.end] = states[id(parameter)][kind].reshape(-1)
                    whole = _concatenate(shard, group)
                    if whole is None:
                        continue
                    for parameter in bucket.params:
                        start, end, *_ = buffer.param_index_map[parameter]
                        piece = whole[start - bucket.offset : end - bucket.offset].reshape(parameter.shape)
                        found.setdefault(id(parameter), {})[kind] = piece
    return found


def _concatenate(shard: torch.Tensor, group: Any) -> torch.Tensor | None:
    """Equal shards in rank order, in memory of the CPU, on the first rank of the group; None on the others."""
    if group.size() == 1:
        # A buffer to receive it in would be one more fp32 copy of the model on the GPU.
        return shard.cpu()
    first = group.rank() == 0
    parts = [torch.empty_like(shard) for _ in range(group.size())] if first else None
    dist.gather(shard, parts, dst=dist.get_global_rank(group, 0), group=group)
    return torch.cat([part.cpu() for part in parts]) if parts is not None else None
