"""Slurm's lists of hosts and tasks. ``python -m mrlhf.parallel.slurm NODELIST`` prints the first host."""

from __future__ import annotations

import re
import sys

from mrlhf.errors import ConfigError


def first_slurm_host(nodes: str) -> str:
    """The first host of a Slurm node list: ``gpu[007-009,12],cpu1`` -> ``gpu007``, ``r[2-3]n[1,4]`` -> ``r2n1``."""
    match = re.match(r"(?:[^\[\],]|\[\w+[^\]]*\])+(?=,|$)", nodes.strip())
    if match is None:
        raise ConfigError(f"Slurm's node list {nodes!r} cannot be read; set MASTER_ADDR")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])


def tasks_on_node(tasks: str, node: int) -> int | None:
    """Tasks on the ``node``-th node, from lists such as ``2(x3),1``; None where the list is too short."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node < len(counts) else None


if __name__ == "__main__":
    print(first_slurm_host(sys.argv[1]))
