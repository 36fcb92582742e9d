"""Reads ``config.json`` and ``generation_config.json`` of a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal, cast

from mrlhf.checkpoint.families import family_of_architecture
from mrlhf.errors import CheckpointError
from mrlhf.model_config import ModelConfig, RopeScaling

MEGATRON_FILE = "mrlhf_model.json"
"""Marks a Megatron weights folder and holds its `ModelConfig` (see `mrlhf.checkpoint.convert`)."""

DtypeName = Literal["float32", "bfloat16", "float16"]
_DTYPES = ("float32", "bfloat16", "float16")


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON file that holds an object; a `CheckpointError` names the file when it is missing or malformed."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


def architecture_of(values: dict[str, Any], where: str) -> str:
    """The model class that a parsed ``config.json`` names."""
    architectures = values.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise CheckpointError(f"{where}: key 'architectures' must list one model class, found {architectures!r}")
    return str(architectures[0])


def dtype_of(values: dict[str, Any], where: str) -> DtypeName:
    """The dtype that a parsed ``config.json`` names (``dtype``, or the older ``torch_dtype``; default float32)."""
    name = str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise CheckpointError(f"{where}: dtype {name!r} is not supported; known: {', '.join(_DTYPES)}")
    return cast(DtypeName, name)


def _ids(value: Any, where: str, key: str) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
        raise CheckpointError(f"{where}: key {key!r} must be an integer or a list of integers, found {value!r}")
    return tuple(item for item in values if item >= 0)  # old Llama files write pad_token_id -1 for none


def _token_ids(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Special ids; as in ``generate``, those of generation_config.json come before those of config.json."""
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    found: dict[str, tuple[int, ...]] = {}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = _ids(generation.get(key), str(generation_file), key)
        found[key] = ids or _ids(values.get(key), str(folder / "config.json"), key)
    bos, pad = found["bos_token_id"], found["pad_token_id"]
    return {
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": tuple(dict.fromkeys(found["eos_token_id"])),
        "pad_token_id": pad[0] if pad else None,
    }


def model_config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """A JSON-ready form of ``config``; `model_config_from_dict` reads it back."""
    return dataclasses.asdict(config)


def model_config_from_dict(values: dict[str, Any], where: str) -> ModelConfig:
    """The inverse of `model_config_to_dict`; ``where`` is named by the `CheckpointError` of a wrong key."""
    try:
        values = dict(values)
        values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
        values["eos_token_ids"] = tuple(values["eos_token_ids"])
        values["dense_layers"] = tuple(values.get("dense_layers", ()))
        return ModelConfig(**values)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{where}: the model's description is malformed: {error}") from None


def read_model_config(path: str | Path) -> ModelConfig:
    """Read the architecture, dtype and special ids of a model folder, without touching its weights.

    ``path`` is a Hugging Face folder (``config.json`` and, for the end-of-sequence ids, ``generation_config.json``)
    or a Megatron weights folder written by `mrlhf.checkpoint.convert.import_hf`. Raises `CheckpointError` naming the
    file and key for anything missing, malformed or not supported.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such model folder")
    marker = folder / MEGATRON_FILE
    if marker.exists():
        description = read_json(marker).get("model_config")
        if not isinstance(description, dict):
            raise CheckpointError(f"{marker}: key 'model_config' is missing")
        return model_config_from_dict(description, str(marker))
    file = folder / "config.json"
    values = read_json(file)
    family, _ = family_of_architecture(architecture_of(values, str(file)), str(file))
    if values.get("quantization_config"):
        raise CheckpointError(f"{file}: quantized weights (key 'quantization_config') are not supported")
    try:
        config = family.read_config(values, str(file))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: a value has the wrong type: {error}") from None
    return dataclasses.replace(config, dtype=dtype_of(values, str(file)), **_token_ids(folder, values))


def read_head(path: str | Path) -> str:
    """Which head a model folder holds: ``"lm"`` or ``"value"``."""
    folder = Path(path)
    marker = folder / MEGATRON_FILE
    if marker.exists():
        return str(read_json(marker).get("head", "lm"))
    file = folder / "config.json"
    _, head = family_of_architecture(architecture_of(read_json(file), str(file)), str(file))
    return head
