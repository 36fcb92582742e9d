"""Whether output can be written, found out before any work is done for it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mrlhf.errors import ConfigError


def check_writable(folder: Path, key: str) -> None:
    """Refuse a folder that cannot be made or written.

    Args:
        folder: may not exist yet.
        key: of the configuration or the command line, for the message.

    Raises:
        ConfigError: it is a file, lies under one, or nothing can be written there.
    """
    try:
        parent = next((place for place in (folder, *folder.resolve().parents) if place.exists()), Path("/"))
    except OSError as error:
        raise ConfigError(f"{key}: {folder} cannot be a folder: {error.strerror}; choose another") from None
    if not parent.is_dir():
        raise ConfigError(f"{key}: {folder} cannot be a folder, since {parent} is a file; choose another")
    try:
        # Permissions alone do not tell: quotas, read-only and remote file systems have a say too.
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise ConfigError(f"{key}: {folder} cannot be written: {error.strerror} in {parent}; choose another") from None


def check_writable_file(file: Path, key: str) -> None:
    """Refuse a file that is a folder, or whose folder cannot be made or written. Raises `ConfigError`."""
    if file.is_dir():
        raise ConfigError(f"{key}: {file} is a folder; give the name of a file in it")
    check_writable(file.parent, key)
