"""The only place that knows CUDA may be missing.

Megatron-Core names CUDA in tensor factories (``device="cuda"``, ``torch.cuda.current_device()``) and in a few
type-string checks. On a machine without CUDA `install` gives a fixed list of its modules a ``torch`` attribute that is
a copy of torch's namespace in which those factories and ``torch.cuda`` mean the CPU. Ordinary tensor operations are
not touched (a global TorchFunctionMode would add about 20% to a small training step). On CUDA `install` changes
one default: recomputed norms without Transformer Engine are not in FP8.
"""

from __future__ import annotations

import functools
import importlib
import random
import re
import types
from collections.abc import Callable
from typing import Any

import torch

from mrlhf.errors import MrlhfError

SUPPORTED = ((0, 16, 1), (0, 20, 0))
"""Half-open range of Megatron-Core versions that this module was written for."""

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like", "ones_like")

_MODULES = (
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.strategies.async_utils",
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.strategies.fully_parallel",
    "dist_checkpointing.strategies.state_dict_saver",
    "distributed.param_and_grad_buffer",
    "distributed.distributed_data_parallel",
    "models.common.embeddings.rotary_pos_embedding",
    "models.common.language_module.language_module",
    "optimizer.clip_grads",
    "optimizer.distrib_optimizer",
    "optimizer.grad_scaler",
    "optimizer.optimizer",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    "rerun_state_machine",
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "tensor_parallel.random",
    "transformer.moe.moe_utils",
    "transformer.moe.router",
    "transformer.moe.token_dispatcher",
    "transformer.utils",
    "utils",
)

_TYPE_CHECKED = (
    ("optimizer.optimizer", "Float16OptimizerWithFloat16Params", "__init__"),
    ("optimizer.distrib_optimizer", "DistributedOptimizer", "__init__"),
    ("optimizer.clip_grads", None, "clip_grad_by_total_norm_fp32"),
    ("optimizer.optimizer", None, "clip_grad_by_total_norm_fp32"),
)

_LOCAL_KERNELS = {
    "optimizer.clip_grads": {
        "multi_tensor_applier": "local_multi_tensor_applier",
        "l2_norm_impl": "local_multi_tensor_l2_norm",
        "multi_tensor_scale_impl": "local_multi_tensor_scale",
    },
    "optimizer.optimizer": {
        "multi_tensor_applier": "local_multi_tensor_applier",
        "multi_tensor_scale_impl": "local_multi_tensor_scale",
    },
}


_OPTIONAL = (
    ("transformer.attention", "SplitAlongDim"),
    ("transformer.moe.moe_utils", "te_general_gemm"),
    ("transformer.transformer_block", "get_cpu_offload_context"),
)
"""What Megatron takes from a Transformer Engine that imports, in local layers too; where it is None it does without."""


def _as_it_is(function: Any = None, **options: Any) -> Any:
    """``torch.compile`` that compiles nothing, called or as a decorator, with options or without."""
    return _as_it_is if function is None else function


