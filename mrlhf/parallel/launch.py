"""Who started this process, how ranks find each other, and how a failing rank ends the whole job.

torch is imported only when a process group is made, so that a wrong configuration is refused at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal, NoReturn, TypeVar

from mrlhf.errors import ConfigError, MrlhfError

Launcher = Literal["torchrun", "slurm", "mpi", "single"]
Result = TypeVar("Result")

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# rank, world size, local rank, local world size; Open MPI, MVAPICH, then Hydra (MPICH, Intel MPI).
_MPI_FLAVOURS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# What gloo, NCCL and the store say when the other side has gone; their time-outs are not among it, since a rank that
# waited in vain is the best witness there is.
_PEER_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote process exited|ncclremoteerror", re.IGNORECASE
)
_COMMUNICATION = re.compile(r"gloo|nccl|tcpstore|socket|pair\.cc", re.IGNORECASE)
PEER_GRACE_SECONDS = 5.0
STOPPED = 75
"""Exit status of a run that stopped early, saved, and goes on when started again: EX_TEMPFAIL of sysexits.h."""


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


def resolve_address(env: LaunchEnv) -> LaunchEnv:
    """Agree on the address where ranks meet; under MPI rank 0 picks a free port and mpi4py broadcasts it.

    Raises `ConfigError` when MPI started the job, no address is given and mpi4py is not installed.
    """
    if env.world_size == 1 or (env.master_addr is not None and env.master_port is not None):
        return env
    try:
        from mpi4py import MPI
    except ImportError:
        raise ConfigError(
            "mpirun started this job, and ranks find each other through mpi4py, which cannot be imported; "
            "run pip install 'mrlhf[mpi]', or set MASTER_ADDR and MASTER_PORT for all ranks"
        ) from None
    world = MPI.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (env.rank, env.world_size):
        raise ConfigError(
            f"mpirun's environment says rank {env.rank} of {env.world_size}, but mpi4py says rank "
            f"{world.Get_rank()} of {world.Get_size()}; mpi4py must use the MPI that started the job"
        )
    host = "127.0.0.1" if env.local_world_size == env.world_size else socket.gethostname()
    address, port = world.bcast((env.master_addr or host, env.master_port or _free_port()), root=0)
    return replace(env, master_addr=address, master_port=port)


def initialize(env: LaunchEnv, backend: str = "auto", timeout: timedelta = timedelta(minutes=60)) -> LaunchEnv:
    """Make the default process group; returns the environment with the address that was used.

    ``auto`` is NCCL for CUDA tensors beside gloo for CPU tensors where CUDA is present, else gloo. Groups made later
    need the same ``timeout`` handed to them, torch does not inherit it. Raises `ConfigError` when a backend or a GPU
    that is asked for is not there.
    """
    import torch
    import torch.distributed as dist

    from mrlhf.parallel.rendezvous import fresh_store, keeps_store

    cuda = torch.cuda.is_available()
    if backend == "nccl" and not cuda:
        raise ConfigError("launch.backend is nccl, but this process sees no CUDA device; use gloo or auto")
    if backend == "gloo" and cuda:
        raise ConfigError(
            "launch.backend is gloo, but the models are on CUDA here and gloo lacks collectives that they need; "
            "use auto, or hide the GPUs with CUDA_VISIBLE_DEVICES="
        )
    if cuda:
        # One hardware queue, so that Megatron's gradient all-reduce starts before the product it overlaps with.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        if env.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"local rank {env.local_rank} has no GPU of its own, {torch.cuda.device_count()} visible; "
                "start at most one rank per GPU on each node"
            )
        torch.cuda.set_device(env.local_rank)
    chosen = {"auto": "cpu:gloo,cuda:nccl" if cuda else "gloo", "nccl": "cpu:gloo,cuda:nccl"}.get(backend, backend)
    env = resolve_address(env)
    if env.world_size == 1:
        dist.init_process_group(chosen, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return env
    # For libraries that look themselves, and for torch's env:// rule, which knows about torchrun's own store.
    os.environ.update(
        RANK=str(env.rank),
        WORLD_SIZE=str(env.world_size),
        LOCAL_RANK=str(env.local_rank),
        LOCAL_WORLD_SIZE=str(env.local_world_size),
        MASTER_ADDR=str(env.master_addr),
        MASTER_PORT=str(env.master_port),
    )
    if keeps_store(os.environ):
        store = fresh_store(str(env.master_addr), int(env.master_port or 0), env.rank, env.world_size, timeout)
        dist.init_process_group(chosen, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout)
        return env
    dist.init_process_group(chosen, init_method="env://", timeout=timeout)
    return env


def shutdown() -> None:
    """Destroy all process groups, if there are any."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def run_guarded(main: Callable[[], Result], env: LaunchEnv, grace: float = PEER_GRACE_SECONDS) -> Result:
    """Call ``main``; with several ranks, an exception ends this process at once, and by it the job.

    The rank that fails first prints its traceback as the last thing it does and exits with 1, past all destructors
    that could wait for peers. Ranks that fail only since a peer has gone wait ``grace`` seconds, in which the launcher
    normally ends them, then print one line. An error of ours (`MrlhfError`) is shown by rank 0 as its message alone,
    exit status 2; the same error of another rank waits too, since rank 0 usually has it as well.

    A single process lets exceptions pass, for the caller to show.
    """
    if env.world_size == 1:
        try:
            return main()
        finally:
            shutdown()
    try:
        result = main()
    except SystemExit as error:
        if error.code in (0, None):
            shutdown()
            raise
        status = error.code if isinstance(error.code, int) else 1
        _end_job(status, "" if isinstance(error.code, int) else str(error.code))
    except KeyboardInterrupt:
        _end_job(130, "")
    except MrlhfError as error:
        _record(error)
        if env.rank != 0:
            time.sleep(grace)
            _end_job(2, f"[rank {env.rank}] error: {error}")
        _end_job(2, f"error: {error}")
    except BaseException as error:
        if is_peer_failure(error):
            time.sleep(grace)
            first_line = (str(error).splitlines() or [""])[0]
            _end_job(1, f"[rank {env.rank}] stopped, since another rank ended: {type(error).__name__}: {first_line}")
        _record(error)
        _end_job(1, "".join(f"[rank {env.rank}] {line}\n" for line in traceback.format_exc().splitlines()))
    shutdown()
    return result


