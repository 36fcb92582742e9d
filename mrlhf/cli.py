"""The command line: parse, build, call. Whatever needs torch is imported inside the commands."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from enum import StrEnum
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from typer.core import TyperCommand

from mrlhf import __version__, cli_dryrun, cli_plan
from mrlhf.cli_options import ConfigArgument, Overrides, read_config
from mrlhf.config import PPOConfig, check_files, option_table, to_yaml
from mrlhf.config_inference import EvalConfig, GenerateConfig
from mrlhf.config_preferences import DPOConfig, RewardTrainingConfig
from mrlhf.config_sections import RunConfig
from mrlhf.config_supervised import SFTConfig
from mrlhf.errors import MrlhfError
from mrlhf.parallel.launch import run_guarded
from mrlhf.parallel.launch_env import detect_launch, explained

app = typer.Typer(
    name="mrlhf",
    help="RLHF for language models on Megatron-Core. Every command also runs under torchrun, srun and mpirun.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


convert_app = typer.Typer(help="Convert weights from and to Hugging Face folders.", no_args_is_help=True)
app.add_typer(convert_app, name="convert")
tokenizer_app = typer.Typer(help="Make tokenizers.", no_args_is_help=True)
app.add_typer(tokenizer_app, name="tokenizer")


C = TypeVar("C", bound=RunConfig)
P = ParamSpec("P")


class SemanticsChoice(StrEnum):
    """The two conventions of a recording."""

    STANDARD = "standard"
    DEEPSPEED_CHAT = "deepspeed_chat"


class DtypeChoice(StrEnum):
    """Number formats of converted weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class HeadChoice(StrEnum):
    """What stands on top of a converted model."""

    LM = "lm"
    VALUE = "value"


class RoleChoice(StrEnum):
    """Models of a checkpoint."""

    ACTOR = "actor"
    CRITIC = "critic"
    EMA = "ema"
    MODEL = "model"


class TokenizerModelChoice(StrEnum):
    """Kinds of SentencePiece models."""

    BPE = "bpe"
    UNIGRAM = "unigram"