def has_cuda() -> bool:
    """Whether this process computes on CUDA."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device of this process: the current CUDA device, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def megatron_version() -> tuple[int, int, int]:
    """The installed Megatron-Core's version.

    Raises:
        MrlhfError: it is outside `SUPPORTED`, so that nobody trains on an interface that was never tried.
    """
    from megatron.core import __version__

    parts = [int(p) for p in re.findall(r"\d+", __version__)[:3]]
    version = (parts + [0, 0, 0])[:3]
    found = (version[0], version[1], version[2])
    if not SUPPORTED[0] <= found < SUPPORTED[1]:
        low, high = (".".join(map(str, v)) for v in SUPPORTED)
        raise MrlhfError(f"megatron-core {__version__} is installed; mrlhf works with >={low},<{high}")
    return found


def import_megatron() -> None:
    """Import Megatron-Core; where torch is built without CUDA, leaving its fused functions as they are written.

    Megatron-Core wraps them with ``torch.compile`` when it is imported, which loads Dynamo and Inductor: a third of the
    start of a process, for functions that eager mode computes as well on a CPU.
    """
    if torch.version.cuda is not None:
        importlib.import_module("megatron.core")
        return
    compiler = torch.compile
    torch.compile = _as_it_is  # type: ignore[assignment]
    try:
        importlib.import_module("megatron.core")
    finally:
        torch.compile = compiler


def install() -> None:
    """Make Megatron-Core usable on this machine; called once by the launcher. Does little where CUDA is present.

    Raises:
        MrlhfError: the installed Megatron-Core is of an unknown version.
    """
    megatron_version()
    _recompute_without_transformer_engine()
    if has_cuda():
        return
    proxy = _cpu_torch()
    for name in _MODULES:
        module = importlib.import_module(f"megatron.core.{name}")
        if getattr(module, "torch", None) is torch:
            module.torch = proxy  # type: ignore[attr-defined]
    _redirect_rng()
    for module_name, class_name, attribute in _TYPE_CHECKED:
        owner: Any = importlib.import_module(f"megatron.core.{module_name}")
        if class_name is not None:
            owner = getattr(owner, class_name)
        function = getattr(owner, attribute)
        if not hasattr(function, "__wrapped__"):
            setattr(owner, attribute, _with_cuda_type_names(function))
    torch.Tensor.cuda = _same_tensor  # type: ignore[method-assign, assignment]
    use_torch_optimizers()
    for module_name, attribute in _OPTIONAL:
        setattr(importlib.import_module(f"megatron.core.{module_name}"), attribute, None)
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = _on_the_cpu_already


def _recompute_without_transformer_engine() -> None:
    """Megatron's recomputation of norms takes FP8 to be wanted always, and asks an engine that may not be there."""
    module: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    make = module.CheckpointWithoutOutput.__init__
    if not module.HAVE_TE and make.__defaults__ == (False,):
        make.__defaults__ = (None,)


def seed_rng_tracker(seed: int, tp_rank: int, *, pp_rank: int = 0, dp_rank: int = 0) -> None:
    """Seed Megatron's RNG states (dropout; sequence parallelism enters them even without dropout).

    Args:
        seed: one number for the run, the same on every rank.
        tp_rank: this rank's place in its tensor group.
        pp_rank: its pipeline stage; every stage has its own dropout.
        dp_rank: its replica; likewise.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    # Mixed, since seeds that are far apart for Megatron's offsets may be neighbours for the user.
    mixed = random.Random(f"{seed} {pp_rank} {dp_rank}").getrandbits(31)
    model_parallel_cuda_manual_seed(mixed, tp_rank=tp_rank, ep_rank=0, etp_rank=0, force_reset_rng=True)


def use_torch_optimizers() -> None:
    """Undo Megatron's choice of fused optimizers: it takes those of a package that imports, whatever the device.

    Called by `install` without CUDA, and where ``precision.kernels`` is ``local``.
    """
    utils = importlib.import_module("megatron.core.utils")
    for name, kernels in _LOCAL_KERNELS.items():
        module = importlib.import_module(f"megatron.core.{name}")
        for attribute, local in kernels.items():
            setattr(module, attribute, getattr(utils, local))
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    optimizer.Adam, optimizer.SGD, optimizer.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, torch.optim.SGD, True
    distributed: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    distributed.Adam, distributed.HAVE_APEX_OR_TE = torch.optim.Adam, False
    distributed.USING_TE_OPTIMIZER = distributed.USING_APEX_OPTIMIZER = False


def _same_tensor(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def _on_the_cpu_already(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Megatron's own only converts what comes from CUDA, and its all-to-all takes sizes as plain numbers."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _to_cpu(value: Any) -> Any:
    if value is None or isinstance(value, int):
        return "cpu" if isinstance(value, int) else None
    return "cpu" if str(value).startswith("cuda") else value


def _factory(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        """Make the tensor on the CPU."""
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return on_cpu


class _NoStream:
    """Stands in for ``torch.cuda.Stream`` and ``Event``: on the CPU every operation is already in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def record_event(self, *_: Any) -> _NoStream:
        """An event that has happened already."""
        return _NoStream()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _copy_namespace(module: types.ModuleType) -> types.ModuleType:
    copy = types.ModuleType(module.__name__)
    copy.__dict__.update(module.__dict__)
    # Attributes that torch makes on first use are not in its __dict__.
    copy.__dict__["__getattr__"] = lambda name: getattr(module, name)
    return copy