def stopped_status(environ: Mapping[str, str]) -> int:
    """Exit status of a run that was asked to stop: `STOPPED`, or 0 where another status would undo the request.

    torchrun starts ranks again that end with anything but 0, as long as ``--max-restarts`` allows; and what it exits
    with itself is 0 or 1.
    """
    restarts = int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0")), int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return 0 if restarts[0] > restarts[1] else STOPPED


def is_peer_failure(error: BaseException) -> bool:
    """Whether the error only says that another rank has gone, so that the cause is printed elsewhere."""
    # RuntimeError only: a reward function that cannot reach its own server raises an OSError.
    text = str(error)
    return isinstance(error, RuntimeError) and bool(_PEER_GONE.search(text) and _COMMUNICATION.search(text))


def _end_job(status: int, text: str) -> NoReturn:
    sys.stdout.flush()
    if text:
        # One write, so that lines of several ranks do not mix.
        sys.stderr.write(text if text.endswith("\n") else text + "\n")
    sys.stderr.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(status)
    job, step = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID")
    if job and step and "TORCHELASTIC_RUN_ID" not in os.environ:
        # srun leaves the other tasks running unless started with --kill-on-bad-exit.
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            # This process ends with its own status, and the others in training take SIGTERM for a request to stop.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            subprocess.run(["scancel", "--signal=TERM", f"{job}.{step}"], timeout=10, check=False)
            later = f"sleep {PEER_GRACE_SECONDS:g}; scancel --signal=KILL {job}.{step}"
            subprocess.Popen(["sh", "-c", later], start_new_session=True)
    os._exit(status)


def _record(error: BaseException) -> None:
    """Leave the error where torchrun looks for it, so that its closing summary shows this traceback as the cause."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    shown = str(error) if isinstance(error, MrlhfError) else traceback.format_exc()
    extra = {"py_callstack": shown, "timestamp": str(int(time.time()))}
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}, file)
    except OSError:
        pass


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
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    address, port = _address(environ)
    if address is None and not nodes:
        raise ConfigError("Slurm left neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST; set MASTER_ADDR")
    # Below the range that systems hand out to clients, and the same for all tasks of one step.
    step = int(environ.get("SLURM_STEP_ID", "0")) if environ.get("SLURM_STEP_ID", "0").isdigit() else 0
    job = _integer(environ, "SLURM_JOB_ID") if "SLURM_JOB_ID" in environ else 0
    return LaunchEnv(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(environ, "SLURM_LOCALID"),
        local_world_size=_slurm_tasks_here(environ, world_size),
        master_addr=address or first_slurm_host(nodes),
        master_port=port or 15000 + (job * 31 + step) % 15000,
        launcher="slurm",
    )


def first_slurm_host(nodes: str) -> str:
    """The first host of a Slurm node list: ``gpu[007-009,12],cpu1`` -> ``gpu007``."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes.strip())
    if match is None:
        raise ConfigError(f"Slurm's node list {nodes!r} cannot be read; set MASTER_ADDR")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + (suffix or "")


def _slurm_tasks_here(environ: Mapping[str, str], world_size: int) -> int:
    """Tasks on this node, from lists such as ``2(x3),1``."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    node = int(environ.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else world_size


def _from_mpi(environ: Mapping[str, str], names: tuple[str, ...]) -> LaunchEnv:
    rank, world_size = _integer(environ, names[0]), _integer(environ, names[1])
    local_rank = _integer(environ, names[2]) if names[2] in environ else rank
    local_size = _integer(environ, names[3]) if names[3] in environ else world_size
    address, port = _address(environ)
    return LaunchEnv(rank, world_size, local_rank, local_size, address, port, "mpi")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
