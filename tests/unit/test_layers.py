"""The three import rules of the package, checked on its syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "mrlhf"

# The first entry that a module's path starts with decides; `errors` and the package itself are usable by all.
LAYERS = {
    "errors": 0,
    "folders": 0,
    "lines": 0,
    "config": 0,
    "config_schema": 0,
    "config_algorithm": 0,
    "config_base": 0,
    "config_parallel": 0,
    "config_sections": 0,
    "config_cache": 0,
    "config_inference": 0,
    "config_packing": 0,
    "config_rewards": 0,
    "config_supervised": 0,
    "config_preferences": 0,
    "planner": 0,
    "planner_experts": 0,
    "planning": 0,
    "model_config": 0,
    "types": 1,
    "rl": 1,
    "data": 1,
    "metrics": 1,
    "progress": 1,
    "parallel": 2,
    "megatron": 3,
    "checkpoint": 3,
    "rollout": 4,
    "roles": 4,
    "trainer": 5,
    "dryrun": 5,
    "report": 5,
    "cli": 6,
    "cli_options": 6,
    "cli_plan": 6,
    "cli_dryrun": 6,
    "__main__": 6,
}
MEGATRON = ("megatron", "transformer_engine", "apex")
MAY_USE_MEGATRON = ("megatron", "checkpoint")
NO_CONFIG_OBJECTS = ("rl", "parallel", "rollout")
FIRST_DISTRIBUTED_LAYER = 2


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported; ``from a import b`` gives both ``a`` and ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def part_of(module: str) -> str | None:
    """``mrlhf.rl.losses`` -> ``rl``; None for the package itself and what is not ours."""
    names = module.split(".")
    return names[1] if names[0] == "mrlhf" and len(names) > 1 else None


def violations(source: str, relative: str) -> list[str]:
    """Broken rules of one file, given its text and its path inside the package."""
    own = relative.removesuffix(".py").split("/")[0]
    if own == "__init__":
        return []
    package = ".".join(["mrlhf", *relative.split("/")[:-1]])
    tree = ast.parse(source)
    found = []
    for line, name in imports(tree, package):
        where = f"{relative}:{line}: imports {name}"
        target = part_of(name)
        if target in LAYERS and LAYERS[target] > LAYERS[own]:
            found.append(f"{where}, upwards from layer {LAYERS[own]} to {LAYERS[target]}")
        if (
            target
            in (
                "config",
                "config_schema",
                "config_base",
                "config_parallel",
                "config_sections",
                "config_cache",
                "config_inference",
                "config_packing",
                "config_rewards",
                "config_supervised",
                "config_preferences",
            )
            and own in NO_CONFIG_OBJECTS
        ):
            found.append(f"{where}, but takes plain numbers, tensors and groups only")
        if f"{name}.".startswith("torch.distributed.") and LAYERS[own] < FIRST_DISTRIBUTED_LAYER:
            found.append(f"{where}, below layer {FIRST_DISTRIBUTED_LAYER}")
        if name.split(".")[0] in MEGATRON and own not in MAY_USE_MEGATRON:
            found.append(f"{where}, outside {' and '.join(MAY_USE_MEGATRON)}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed" and LAYERS[own] < 2:
            found.append(f"{relative}:{node.lineno}: uses torch.distributed, below layer {FIRST_DISTRIBUTED_LAYER}")
    return sorted(set(found))


def files() -> list[str]:
    return sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def test_every_module_has_a_layer() -> None:
    parts = {name.removesuffix(".py").split("/")[0] for name in files()} - {"__init__"}
    assert parts <= set(LAYERS), f"give these a layer: {parts - set(LAYERS)}"


@pytest.mark.parametrize("relative", files())
def test_imports_go_down(relative: str) -> None:
    assert violations((PACKAGE / relative).read_text(encoding="utf-8"), relative) == []


@pytest.mark.parametrize(
    ("relative", "source", "rule"),
    [
        ("rl/losses.py", "from mrlhf.parallel import vocab", "upwards from layer 1 to 2"),
        ("rl/losses.py", "def f():\n    from ..trainer.ppo import run", "upwards from layer 1 to 5"),
        ("metrics.py", "import torch.distributed as dist", "below layer 2"),
        ("data/text.py", "from torch import distributed", "below layer 2"),
        ("rl/kl.py", "import torch\ntorch.distributed.barrier()", "uses torch.distributed"),
        ("rollout/engine.py", "from megatron.core import mpu", "outside megatron and checkpoint"),
        ("trainer/ppo.py", "import transformer_engine.pytorch as te", "outside megatron and checkpoint"),
        ("rollout/engine.py", "from mrlhf.config import PPOConfig", "plain numbers"),
        ("config.py", "from mrlhf import metrics", "upwards from layer 0 to 1"),
    ],
)
def test_the_walk_sees_each_violation(relative: str, source: str, rule: str) -> None:
    assert any(rule in found for found in violations(source, relative))


def test_the_walk_lets_good_imports_pass() -> None:
    good = "import torch.distributed as dist\nfrom mrlhf.planner import ParallelSizes\nfrom .vocab import f\n"
    assert violations(good, "parallel/launch.py") == []
    assert violations("from megatron.core import mpu\n", "checkpoint/sharded.py") == []
