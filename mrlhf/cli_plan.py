"""The command ``mrlhf plan``: its options, and the folders it reads."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from mrlhf.cli_options import ConfigArgument, Overrides, read_config, report_console
from mrlhf.config import PPOConfig
from mrlhf.config_preferences import DPOConfig, RewardTrainingConfig
from mrlhf.config_sections import RunConfig
from mrlhf.config_supervised import SFTConfig
from mrlhf.errors import ConfigError, join_problems
from mrlhf.parallel.launch import detect_launch
from mrlhf.planning.fp8 import hardware_problems
from mrlhf.planning.from_config import MeanLengths, head_of, role_paths
from mrlhf.planning.hardware import Efficiency, find_hardware, parse_bytes, with_own_numbers
from mrlhf.planning.mend import mends
from mrlhf.planning.plan import plan as make_plan
from mrlhf.planning.question import Question
from mrlhf.planning.search import search as search_layouts


class KindChoice(StrEnum):
    """Runs that can be planned."""

    PPO = "ppo"
    SFT = "sft"
    REWARD = "reward"
    DPO = "dpo"


SCHEMAS: dict[str, type[RunConfig]] = {
    "ppo": PPOConfig,
    "sft": SFTConfig,
    "reward": RewardTrainingConfig,
    "dpo": DPOConfig,
}


def plan(
    config: ConfigArgument,
    overrides: Overrides = None,
    kind: Annotated[KindChoice, typer.Option(help="The command that the configuration is for.")] = KindChoice.PPO,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs, one a rank; by default one replica's.")] = None,
    hardware: Annotated[str, typer.Option(help="h100, h200, a100 or b200.")] = "h100",
    gpu_memory: Annotated[str | None, typer.Option(help="Such as 80GB (10^9) or 80GiB (2^30).")] = None,
    reserve: Annotated[
        str, typer.Option(help="Of each GPU's memory, for CUDA, NCCL and fragments of the allocator.")
    ] = "2GiB",
    flops: Annotated[str | None, typer.Option(help="Dense peak in precision.dtype, such as 989TFLOPS.")] = None,
    fp8_flops: Annotated[str | None, typer.Option(help="Dense peak in FP8, such as 1979TFLOPS.")] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Of a GPU's memory, such as 3.35TB/s.")] = None,
    link: Annotated[str | None, typer.Option(help="To GPUs of the same machine, one direction: 450GB/s.")] = None,
    network: Annotated[str | None, typer.Option(help="To other machines, one direction, per GPU: 50GB/s.")] = None,
    pcie: Annotated[str | None, typer.Option(help="To the memory of the host, one direction, per GPU: 64GB/s.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="GPUs of one machine.")] = None,
    efficiency: Annotated[float, typer.Option(help="Share of the peak FLOPS that matrix products reach.")] = 0.5,
    prompt_length: Annotated[int | None, typer.Option(help="Mean prompt in tokens, for FLOPs and times.")] = None,
    response_length: Annotated[
        int | None, typer.Option(help="Mean response (or example) in tokens, for FLOPs and times.")
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="Rank TP, PP, DP, SP and micro-batch by time.")] = False,
    top: Annotated[int, typer.Option(min=1, help="With --search: layouts shown.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> int:
    """Say what a run will take before it is started: memory of every rank, FLOPs, traffic, time; needs no weights.

    The exit status is 0 when it fits (with --search: when some layout does), 3 when it does not.
    """
    loaded = read_config(config, overrides, SCHEMAS[kind.value])
    if not 0 < efficiency <= 1:
        raise ConfigError(f"--efficiency: given {efficiency}, expected a share above 0 and at most 1")
    table = with_own_numbers(
        find_hardware(hardware),
        loaded.precision.dtype,
        memory=gpu_memory,
        flops=flops,
        fp8_flops=fp8_flops,
        bandwidth=bandwidth,
        link=link,
        network=network,
        pcie=pcie,
        gpus_per_node=gpus_per_node,
    )
    precision = loaded.precision
    if precision.fp8 is not None and not precision.fp8_emulation:
        formats = [name for name, has in (("fp8", "fp8" in table.flops), ("mxfp8", table.mxfp8)) if has]
        problems = hardware_problems(precision.fp8_recipe, table.name, formats)
        if problems:
            raise ConfigError(join_problems("the GPUs of --hardware cannot run this:", problems))
    held_back = int(parse_bytes(reserve, "--reserve", zero=True))
    if held_back >= table.memory:
        raise ConfigError(f"--reserve {reserve} leaves nothing of {table.memory / 1e9:.2f} GB; lower it")
    question = Question(
        config=loaded,
        models=read_models(loaded),
        world_size=gpus or loaded.smallest_world,
        hardware=table,
        efficiency=Efficiency(flops=efficiency),
        reserve=held_back,
        means=MeanLengths(prompt_length, response_length),
    )
    return _answer(question, search=search, top=top, as_json=as_json)


def read_models(config: RunConfig) -> dict[str, Any]:
    """Architectures by role, from ``config.json`` alone.

    Raises:
        ConfigError: a folder is missing or holds another kind of model than its role needs.
        CheckpointError: a ``config.json`` is missing, malformed or not supported.
    """
    from mrlhf.checkpoint.hf_config import read_head, read_model_config

    paths = role_paths(config)
    missing = {path for path in paths.values() if not (Path(path) / "config.json").is_file() and not _is_megatron(path)}
    if missing:
        problems = [
            f"{role}: {path} has no config.json; planning needs that file alone (see examples/configs/models)"
            for role, path in paths.items()
            if path in missing
        ]
        raise ConfigError(join_problems("the configuration names models that cannot be read:", problems))
    models = {role: read_model_config(path) for role, path in paths.items()}
    for role, path in paths.items():
        head = read_head(path)
        # A critic or a trained reward model may start from a language model; the others are what they are.
        if head == "value" and head_of(config, role) == "lm":
            raise ConfigError(f"{role}: {path} is a sequence classifier; a language model is needed")
        if head == "lm" and role.startswith("reward"):
            raise ConfigError(f"{role}: {path} is a language model; a reward model is a one-label sequence classifier")
    return models


def _is_megatron(path: str) -> bool:
    from mrlhf.checkpoint.hf_config import MEGATRON_FILE

    return (Path(path) / MEGATRON_FILE).is_file()


def _answer(question: Question, *, search: bool, top: int, as_json: bool) -> int:
    found = search_layouts(question, top) if search else None
    # With --search the configuration's own layout may be one that does not work.
    job = question.valid_job() if search else question.job()
    answer: dict[str, Any] = {"search": found}
    if job is not None:
        answer |= make_plan(job, question.hardware, question.efficiency, question.reserve)
        answer["mends"] = [mend.as_dict() for mend in mends(question)]
    if detect_launch(os.environ).rank == 0:
        _show(answer, question, as_json)
    fits = bool(found["layouts"]) if found is not None else answer["memory"]["fits"]
    return 0 if fits else 3


def _show(answer: dict[str, Any], question: Question, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(answer, indent=1))
        return
    from mrlhf.planning.report import print_plan, print_search

    console = report_console()
    if "layout" in answer:
        print_plan(answer, console)
    elif answer["search"]:
        try:
            question.job()
        except ConfigError as error:
            console.print(f"The configuration's own layout does not work: {error}", markup=False)
        print_search(answer["search"], console)
