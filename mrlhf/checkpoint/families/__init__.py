"""Model families: what a Hugging Face checkpoint of each calls its tensors, and what its ``config.json`` means.

A family is data. To add one, write a module beside `llama.py` with its `Family` and list it in `FAMILIES`.
"""

from __future__ import annotations

from mrlhf.checkpoint.families.llama import LLAMA, MISTRAL
from mrlhf.checkpoint.families.moe import MIXTRAL, QWEN3_MOE
from mrlhf.checkpoint.families.table import Entry, Family, Heads, Kind, Source, Weight, dimensions, expand
from mrlhf.errors import CheckpointError

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, MISTRAL, MIXTRAL, QWEN3_MOE)}

__all__ = [
    "FAMILIES",
    "Entry",
    "Family",
    "Heads",
    "Kind",
    "Source",
    "Weight",
    "dimensions",
    "expand",
    "family_by_name",
    "family_of_architecture",
]


def family_by_name(name: str) -> Family:
    """Return the family called ``name``; raises `CheckpointError` with the known names otherwise."""
    if name not in FAMILIES:
        raise CheckpointError(f"unknown model family {name!r}; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def family_of_architecture(architecture: str, where: str) -> tuple[Family, str]:
    """Return the family of a Hugging Face class name and the head that this class has (``"lm"`` or ``"value"``).

    ``where`` (a file) is named by the `CheckpointError` that an unknown architecture raises.
    """
    for family in FAMILIES.values():
        if architecture == family.lm_architecture:
            return family, "lm"
        if architecture == family.value_architecture:
            return family, "value"
    known = [name for family in FAMILIES.values() for name in (family.lm_architecture, family.value_architecture)]
    raise CheckpointError(f"{where}: architecture {architecture!r} is not supported; known: {', '.join(known)}")