def _cpu_torch() -> types.ModuleType:
    cpu: Any = _copy_namespace(torch)
    for name in _FACTORIES:
        setattr(cpu, name, _factory(getattr(torch, name)))
    cuda: Any = _copy_namespace(torch.cuda)
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = cuda.empty_cache = lambda *_, **__: None
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.Stream = cuda.Event = _NoStream
    cuda.stream = cuda.current_stream = cuda.default_stream = _NoStream
    cpu.cuda = cuda
    distributed: Any = _copy_namespace(torch.distributed)
    distributed.all_gather, distributed.reduce_scatter = _uneven_all_gather, _uneven_reduce_scatter
    cpu.distributed = distributed
    return cpu


def _uneven_all_gather(parts: list[torch.Tensor], mine: torch.Tensor, group: Any = None, **kwargs: Any) -> Any:
    """``all_gather`` of lists whose tensors differ in their first size, which gloo cannot; experts' tokens do."""
    rows = [part.size(0) for part in parts]
    if len(set(rows)) < 2:
        return torch.distributed.all_gather(parts, mine, group=group, **kwargs)
    padded = mine.new_zeros(max(rows), *mine.shape[1:])
    padded[: mine.size(0)] = mine
    whole = [torch.empty_like(padded) for _ in rows]
    torch.distributed.all_gather(whole, padded, group=group)
    for part, received in zip(parts, whole, strict=True):
        part.copy_(received[: part.size(0)])
    return None


def _uneven_reduce_scatter(mine: torch.Tensor, parts: list[torch.Tensor], group: Any = None, **kwargs: Any) -> Any:
    """``reduce_scatter`` likewise: the sum of everything, of which each rank keeps its part."""
    if len({part.size(0) for part in parts}) < 2:
        return torch.distributed.reduce_scatter(mine, parts, group=group, **kwargs)
    whole = torch.cat(parts)
    torch.distributed.all_reduce(whole, group=group)
    mine.copy_(whole.split([part.size(0) for part in parts])[torch.distributed.get_rank(group)])
    return None


def _redirect_rng() -> None:
    """Let Megatron's tracker keep the CPU generator's states.

    Its `fork` compares the CPU state before and after, and warns when "GPU" work changed it. Here the two are one
    generator, so that module sees a constant CPU state.
    """
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    constant = torch.zeros(1)
    proxy: Any = _cpu_torch()
    proxy.get_rng_state = lambda: constant
    proxy.set_rng_state = lambda *_: None
    random.torch = proxy


_CUDA_TYPE_NAMES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}


def _with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``function`` while ``Tensor.type()`` answers with the names of CUDA tensors, which it compares with."""
    original = torch.Tensor.type

    def cuda_type(tensor: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        """The type name that the same tensor would have on CUDA."""
        if dtype is not None:
            return original(tensor, dtype, **kwargs)
        name = original(tensor)
        return _CUDA_TYPE_NAMES.get(name, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        """Call the function while tensors name the types that they would have on CUDA."""
        torch.Tensor.type = cuda_type  # type: ignore[method-assign, assignment]
        try:
            return function(*args, **kwargs)
        finally:
            torch.Tensor.type = original  # type: ignore[method-assign]

    return wrapper