class ConfigCommand(TyperCommand):
    """A command whose help ends with every key of its configuration."""

    schema: type[RunConfig] = PPOConfig

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the usual help, then the keys with type, default and description."""
        super().format_help(ctx, formatter)
        # The rich help prints by itself and leaves the formatter empty, whose text comes after it.
        formatter.write(
            "\nConfiguration keys, for the YAML file or as key=value (paths are relative to where you are):\n\n"
        )
        for option in option_table(self.schema):
            formatter.write(f"  {option.name}: {option.type} = {option.default}\n      {option.description}\n")


def _configured_by(schema: type[RunConfig]) -> type[ConfigCommand]:
    return type(f"{schema.__name__}Command", (ConfigCommand,), {"schema": schema})


def _guarded(command: Callable[P, int | None]) -> Callable[P, None]:
    """Our own errors become one message and status 2; a number that the command returns is the exit status."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        """See `_guarded`."""
        # What Megatron-Core and torch say about their own internals tells the user nothing.
        warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
        try:
            status = run_guarded(partial(command, *args, **kwargs), detect_launch(os.environ))
        except MrlhfError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None
        if status:
            raise typer.Exit(status)

    return run


PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the resolved configuration and exit.")]
Resume = Annotated[
    str | None, typer.Option(metavar="auto|never|PATH", help="As trainer.resume: go on from a checkpoint.")
]
WeightsOnly = Annotated[
    bool, typer.Option("--weights-only", help="With --resume PATH: its weights alone, for a run that begins at 0.")
]
TensorSize = Annotated[int, typer.Option("--tensor-model-parallel-size", "--tp", min=1, help="Tensor ranks.")]
PipelineSize = Annotated[int, typer.Option("--pipeline-model-parallel-size", "--pp", min=1, help="Pipeline stages.")]
Dtype = Annotated[DtypeChoice | None, typer.Option(help="Number format written; by default that of the source.")]

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing target.")]


def _add_training(name: str, schema: type[RunConfig], module: str, summary: str) -> None:
    """Add the command ``name``, which hands a configuration to ``run`` of ``module``."""

    @app.command(name, cls=_configured_by(schema), help=summary)
    @_guarded
    def train(
        config: ConfigArgument,
        overrides: Overrides = None,
        print_config: PrintConfig = False,
        resume: Resume = None,
        weights_only: WeightsOnly = False,
    ) -> int | None:
        """Called with what the user has given."""
        chosen = [f"trainer.resume={resume}"] if resume else []
        chosen += ["trainer.weights_only=true"] if weights_only else []
        return _run(schema, module, config, [*(overrides or []), *chosen], print_config)


_add_training("ppo", PPOConfig, "mrlhf.trainer.ppo", "Train an actor with PPO.")
_add_training(
    "sft", SFTConfig, "mrlhf.trainer.sft", "Fine-tune a language model on prompts with responses, chats or texts."
)
_add_training("reward", RewardTrainingConfig, "mrlhf.trainer.reward", "Train a reward model on preference pairs.")
_add_training(
    "dpo",
    DPOConfig,
    "mrlhf.trainer.dpo",
    "Train a language model on preference pairs, without a reward model (DPO, IPO, SLiC).",
)


@app.command("eval", cls=_configured_by(EvalConfig))
@_guarded
def evaluate(
    config: ConfigArgument,
    overrides: Overrides = None,
    prompts: Annotated[Path | None, typer.Option(help="Held-out prompts; by default evaluation.prompts.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder to write; by default trainer.output_dir/eval.")] = None,
    print_config: PrintConfig = False,
) -> int | None:
    """Score the actor beside the reference on held-out prompts: mean score, win rate, KL, length, samples."""
    chosen = [f"evaluation.prompts={prompts}"] if prompts else []
    chosen += [f"evaluation.output_dir={output}"] if output else []
    return _run(EvalConfig, "mrlhf.trainer.evaluate", config, [*(overrides or []), *chosen], print_config)


@app.command(cls=_configured_by(GenerateConfig))
@_guarded
def generate(
    config: ConfigArgument,
    overrides: Overrides = None,
    prompts: Annotated[Path | None, typer.Option(help="JSONL file; by default data.prompts.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSONL file to write; by default in trainer.output_dir.")] = None,
    print_config: PrintConfig = False,
) -> None:
    """Sample responses to prompts from the actor of a configuration."""
    chosen = [f"data.prompts={prompts}"] if prompts else []
    loaded = read_config(config, [*(overrides or []), *chosen], GenerateConfig)
    if print_config:
        _print_on_first_rank(to_yaml(loaded))
        return
    check_files(loaded, sections=("actor", "tokenizer", "data"))
    from mrlhf.trainer.generate import run

    target = output or Path(loaded.trainer.output_dir) / "responses.jsonl"
    run(loaded, prompts=Path(loaded.data.prompts), output=target)


app.command("plan", cls=_configured_by(PPOConfig))(_guarded(cli_plan.plan))
app.command("dryrun", cls=_configured_by(PPOConfig))(_guarded(cli_dryrun.dryrun))


@app.command()
@_guarded
def parity(
    folder: Annotated[Path, typer.Argument(help="Recording: actor/, reward/ and expected.json.")],
    overrides: Overrides = None,
    semantics: Annotated[
        SemanticsChoice | None, typer.Option(help="By default from expected.json or the folder's name.")
    ] = None,
) -> int:
    """Replay a recorded PPO trajectory under a parallel layout and compare every number."""
    from mrlhf.trainer.parity import run

    return int(run(folder, list(overrides or []), semantics.value if semantics else None))


@convert_app.command("import")
@_guarded
def convert_import(
    source: Annotated[Path, typer.Argument(help="Hugging Face folder.")],
    target: Annotated[Path, typer.Argument(help="Megatron weights folder to write.")],
    tp: TensorSize = 1,
    pp: PipelineSize = 1,
    dtype: Dtype = None,
    overwrite: Overwrite = False,
    head: Annotated[
        HeadChoice | None, typer.Option(help="By default what the source has; value on a language model is fresh.")
    ] = None,
) -> None:
    """Turn a Hugging Face folder into a Megatron weights folder."""
    from mrlhf.checkpoint.convert import DTYPES, import_hf

    import_hf(
        source,
        target,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        head=head.value if head else None,
        dtype=DTYPES[dtype.value] if dtype else None,
        overwrite=overwrite,
    )


@convert_app.command("export")
@_guarded
def convert_export(
    source: Annotated[
        Path, typer.Argument(help="Megatron weights folder, a checkpoint, or a run's output folder (the newest one).")
    ],
    target: Annotated[Path, typer.Argument(help="Hugging Face folder to write.")],
    tp: TensorSize = 1,
    pp: PipelineSize = 1,
    dtype: Dtype = None,
    overwrite: Overwrite = False,
    role: Annotated[
        RoleChoice | None, typer.Option(help="Model of a checkpoint; not needed where it holds only one.")
    ] = None,
) -> None:
    """Turn a Megatron weights folder, or a model of a run's checkpoint, into a Hugging Face folder."""
    from mrlhf.checkpoint.convert import DTYPES, export_megatron
    from mrlhf.checkpoint.convert_state import export_state, is_run_folder

    from_run = role is not None or is_run_folder(source)
    export = partial(export_state, role=role.value if role else None) if from_run else export_megatron
    export(
        source,
        target,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        dtype=DTYPES[dtype.value] if dtype else None,
        overwrite=overwrite,
    )


