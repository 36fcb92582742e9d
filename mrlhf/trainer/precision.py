"""Which models of a run are in FP8, whether this machine can do it, and what is said about kernels at the start."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from mrlhf.checkpoint.convert import DTYPES
from mrlhf.config_schema import PPOConfig
from mrlhf.config_sections import PrecisionConfig, RunConfig
from mrlhf.errors import ConfigError
from mrlhf.megatron import device
from mrlhf.megatron.cpu_products import widens
from mrlhf.megatron.fp8 import NORMS_AGAIN, Fp8, environment_problems, model_problems
from mrlhf.megatron.spec import available_parts, transformer_engine_version, wrong_apex
from mrlhf.model_config import ModelConfig
from mrlhf.parallel import products
from mrlhf.parallel.launch import LaunchEnv
from mrlhf.planning.from_config import fp8_role
from mrlhf.trainer.compiling import compile_problems


def fp8_of(precision: PrecisionConfig) -> Fp8 | None:
    """The ``precision`` section's FP8, for the models that it is for."""
    if precision.fp8 is None:
        return None
    return Fp8(
        format=precision.fp8,
        recipe=precision.fp8_recipe,
        margin=precision.fp8_margin,
        amax_history_len=precision.fp8_amax_history_len,
        amax_compute_algo=precision.fp8_amax_compute_algo,
        first_last_layers_bf16=precision.fp8_first_last_layers_bf16,
        emulated=precision.fp8_emulation,
    )


def fp8_for(config: RunConfig, role: str, *, trained: bool) -> Fp8 | None:
    """The FP8 of a model's linear layers, None where it has none."""
    precision: PrecisionConfig = config.precision
    return fp8_of(precision) if precision.fp8_in(fp8_role(config, role), trained=trained) else None


def cache_element_bytes(config: PPOConfig, models: Mapping[str, ModelConfig], *, trained: Collection[str]) -> int:
    """Bytes of a key or a value in generation on this machine, of the widest model that generates.

    Where products of 16 bits are taken in fp32, stages keep them in fp32, unless they run through Megatron's own
    modules (see `mrlhf.megatron.lean`): under sequence parallelism, with FP8, with fewer key-value heads than TP.

    Args:
        config: of the run.
        models: architectures by role.
        trained: roles whose weights are updated; none in runs without training.

    Raises:
        ConfigError: ``MRLHF_CPU_PRODUCTS`` is set to something else.
    """
    dtype = DTYPES[config.precision.dtype]
    # Training generates with the reference in its evaluations alone.
    names = ("actor", "reference") if config.trainer.eval_interval or not trained else ("actor",)
    there = [role for role in names if role in models]
    wide = widens(dtype) and any(_is_lean(config, role, models[role], trained=role in trained) for role in there)
    return 4 if wide else dtype.itemsize


def _is_lean(config: PPOConfig, role: str, model: ModelConfig, *, trained: bool) -> bool:
    layout = config.parallel_of(role)
    tensor = layout.tensor_model_parallel_size
    plain = model.num_query_groups >= tensor and not (layout.sequence_parallel and tensor > 1)
    return plain and fp8_for(config, role, trained=trained) is None


def precision_problems(
    config: RunConfig,
    models: Mapping[str, ModelConfig],
    env: LaunchEnv,
    *,
    trained: Collection[str],
    masked: bool = False,
) -> list[str]:
    """What about ``precision`` this machine, these models or this layout cannot do; nothing is started for it.

    Args:
        config: of the run.
        models: architectures by role.
        env: the launch.
        trained: roles whose weights are updated; none in runs without training.
        masked: whether the trained model gets attention masks.
    """
    precision = config.precision
    problems = products.problems() + compile_problems(config, models, trained=trained, masked=masked)
    if precision.kernels == "te":
        try:
            available_parts(DTYPES[precision.dtype], kernels="te", masked=masked)
        except ConfigError as error:
            problems.append(str(error))
    fp8 = fp8_of(precision)
    if fp8 is None:
        return problems
    if precision.fp8_roles is not None:
        problems += _role_problems(config, models, precision.fp8_roles, trained)
    engine = transformer_engine_version()
    problems += environment_problems(
        fp8, cuda=device.has_cuda(), transformer_engine=engine, capability=_capability(env)
    )
    if trained and engine is not None and engine < NORMS_AGAIN:
        problems += _norm_problems(config, engine)
    if masked and not fp8.emulated:
        problems.append(
            "precision.fp8: a reward model trained with reward.loss=deepspeed_chat gets attention masks and has no "
            "Transformer Engine layers; use reward.loss=bradley_terry, or precision.fp8_emulation=true"
        )
    for role, model in models.items():
        if fp8_for(config, role, trained=role in trained):
            problems += model_problems(fp8, role, model, config.sizes_of(role, env.world_size))
    return problems


def _norm_problems(config: RunConfig, engine: tuple[int, int]) -> list[str]:
    needed, installed = (".".join(map(str, version)) for version in (NORMS_AGAIN, engine))
    return [
        f"layernorm of {', '.join(roles)} is computed again in FP8 with Transformer Engine {needed} or newer only, and "
        f"{installed} is installed; set {keys}, or update it"
        for keys, roles in config.norms_again_in_fp8().items()
    ]


def _role_problems(
    config: RunConfig, models: Mapping[str, ModelConfig], wanted: Collection[str], trained: Collection[str]
) -> list[str]:
    present = {fp8_role(config, role) for role in models}
    if not present & set(wanted):
        return [
            f"precision.fp8_roles {', '.join(wanted)} names none of this run's models ({', '.join(sorted(present))}); "
            "leave it out, or name one"
        ]
    frozen = present & set(wanted) - {fp8_role(config, role) for role in trained}
    if trained and frozen and config.precision.fp8_recipe == "delayed":
        return [
            f"precision.fp8_roles names {', '.join(sorted(frozen))}, and fp8_recipe delayed takes scales from training "
            "passes, of which a frozen model has none; use fp8_recipe=tensorwise, or name trained models only"
        ]
    return []


def _capability(env: LaunchEnv) -> tuple[int, int] | None:
    if not device.has_cuda() or env.local_rank >= torch.cuda.device_count():
        return None
    return torch.cuda.get_device_capability(env.local_rank)


def kernel_lines(
    config: RunConfig, models: Collection[str], *, trained: Collection[str], masked: bool = False
) -> list[str]:
    """What is printed at the start: which parts are used and which models are in FP8; a wrong Apex.

    Args:
        config: of the run.
        models: its roles.
        trained: those whose weights are updated.
        masked: see `precision_problems`.
    """
    precision = config.precision
    parts = available_parts(DTYPES[precision.dtype], masked=masked, kernels=precision.kernels)
    inside: dict[str, Any] = {role: fp8_for(config, role, trained=role in trained) for role in models}
    names = [role for role, fp8 in inside.items() if fp8 is not None]
    fp8 = fp8_of(precision)
    shown = f"{fp8.describe()} ({', '.join(names)})" if fp8 is not None and names else "off"
    wrong = wrong_apex()
    widened = f", {precision.dtype} products: in fp32" if widens(DTYPES[precision.dtype]) else ""
    return [f"{parts.describe()}{widened}, fp8: {shown}", *([f"warning: {wrong}"] if wrong else [])]
