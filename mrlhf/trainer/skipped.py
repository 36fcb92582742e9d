"""Steps that were skipped, since a gradient was not finite, and when they are too many."""

from __future__ import annotations

from collections.abc import Mapping

from mrlhf.errors import MrlhfError
from mrlhf.megatron.optimizer import MIN_LOSS_SCALE
from mrlhf.roles.model import Update


def count_skipped(
    before: int, updates: Mapping[str, Update], *, where: str, rates: Mapping[str, str], limit: int
) -> int:
    """Steps skipped in a row; every rank comes to the same answer.

    Args:
        before: the number up to the step before.
        updates: of this step, by the name of the model.
        where: which step it was, for messages.
        rates: configuration key of each model's learning rate, for messages.
        limit: how many are allowed.

    Raises:
        MrlhfError: more than ``limit``, or fp16 overflows at its lowest loss scale, so that waiting brings nothing.
    """
    if all(update.updated for update in updates.values()):
        return 0
    norms = ", ".join(f"{name} {update.grad_norm}" for name, update in updates.items())
    norms = f"gradient norms in {where}: {norms}"
    for name, update in updates.items():
        if update.scale_exhausted:
            raise MrlhfError(
                f"the {name}'s gradient overflows fp16 even with a loss scale of {MIN_LOSS_SCALE}; {norms}; "
                f"use precision.dtype=bf16 or fp32, or lower {rates[name]}"
            )
    if before + 1 > limit:
        lower = " and ".join(dict.fromkeys(rates[name] for name in updates))
        raise MrlhfError(
            f"{before + 1} optimizer steps in a row were skipped, since a gradient was not finite; {norms}; look at "
            f"what went in, lower {lower}, use precision.dtype=fp32, or raise trainer.max_bad_steps to wait longer"
        )
    return before + 1