@tokenizer_app.command("train")
@_guarded
def tokenizer_train(
    corpus: Annotated[list[Path], typer.Argument(help="Text files, or JSONL, Parquet or CSV files (see --key).")],
    vocab_size: Annotated[int, typer.Option(min=1, help="Number of ids, special tokens and bytes included.")],
    output: Annotated[Path, typer.Option(help="Folder to write.")],
    model_type: Annotated[TokenizerModelChoice, typer.Option(help="Kind of model.")] = TokenizerModelChoice.BPE,
    character_coverage: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the corpus whose characters get ids of their own.")
    ] = 0.9995,
    byte_fallback: Annotated[bool, typer.Option(help="Spell other characters as bytes; else they are unknown.")] = True,
    special_token: Annotated[
        list[str] | None, typer.Option(help="Piece that is never split, such as a role marker; may be repeated.")
    ] = None,
    chat_template: Annotated[str | None, typer.Option(help="Jinja template or a file with one.")] = None,
    key: Annotated[str, typer.Option(help="Field of the text or the chat messages.")] = "text",
    overwrite: Overwrite = False,
) -> None:
    """Train a SentencePiece tokenizer on a corpus."""
    from mrlhf.data.tokenizer import load_tokenizer
    from mrlhf.data.tokenizer_training import train_tokenizer

    folder = train_tokenizer(
        corpus,
        output,
        vocab_size=vocab_size,
        model_type=model_type.value,
        character_coverage=character_coverage,
        byte_fallback=byte_fallback,
        special_tokens=special_token or (),
        chat_template=chat_template,
        key=key,
        overwrite=overwrite,
    )
    typer.echo(f"{folder}: {load_tokenizer(folder).vocab_size} ids")


def main() -> None:
    """Entry point of ``mrlhf`` and ``python -m mrlhf``."""
    app()


def _run(schema: type[C], module: str, config: str, overrides: list[str] | None, print_config: bool) -> int | None:
    """Read the configuration and call ``module.run`` with it; ``module`` is imported only once the files are there."""
    loaded = read_config(config, overrides, schema)
    if print_config:
        _print_on_first_rank(to_yaml(loaded))
        return None
    # Whoever has forgotten an option of the launcher reads it with the first thing that is wrong.
    with explained(detect_launch(os.environ), loaded.smallest_world):
        check_files(loaded)
    status: int | None = importlib.import_module(module).run(loaded)
    return status


def _print_on_first_rank(text: str) -> None:
    if detect_launch(os.environ).rank == 0:
        typer.echo(text, nl=False)
