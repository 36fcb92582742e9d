"""Where ``precision.compile`` is possible."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mrlhf.checkpoint.convert import DTYPES
from mrlhf.config_sections import RunConfig
from mrlhf.megatron.compiled import compiler_problem
from mrlhf.megatron.cpu_products import widens
from mrlhf.megatron.spec import available_parts
from mrlhf.model_config import ModelConfig
from mrlhf.planning.from_config import fp8_role


def compile_problems(
    config: RunConfig, models: Mapping[str, ModelConfig], *, trained: Collection[str], masked: bool = False
) -> list[str]:
    """Why ``precision.compile`` cannot be, one line for each reason; none where it is off or nothing is trained.

    Args:
        config: of the run.
        models: architectures by role.
        trained: roles whose weights are updated.
        masked: whether the trained model gets attention masks.
    """
    roles = [role for role in models if role in trained]
    if not config.precision.compile or not roles:
        return []
    reasons = [reason for role in roles for reason in _model_reasons(config, role, models[role])]
    reasons += _run_reasons(config, masked)
    machine = compiler_problem()
    reasons += [machine] if machine else []
    return [f"precision.compile: {reason}, or set precision.compile=false" for reason in dict.fromkeys(reasons)]


def _model_reasons(config: RunConfig, role: str, model: ModelConfig) -> list[str]:
    layout, found = config.parallel_of(role), []
    for key in ("tensor_model_parallel_size", "context_parallel_size"):
        if getattr(layout, key) > 1:
            found.append(f"{role} has {key} {getattr(layout, key)}, and with collectives nothing is compiled; use 1")
    if layout.recompute != "none":
        found.append(f"{role} has recompute={layout.recompute}, which runs layers twice; set recompute=none")
    if model.num_experts is not None:
        found.append(f"{role} is a mixture of experts, whose routing depends on the tokens; use a dense model")
    if config.precision.fp8_in(fp8_role(config, role), trained=True):
        found.append(f"{role} has FP8 layers; set precision.fp8=null")
    section: Any = getattr(config, role, None)
    if getattr(section, "dropout", 0):
        found.append(
            f"{role} has dropout {section.dropout:g}, whose random numbers are kept apart; set {role}.dropout=0"
        )
    return found


def _run_reasons(config: RunConfig, masked: bool) -> list[str]:
    found, dtype = [], DTYPES[config.precision.dtype]
    for name in ("ppo", "train"):
        if getattr(getattr(config, name, None), "packing", False):
            found.append(f"{name}.packing lays rows out anew in every micro-batch; set {name}.packing=false")
    if masked:
        found.append("reward.loss deepspeed_chat has attention masks; use reward.loss=bradley_terry")
    if available_parts(dtype, masked=masked, kernels="auto").layers == "transformer_engine":
        if config.precision.kernels != "local":
            found.append("Transformer Engine's layers are not compiled; set precision.kernels=local")
    elif widens(dtype):
        found.append(f"products of {config.precision.dtype} are taken in fp32 here; use precision.dtype=fp32")
    return found
