"""Who started this process, as torchrun, Slurm and MPI leave it in the environment, and which option was forgotten.

Nothing here needs torch, so that a wrong start is refused at once.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

from mrlhf.errors import ConfigError
from mrlhf.parallel.slurm import first_slurm_host, tasks_on_node

Launcher = Literal["torchrun", "slurm", "mpi", "single"]

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# rank, world size, local rank, local world size; Open MPI, MVAPICH, then Hydra (MPICH, Intel MPI).
_MPI_FLAVOURS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


@dataclass(frozen=True)
class LaunchEnv:
    """This process among all; ``master_addr`` is None until `resolve_address` agrees on one."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    launcher: Launcher = "single"


def detect_launch(environ: Mapping[str, str]) -> LaunchEnv:
    """Read the launcher's variables: torchrun, then Slurm (srun), then MPI, else one process.

    Inside a Slurm allocation mpirun's own variables win where they disagree with Slurm's, which then describe mpirun's
    daemons. Raises `ConfigError` when variables are missing, malformed or contradict each other.
    """
    mpi = next((names for names in _MPI_FLAVOURS if names[0] in environ and names[1] in environ), None)
    if "RANK" in environ or "TORCHELASTIC_RUN_ID" in environ:
        env = _from_torchrun(environ)
    elif "SLURM_PROCID" in environ and not (mpi and _is_mpirun_inside_slurm(environ, mpi)):
        env = _from_slurm(environ)
    elif mpi:
        env = _from_mpi(environ, mpi)
    else:
        return LaunchEnv()
    problems = []
    if not 0 <= env.rank < env.world_size:
        problems.append(f"rank {env.rank} is not below the world size {env.world_size}")
    if not 0 <= env.local_rank < env.local_world_size:
        problems.append(f"local rank {env.local_rank} is not below the local world size {env.local_world_size}")
    if env.local_world_size > env.world_size:
        problems.append(f"local world size {env.local_world_size} is over the world size {env.world_size}")
    if problems:
        raise ConfigError(f"the environment that {env.launcher} left is inconsistent: {'; '.join(problems)}")
    return env


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, else NVIDIA's device files."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in devices.glob("nvidia*"))
    # CUDA itself stops reading at the first number below 0; names of GPUs may hold a "-1" too.
    names = [name.strip() for name in listed.split(",")]
    return sum(bool(name) for name in takewhile(lambda name: not re.fullmatch(r"-\d+", name), names))


