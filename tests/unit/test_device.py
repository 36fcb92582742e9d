"""`device.install`, in processes of their own: what it changes stays changed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlhf.errors import MrlhfError
from mrlhf.megatron import device
from tests.ranks import _context

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")


def in_new_process(function: Callable[..., Any], *args: Any) -> Any:
    """Run in a process that has Megatron imported and nothing installed."""
    with ProcessPoolExecutor(1, mp_context=_context) as pool:
        return pool.submit(function, *args).result()


@pytest.mark.parametrize("version", ["0.15.0", "0.16.0rc2", "0.20.0", "1.2.3", "dev"])
def test_unknown_versions_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("megatron.core.__version__", version)
    before = torch.Tensor.cuda
    with pytest.raises(MrlhfError) as caught:
        device.install()
    assert str(caught.value) == f"megatron-core {version} is installed; mrlhf works with >=0.16.1,<0.20.0"
    assert torch.Tensor.cuda is before


@pytest.mark.parametrize(
    ("version", "parts"), [("0.16.1", (0, 16, 1)), ("0.19.2", (0, 19, 2)), ("0.17.0+cu12", (0, 17, 0))]
)
def test_known_versions(monkeypatch: pytest.MonkeyPatch, version: str, parts: tuple[int, int, int]) -> None:
    monkeypatch.setattr("megatron.core.__version__", version)
    assert device.megatron_version() == parts


def test_importing_megatron_loads_no_compiler_where_torch_has_no_cuda() -> None:
    code = (
        "import sys, torch; before = torch.compile; import mrlhf.megatron.optimizer, mrlhf.checkpoint.training_state; "
        "print(torch.compile is before, torch.version.cuda is not None, 'torch._inductor.compile_fx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    same, built_for_cuda, compiler_loaded = done.stdout.split()
    assert same == "True"
    assert compiler_loaded == built_for_cuda


def _patched() -> dict[str, Any]:
    found = {}
    for name in device._MODULES:
        found[name] = importlib.import_module(f"megatron.core.{name}").torch
    for module, owner, attribute in device._TYPE_CHECKED:
        holder = importlib.import_module(f"megatron.core.{module}")
        found[f"{module}.{owner}.{attribute}"] = getattr(holder if owner is None else getattr(holder, owner), attribute)
    return found


def _changes_with(cuda: bool) -> tuple[int, int, bool]:
    """Places changed by a first and by a second call, and whether torch itself is as before."""
    device.has_cuda = lambda: cuda
    own = {name: getattr(torch, name) for name in (*device._FACTORIES, "cuda", "get_rng_state", "set_rng_state")}
    own |= {f"cuda.{n}": getattr(torch.cuda, n) for n in ("current_device", "synchronize", "Stream", "manual_seed")}
    tensor_type, tensor_cuda = torch.Tensor.type, torch.Tensor.cuda
    states = [_patched()]
    for _ in range(2):
        device.install()
        states.append(_patched())
    changed = [sum(a[k] is not b[k] for k in a) for a, b in zip(states, states[1:], strict=False)]
    same = all(getattr(torch, name) is value for name, value in own.items() if "." not in name)
    same = same and all(getattr(torch.cuda, n[5:]) is value for n, value in own.items() if "." in n)
    same = same and torch.Tensor.type is tensor_type and (torch.Tensor.cuda is tensor_cuda) == cuda
    return changed[0], changed[1], same


def test_without_cuda_megatrons_modules_are_changed_once_and_torch_is_not() -> None:
    places = len(device._MODULES) + len(device._TYPE_CHECKED)
    first, second, torch_unchanged = in_new_process(_changes_with, False)
    assert first == places
    # The module of the RNG tracker gets a fresh proxy of the same kind each time.
    assert second <= 1
    assert torch_unchanged


def test_with_cuda_nothing_is_changed() -> None:
    assert in_new_process(_changes_with, True) == (0, 0, True)


def _type_names() -> list[str]:
    from megatron.core.optimizer import clip_grads

    device.install()
    seen = []
    tensor = torch.zeros(2)
    original = torch.Tensor.type

    def raises() -> None:
        seen.append(tensor.type())
        seen.append(tensor.half().type())
        seen.append(str(tensor.type(torch.float64).dtype))
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        device._with_cuda_type_names(raises)()
    seen.append(tensor.type())
    assert torch.Tensor.type is original
    # The function that Megatron calls: its assertion on the gradient's type fails without the names.
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 2.0)
    clip_grads.clip_grad_by_total_norm_fp32([parameter], max_norm=1.0, total_norm=4.0)
    assert torch.Tensor.type is original
    seen.append(str(round(float(parameter.grad[0]), 4)))
    return seen


def test_tensor_type_answers_with_cuda_names_only_inside() -> None:
    assert in_new_process(_type_names) == [
        "torch.cuda.FloatTensor", "torch.cuda.HalfTensor", "torch.float64", "torch.FloatTensor", "0.5",
    ]  # fmt: skip


def _factories() -> list[str]:
    device.install()
    utils = importlib.import_module("megatron.core.utils").torch
    made = [
        utils.zeros(2, device="cuda"),
        utils.ones(2, device="cuda:1"),
        utils.full((2,), 1.0, device=utils.cuda.current_device()),
        utils.empty(2, device=0),
        utils.zeros_like(torch.ones(2), device=torch.device("cuda", 0)),
        utils.arange(3, device=None),
        utils.tensor([1.0], device="cuda", pin_memory=True),
        torch.ones(2).cuda(),
    ]
    return [tensor.device.type for tensor in made] + [utils.empty(1, device="meta").device.type]


def test_factories_of_the_proxy_make_cpu_tensors() -> None:
    assert in_new_process(_factories) == ["cpu"] * 8 + ["meta"]
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


def _tracker() -> bool:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    device.install()
    device.seed_rng_tracker(5, 1)
    tracker = get_cuda_rng_tracker()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with tracker.fork():
        inside = torch.rand(2)
    after = torch.rand(2)
    with tracker.fork():
        again = torch.rand(2)
    return torch.equal(after, expected) and not torch.equal(inside, again) and not torch.equal(inside, expected)


def _dropout_streams() -> list[tuple[float, ...]]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    device.install()
    drawn = []
    for tp, pp, dp in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)):
        device.seed_rng_tracker(5, tp, pp_rank=pp, dp_rank=dp)
        with get_cuda_rng_tracker().fork():
            drawn.append(tuple(torch.rand(3).tolist()))
    return drawn


def test_every_rank_has_its_own_dropout_and_the_same_again() -> None:
    drawn = in_new_process(_dropout_streams)
    assert len(set(drawn)) == 4
    assert drawn[0] == drawn[4]


def test_the_rng_tracker_leaves_the_generator_as_it_was() -> None:
    assert in_new_process(_tracker)


KERNELS = """
def refuse(*args, **kwargs):
    raise RuntimeError("a CUDA kernel")
