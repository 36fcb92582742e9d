"""A Transformer Engine that imports on a machine without CUDA: Megatron would take its kernels, which cannot run."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mrlhf.megatron import spec
from tests import sft_run

# Any submodule is there and holds any class and any function; whatever is called fails, as it would without a GPU.
PACKAGE = """
import importlib, importlib.abc, importlib.machinery, sys

PARTS = ("pytorch", "common", "recipe", "module", "attention", "distributed", "float8_tensor", "tensor", "fp8", "ops")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("transformer_engine."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = lambda name: member(module.__name__, name)


def member(module, name):
    if name.startswith("__"):
        raise AttributeError(name)
    if name in PARTS:
        return importlib.import_module(f"{module}.{name}")

    def refuse(*args, **kwargs):
        raise RuntimeError(f"{module}.{name} needs a GPU")

    body = {"__init__": refuse, "apply": staticmethod(refuse)}
    return type(name, (), body) if name.lstrip("_")[0].isupper() else refuse


sys.meta_path.append(Finder())
__version__ = "2.4.0"


def __getattr__(name):
    return member(__name__, name)
"""

SCRIPT = """
import math, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from mrlhf.megatron import device
device.import_megatron()
from megatron.core import fp8_utils, optimizer
from megatron.core.transformer import transformer_block
assert fp8_utils.HAVE_TE and transformer_block.HAVE_TE, "Megatron did not take it"
assert optimizer.Adam.__module__ != "torch.optim.adamw", optimizer.Adam
from mrlhf.megatron import spec
from mrlhf.trainer.precision import kernel_lines
from tests import sft_run
assert spec.has_transformer_engine() and spec.transformer_engine_version() == (2, 4)
inputs = Path(sys.argv[2])
for name, overrides in (("plain", ()), ("fp8", ("precision.fp8=hybrid", "precision.fp8_emulation=true"))):
    more = ("precision.dtype=bf16", "trainer.iterations=2", "checkpoint.interval=2", *overrides)
    config = sft_run.make_config(inputs, inputs / name, *more)
    trainer = sft_run.train(config)
    rows = [line for line in (inputs / name / "metrics.jsonl").read_text().splitlines()]
    print(kernel_lines(config, ["model"], trained=["model"])[0])
    print(len(rows), type(trainer.model.trainable.optimizer).__name__)
try:
    sft_run.train(sft_run.make_config(inputs, inputs / "real", "precision.dtype=bf16", "precision.fp8=hybrid"))
except Exception as error:
    print(type(error).__name__, str(error).splitlines()[-1])
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_training_goes_on_with_local_parts(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    (tmp_path / "packages" / "transformer_engine_torch.py").write_text("")
    inputs = sft_run.make_inputs(tmp_path / "sft")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "packages"), str(inputs)],
        capture_output=True, text=True, check=False, timeout=300, cwd=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    # What 16-bit products are computed in is a matter of the processor.
    lines = [line.replace(", bf16 products: in fp32", "") for line in done.stdout.splitlines() if line.strip()]
    local = "layers: local, attention: sdpa, norm: torch, optimizer: torch Adam, fp8: "
    assert [line for line in lines if line.startswith("layers")] == [
        local + "off",
        local + "hybrid, tensorwise, emulated (model)",
    ]
    assert [line.split()[0] for line in lines if "Optimizer" in line] == ["2", "2"]
    assert "there is no CUDA here; set precision.fp8_emulation=true" in lines[-1]


def test_the_apex_of_pypi_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert spec.wrong_apex() is None or "not NVIDIA's" in str(spec.wrong_apex())
    (tmp_path / "apex").mkdir()
    # As it is without pyramid, of which it is a toolkit.
    (tmp_path / "apex" / "__init__.py").write_text("from pyramid_that_is_not_there.session import Factory\n")
    info = tmp_path / "apex-0.9.10.dev0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10.dev0\nSummary: Pyramid toolkit for sessions and forms\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for loaded in [m for m in sys.modules if m.split(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, loaded)
    message = spec.wrong_apex()
    assert message is not None
    assert message.startswith(
        "the installed package apex 0.9.10.dev0 (Pyramid toolkit for sessions and forms) is not NVIDIA's Apex"
    )
    assert "pip uninstall apex" in message
    (tmp_path / "apex" / "__init__.py").write_text("")
    (tmp_path / "apex" / "normalization.py").write_text("")
    sys.modules.pop("apex", None)
    importlib.invalidate_caches()
    assert spec.wrong_apex() is None, "NVIDIA's has its norms"
    sys.modules.pop("apex", None)