def missing_options(env: LaunchEnv, needed: int, gpus: int) -> str | None:
    """Which options of the launcher make ``needed`` ranks of fewer; None where there are enough.

    Args:
        env: what was started.
        needed: ranks of the smallest world that holds the layout.
        gpus: that this process sees, see `visible_gpus`.
    """
    if env.world_size >= needed:
        return None
    nodes = max(env.world_size // env.local_world_size, 1)
    # Without GPUs nothing says how many processes a node can take.
    per_node = max(env.local_world_size, gpus) if gpus else math.ceil(needed / nodes)
    more_nodes = math.ceil(needed / per_node)
    options: list[str] = []
    if env.launcher == "mpi":
        options += [f"-n {more_nodes * per_node}"]
        options += [f"--map-by ppr:{per_node}:node"] if more_nodes > 1 else []
    else:
        slurm = env.launcher == "slurm"
        if per_node > env.local_world_size or env.launcher == "single":
            options.append(f"{'--ntasks-per-node' if slurm else '--nproc-per-node'} {per_node}")
        if more_nodes > nodes:
            options.append(f"{'--nodes' if slurm else '--nnodes'} {more_nodes}")
    program = {"torchrun": "torchrun", "slurm": "srun", "mpi": "mpirun", "single": "torchrun"}[env.launcher]
    how = "one process was started without a launcher" if env.launcher == "single" else f"{program} started"
    if env.launcher != "single":
        how += f" {env.local_world_size} {'process' if env.local_world_size == 1 else 'processes'} on this node"
        how += f", {env.world_size} in all"
    seen = f"; {gpus} GPUs are visible here" if gpus > env.local_world_size else ""
    variable = " (or export PET_NPROC_PER_NODE)" if "--nproc-per-node" in " ".join(options) else ""
    verb = "start it with torchrun" if env.launcher == "single" else f"give {program}"
    return f"{how}, the layout needs {needed}{seen}: {verb} {' '.join(options)}{variable}"


@contextmanager
def explained(env: LaunchEnv, needed: int) -> Iterator[None]:
    """Add to a `ConfigError` which options of the launcher are missing, where the world is smaller than ``needed``."""
    try:
        yield
    except ConfigError as error:
        hint = missing_options(env, needed, visible_gpus(os.environ))
        if hint is None:
            raise
        raise ConfigError(f"{error}\n{hint}") from None


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except KeyError:
        raise ConfigError(f"the launcher did not set {name}") from None
    except ValueError:
        raise ConfigError(f"environment variable {name} is {environ[name]!r}, expected a whole number") from None


def _address(environ: Mapping[str, str]) -> tuple[str | None, int | None]:
    return environ.get("MASTER_ADDR") or None, _integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None


def _from_torchrun(environ: Mapping[str, str]) -> LaunchEnv:
    missing = [name for name in _TORCHRUN if name not in environ]
    if missing:
        raise ConfigError(
            f"RANK is set, so torchrun's variables are expected, but {', '.join(missing)} are missing; "
            "start with torchrun, or unset RANK for a single process"
        )
    address, port = _address(environ)
    world_size, local_rank = _integer(environ, "WORLD_SIZE"), _integer(environ, "LOCAL_RANK")
    local_size = _integer(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else world_size
    return LaunchEnv(_integer(environ, "RANK"), world_size, local_rank, local_size, address, port, "torchrun")


def _is_mpirun_inside_slurm(environ: Mapping[str, str], mpi: tuple[str, ...]) -> bool:
    if "SLURM_STEP_NUM_TASKS" not in environ:
        return True
    slurm = (_integer(environ, "SLURM_PROCID"), _integer(environ, "SLURM_STEP_NUM_TASKS"))
    return slurm != (_integer(environ, mpi[0]), _integer(environ, mpi[1]))


def _from_slurm(environ: Mapping[str, str]) -> LaunchEnv:
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    if tasks not in environ:
        return LaunchEnv()
    world_size, rank = _integer(environ, tasks), _integer(environ, "SLURM_PROCID")
    if world_size == 1:
        return LaunchEnv(launcher="single")
    if "SLURM_STEP_ID" not in environ and tasks == "SLURM_NTASKS":
        raise ConfigError(
            f"this is the batch script of a Slurm job of {world_size} tasks, not one of its tasks; "
            "start the command with srun, or with torchrun on each node"
        )
    tasks_per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    address, port = _address(environ)
    if address is None and not nodes:
        raise ConfigError("Slurm left neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST; set MASTER_ADDR")
    # Below the range that systems hand out to clients, and the same for all tasks of one step.
    step = int(environ.get("SLURM_STEP_ID", "0")) if environ.get("SLURM_STEP_ID", "0").isdigit() else 0
    job = _integer(environ, "SLURM_JOB_ID") if "SLURM_JOB_ID" in environ else 0
    node = _integer(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
    return LaunchEnv(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(environ, "SLURM_LOCALID"),
        local_world_size=tasks_on_node(tasks_per_node, node) or world_size,
        master_addr=address or first_slurm_host(nodes),
        master_port=port or 15000 + (job * 31 + step) % 15000,
        launcher="slurm",
    )


def _from_mpi(environ: Mapping[str, str], names: tuple[str, ...]) -> LaunchEnv:
    rank, world_size = _integer(environ, names[0]), _integer(environ, names[1])
    local_rank = _integer(environ, names[2]) if names[2] in environ else rank
    local_size = _integer(environ, names[3]) if names[3] in environ else world_size
    address, port = _address(environ)
    return LaunchEnv(rank, world_size, local_rank, local_size, address, port, "mpi")
