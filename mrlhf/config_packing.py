"""Where rows can be packed, and where not."""

from __future__ import annotations

from collections.abc import Collection

from mrlhf.config_schema import PPOConfig


def packing_problems(config: PPOConfig, roles: Collection[str], *, training: bool) -> list[str]:
    """Packed passes of models that cut their rows over context parallel ranks, one line for each key.

    Args:
        config: of the run.
        roles: those that there are.
        training: whether there are updates.
    """
    packed = {"inference.packing": roles if config.inference.packing else ()}
    if training:
        packed["ppo.packing"] = ("actor", "critic") if config.ppo.packing else ()
    found = []
    for key, those in packed.items():
        sizes = {role: config.parallel_of(role).context_parallel_size for role in those if role in roles}
        cut = [f"that of {role} is {size}" for role, size in sizes.items() if size > 1]
        if cut:
            found.append(f"{key} cannot go with a context_parallel_size above 1, and {', '.join(cut)}; set {key}=false")
    return found