FusedAdam = FusedSGD = multi_tensor_applier = multi_tensor_l2norm = multi_tensor_scale = refuse
"""

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from megatron.core import optimizer
from megatron.core.optimizer import clip_grads, distrib_optimizer
assert not optimizer.USING_PYTORCH_OPTIMIZER and distrib_optimizer.HAVE_APEX_OR_TE, "Megatron did not take it"
assert clip_grads.l2_norm_impl.__name__ == "refuse"
from mrlhf.megatron import device
device.install()
assert optimizer.USING_PYTORCH_OPTIMIZER and optimizer.Adam is torch.optim.AdamW
assert not distrib_optimizer.HAVE_APEX_OR_TE and not distrib_optimizer.USING_APEX_OPTIMIZER
assert distrib_optimizer.Adam is torch.optim.Adam
norm = clip_grads.l2_norm_impl
total, _ = clip_grads.multi_tensor_applier(norm, None, [[torch.tensor([3.0, 4.0])]], False)
parameter = torch.nn.Parameter(torch.ones(2))
parameter.grad = torch.tensor([3.0, 4.0])
optimizer.optimizer.clip_grad_by_total_norm_fp32([parameter], max_norm=1.0, total_norm=float(total))
print(float(total), [round(x, 4) for x in parameter.grad.tolist()])
"""


def test_fused_optimizers_that_import_are_not_used_without_cuda(tmp_path: Path) -> None:
    for name in ("apex/optimizers.py", "apex/multi_tensor_apply.py", "amp_C.py"):
        (tmp_path / "apex").mkdir(exist_ok=True)
        (tmp_path / name).write_text(KERNELS)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[-2] == "5.0 [0.6, 0.8]"
