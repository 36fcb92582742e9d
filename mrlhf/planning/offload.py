"""What ``offload`` keeps in host memory, and how long its transfers take (`mrlhf.trainer.offloading`).

In every iteration the optimizers' states go out before the rollout, in the order of the work, which waits for them; and
come back from the beginning of the updates on, beside the gradients of the first minibatch. Frozen weights go out once
in a run, after that they are only dropped; those that inference needs come back one after the other from its beginning
on, beside the passes of the models before them. What an evaluation moves on top is not in the times.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrlhf.errors import ConfigError
from mrlhf.planning.job import Job, Role
from mrlhf.planning.memory import persistent


@dataclass(frozen=True)
class Transfers:
    """Seconds in which a rank waits for the host in one iteration.

    Attributes:
        rollout: for the states of the optimizers to be out.
        inference: for frozen weights, beyond what the passes before them take.
        train: for the states to be back, beyond the first gradients.
        link: in which the link to the host is busy, waited for or not.
    """

    rollout: float = 0.0
    inference: float = 0.0
    train: float = 0.0
    link: float = 0.0


def host_bytes_of(job: Job, role: Role, index: int) -> int:
    """Pinned memory of the host for what ``offload`` moves of a model on a pipeline rank, held for the whole run.

    Gradients are not kept, only their memory is given back.
    """
    if not role.offloaded:
        return 0
    kept = persistent(job, role, index)
    return kept.optimizer if role.trained else kept.weights


def host_bytes_of_rank(job: Job, stages: dict[str, int]) -> int:
    """The same of all models of a rank that holds ``stages`` (role -> pipeline rank)."""
    return sum(host_bytes_of(job, role, stages[role.name]) for role in job.roles if role.name in stages)


def host_bytes_of_machine(job: Job, gpus_per_node: int) -> int:
    """The largest sum over the ranks of one machine, which follow each other."""
    sums: dict[int, int] = {}
    for ranks, stages in job.rank_classes():
        each = host_bytes_of_rank(job, stages)
        for machine in range(ranks.start // gpus_per_node, (ranks.stop - 1) // gpus_per_node + 1):
            first, end = machine * gpus_per_node, (machine + 1) * gpus_per_node
            there = min(ranks.stop, end) - max(ranks.start, first)
            sums[machine] = sums.get(machine, 0) + there * each
    return max(sums.values())


def transfers(job: Job, rate: float, passes: dict[str, float], gradients: dict[str, float]) -> dict[int, Transfers]:
    """What the models of each part of the ranks wait for; by the first rank of the part (`Role.first`).

    Args:
        job: of the run.
        rate: bytes per second between a GPU and its host, in one direction.
        passes: seconds of each role's passes in inference; roles that make none are missing.
        gradients: seconds of each trained role's gradients of one minibatch.

    Raises:
        ConfigError: the rate is not above 0.
    """
    if not rate > 0:
        raise ConfigError(f"--pcie: {rate:g} bytes per second move nothing to the host and back; give its rate")
    found: dict[int, Transfers] = {}
    # In the order of the trainer: critic and reward models come after actor and reference.
    order = sorted(job.roles, key=lambda role: (role.name.startswith("reward"), role.name == "critic"))
    for first in {role.first for role in job.roles}:
        here = [role for role in order if role.first == first]
        # The pipeline rank that has most to move makes the others wait.
        sizes = {r.name: max(host_bytes_of(job, r, i) for i in range(len(r.stages))) for r in here}
        states = sum(sizes[role.name] for role in here if role.trained) / rate
        there = now = 0.0
        for role in here:
            if role.name not in passes:
                continue
            if not role.trained:
                there += sizes[role.name] / rate
            now = (max(now, there) if sizes[role.name] and not role.trained else now) + passes[role.name]
        found[first] = Transfers(
            rollout=states,
            inference=now - sum(passes.get(role.name, 0.0) for role in here),
            train=max(states - sum(gradients.get(role.name, 0.0) for role in here), 0.0),
            link=2 * states + there,
        )
    return found
