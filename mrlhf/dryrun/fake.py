"""Tensors without content: weights, activations and optimizer states are fake, the rows of the batch are real.

Every new floating-point tensor, and what follows from one, is one of torch's fake tensors (shape, dtype, no memory).
Whole numbers and conditions decide shapes on the way: lengths, masks, token ids, the sizes of messages. They are small
and stay real, so that the run's own code can read them. `FakeWorld` is a dispatch mode for the time of a walk; nothing
is patched.

Where code asks a fake tensor for a value, the answer is that of a run in which all is well: floating-point numbers are
1 (whole ones 0), every gradient is non-zero, and no other condition holds: nothing is NaN, infinite, tied or left over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from mrlhf.dryrun.traffic import Traffic

aten = torch.ops.aten

_MADE_EMPTY = {aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default, aten.empty_like.default}
_FACTORIES = {
    *_MADE_EMPTY,
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand.default,
    aten.randn.default,
}
_NORMS = {aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dtype}
_INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}


class FakeWorld(TorchDispatchMode):
    """Computes on fake tensors, answers for the other ranks, and watches what lives.

    Attributes:
        traffic: where messages and collectives are noted.
        live: bytes of all fake tensors that exist.
        peak: the most since `reset_peak`.
        hidden_shape: shape of the hidden states that come from other pipeline stages.
        shrinking: whether tensors lose their memory and get it again while they live, which is no operation to watch:
            their sizes are then looked at before each new peak.
    """

    def __init__(self, traffic: Traffic, *, shrinking: bool = False) -> None:
        super().__init__()
        self.shrinking = shrinking
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.traffic = traffic
        self.live = self.peak = 0
        self.hidden_shape: Sequence[int] | None = None
        self._seen: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()

    def reset_peak(self) -> None:
        """Begin a phase."""
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation."""
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._communicate(func, args)
        if not any(isinstance(x, FakeTensor) for x in tree_iter((args, kwargs))):
            return self._without_fakes(func, types, args, kwargs)
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(self, args)
        if func in _INDEXED:
            args = _whole_numbers(args)
        result: Any = self.fake.dispatch(func, types, args, kwargs)
        if func in _NORMS and result.dim() == 0:
            # `torch.tensor` makes one of several such numbers, and reads their memory for it.
            return torch.ones((), dtype=result.dtype)
        if func is aten.ne.Scalar or func is aten.all.default or (func in _KEPT and _is_true(args[0])):
            result._always = True
        self._watch(result)
        return result

    def _without_fakes(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func not in _FACTORIES:
            return func(*args, **kwargs)
        like = args[0].dtype if isinstance(args[0], torch.Tensor) else torch.get_default_dtype()
        if (kwargs.get("dtype") or like).is_floating_point:
            result = self.fake.dispatch(func, types, args, kwargs)
            self._watch(result)
            return result
        result = func(*args, **kwargs)
        # What another rank would fill holds no chance numbers.
        return result.zero_() if func in _MADE_EMPTY else result

    def _communicate(self, func: Any, args: Any) -> Any:
        """Note a collective and answer at once; the other ranks are taken to hold what this one does."""
        self.traffic.note(func, args)
        name = func.__name__.split(".")[0]
        if name == "recv_":
            self._receive(args[0][0])
        elif name == "allgather_":
            for outputs, given in zip(args[0], args[1], strict=True):
                for output in outputs:
                    output.copy_(given)
        work = FakeWork().boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)

    def _receive(self, tensor: torch.Tensor) -> None:
        # Megatron sends a shape ahead of every tensor.
        if tensor.dtype is torch.int64 and tensor.numel() == 3 and not isinstance(tensor, FakeTensor):
            assert self.hidden_shape is not None, "a pipeline stage received a shape outside a pass"
            tensor.copy_(torch.tensor(self.hidden_shape))

    def _watch(self, result: Any) -> None:
        for tensor in (result,) if isinstance(result, FakeTensor) else tree_iter(result):
            if not isinstance(tensor, FakeTensor):
                continue
            storage = tensor.untyped_storage()
            if storage not in self._seen:
                # One number in two places: what is freed is what was last counted.
                size = [storage.nbytes()]
                self._seen[storage] = size
                weakref.finalize(storage, self._free, size)
                self.live += size[0]
                if self.shrinking and self.live > self.peak:
                    self._look_again()
                self.peak = max(self.peak, self.live)

    def _look_again(self) -> None:
        for storage, size in self._seen.items():
            now = storage.nbytes()
            if now != size[0]:
                self.live += now - size[0]
                size[0] = now

    def _free(self, size: list[int]) -> None:
        self.live -= size[0]

    def _scalar(self, args: Any) -> Any:
        tensor = args[0]
        if tensor.dtype is torch.bool:
            return _is_true(tensor)
        return 1.0 if tensor.dtype.is_floating_point else 0

    def _nonzero(self, args: Any) -> Any:
        tensor = args[0]
        if not _is_true(tensor):
            return torch.empty((0, tensor.dim()), dtype=torch.int64)
        return torch.ones(tensor.shape, dtype=torch.bool).nonzero()


def _is_true(tensor: Any) -> bool:
    return getattr(tensor, "_always", False)


def _whole_numbers(args: Any) -> Any:
    """Places in place of a real mask: fake tensors cannot be cut by a mask, whose count only its content tells."""
    found: list[Any] = []
    for index in args[1]:
        if index is not None and index.dtype is torch.bool and not isinstance(index, FakeTensor):
            found.extend(index.nonzero(as_tuple=True))
        else:
            found.append(index)
    return (args[0], found, *args[2:])


_ANSWERS: dict[Any, Callable[[FakeWorld, Any], Any]] = {
    aten._local_scalar_dense.default: FakeWorld._scalar,
    aten.nonzero.default: FakeWorld._nonzero,
    aten.equal.default: lambda *_: True,
}
_KEPT = {aten.bitwise_or.Tensor, aten.logical_or.default, aten.detach.default}
