"""The command ``mrlhf dryrun``: its options."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from mrlhf.cli_options import ConfigArgument, Overrides, read_config, report_console
from mrlhf.config import PPOConfig
from mrlhf.errors import ConfigError
from mrlhf.parallel.launch_env import detect_launch
from mrlhf.planning.from_config import check_job


def dryrun(
    config: ConfigArgument,
    overrides: Overrides = None,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks of the run, one a GPU.")] = 1,
    rank: Annotated[
        str, typer.Option(metavar="R|R,R|all", help="Ranks to walk; those that are alike are walked once.")
    ] = "0",
    prompt_length: Annotated[int | None, typer.Option(min=1, help="Of every prompt; by default the longest.")] = None,
    response_length: Annotated[
        int | None, typer.Option(min=1, help="Of every response; by default the longest.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> int:
    """Build ranks of a PPO run and walk one iteration, without GPUs, weights or memory.

    The run's own code builds the stages of all models and passes tensors without content through them. Printed are
    parameters, shapes between stages, every collective and message, memory, and what a checkpoint would hold.
    """
    if detect_launch(os.environ).world_size > 1:
        raise ConfigError("mrlhf dryrun is one process, whatever --world-size is; start it without a launcher")
    # The walk is that of the CPU build on every machine; nothing may land on a GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    loaded = read_config(config, overrides, PPOConfig)
    if loaded.on_critic_ranks:
        raise ConfigError(
            "mrlhf dryrun does not know placement: split; mrlhf plan does, and with placement=colocated "
            "critic_ranks=null --world-size N the ranks of one part can be walked as a world of their own"
        )
    from mrlhf.cli_plan import read_models

    models = read_models(loaded)
    check_job(loaded, world_size, models)
    _check_dense(models)
    ranks = parse_ranks(rank, world_size)
    from mrlhf.dryrun.report import as_values, print_report
    from mrlhf.dryrun.run import Lengths, default_lengths, dry_run

    longest = default_lengths(loaded, models)
    lengths = Lengths(prompt_length or longest.prompt, response_length or longest.response)
    _check_lengths(lengths.prompt + lengths.response, models)
    groups = dry_run(loaded, models, world_size, ranks, lengths, told=lambda line: typer.echo(line, err=True))
    answer = as_values(loaded, models, world_size, lengths, groups)
    if as_json:
        typer.echo(json.dumps(answer, indent=1))
    else:
        print_report(answer, groups, report_console())
    wrong = [
        role
        for role, counted in answer.get("models", {}).items()
        if counted["parameters_of_all_ranks"] != counted["parameters_of_the_model"]
    ]
    return 3 if wrong else 0


def parse_ranks(text: str, world_size: int) -> list[int]:
    """``all``, or numbers with commas between.

    Raises:
        ConfigError: anything else, or a rank outside the world.
    """
    if text == "all":
        return list(range(world_size))
    ranks = []
    for word in text.split(","):
        if not word.strip().isdecimal() or int(word) >= world_size:
            raise ConfigError(
                f"--rank {text}: {word.strip()!r} is not a rank of --world-size {world_size}; give numbers from 0 to "
                f"{world_size - 1} with commas between, or all"
            )
        ranks.append(int(word))
    return ranks


def _check_dense(models: dict[str, Any]) -> None:
    found = [role for role, model in models.items() if model.num_experts is not None]
    if found:
        raise ConfigError(
            f"dryrun: {', '.join(found)} is a mixture of experts; which expert gets which token follows from the "
            "weights, which a dry run has not; use `mrlhf plan`, which counts experts as evenly loaded"
        )


def _check_lengths(total: int, models: dict[str, Any]) -> None:
    for role, model in models.items():
        if total > model.max_position_embeddings:
            raise ConfigError(
                f"--prompt-length and --response-length make rows of {total} tokens, over the {role}'s length of "
                f"{model.max_position_embeddings}"
            )
