"""How the rows of a rollout go through the slots of the generation engine (`mrlhf.rollout.scheduler`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mrlhf.planning.job import Job, Role, Rollout
from mrlhf.planning.memory import PREFILL_TOKENS


@dataclass(frozen=True)
class Batching:
    """Continuous batching on one data-parallel replica.

    Attributes:
        rows: of the replica in one rollout.
        slots: rows at once: as many as are wanted, as the memory for keys and values admits, and as there are.
        groups: of slots, which are in different pipeline stages at the same time.
        prefills: passes that the prompts fill.
        steps: tokens one after the other in a slot, from the second of its first row on.
        active: rows that get a token in a step, on average.
    """

    rows: int
    slots: int
    groups: int
    prefills: int
    steps: int
    active: float


def batching(job: Job, role: Role, rollout: Rollout) -> Batching:
    """The schedule of a rollout.

    A slot takes the next row as soon as one has ended, so that ``ceil(rows / slots)`` rows follow each other in a slot.
    All but the last are reckoned with the mean length; among the last ones of all slots is the longest. With responses
    of one length that is exact; where all rows have a slot of their own, the longest one decides.
    """
    rows = math.ceil(job.rows / role.sizes.data_parallel_size)
    slots = min(rollout.slots, rows)
    before_last = math.ceil(rows / slots) - 1
    mean, longest = max(rollout.mean_response - 1, 0), max(rollout.longest_response - 1, 0)
    steps = before_last * mean + longest
    return Batching(
        rows=rows,
        slots=slots,
        groups=min(role.sizes.pipeline_model_parallel_size, slots),
        prefills=max(math.ceil(rows * rollout.mean_prompt / PREFILL_TOKENS), 1),
        steps=steps,
        active=rows * mean / steps if steps else 0.0,
    )
