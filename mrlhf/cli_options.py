"""What several commands take and print alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from mrlhf.config import load_config
from mrlhf.config_sections import RunConfig

if TYPE_CHECKING:
    from rich.console import Console

C = TypeVar("C", bound=RunConfig)

ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file; all keys may also be key=value.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values that replace those of the file.")
]


def read_config(config: str, overrides: list[str] | None, schema: type[C]) -> C:
    """The file with the overrides; where the first argument is itself an override, the overrides alone.

    Raises:
        ConfigError: as `load_config`.
    """
    given = list(overrides or [])
    if "=" in config and not Path(config).exists():
        return load_config(None, [config, *given], schema)
    return load_config(config, given, schema)


def report_console() -> Console:
    """Tables are for reading in full: without a terminal there is no width to keep to."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=180, highlight=False)
