"""Stands in for srun on one machine: starts the tasks of a step, each with the variables that Slurm would leave it.

``fake_srun.py [--OPTION=VALUE]... COMMAND...``; SLURM_NTASKS and SLURM_NNODES say how many tasks on how many nodes.
"""

from __future__ import annotations

import os
import subprocess
import sys


def main() -> int:
    """The highest exit status of the tasks, as srun's."""
    command = sys.argv[1:]
    while command and command[0].startswith("-"):
        command.pop(0)
    tasks, nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ.get("SLURM_NNODES", "1"))
    per_node = tasks // nodes
    running = []
    for rank in range(tasks):
        step = {
            "SLURM_JOB_ID": "4711",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % per_node),
            "SLURM_NODEID": str(rank // per_node),
            "SLURM_STEP_NUM_TASKS": str(tasks),
            "SLURM_STEP_NUM_NODES": str(nodes),
            "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
            # All nodes are this machine.
            "SLURM_STEP_NODELIST": "localhost",
        }
        running.append(subprocess.Popen(command, env={**os.environ, **step}))
    return max(abs(task.wait()) for task in running)


if __name__ == "__main__":
    sys.exit(main())
