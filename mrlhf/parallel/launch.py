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
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, TypeVar

from mrlhf.errors import ConfigError, MrlhfError
from mrlhf.parallel.heartbeat import is_timeout
from mrlhf.parallel.launch_env import LaunchEnv
from mrlhf.parallel.launch_env import detect_launch as detect_launch

if TYPE_CHECKING:
    from mrlhf.parallel.pulse import Pulse

Result = TypeVar("Result")

# What gloo, NCCL and the store say when the other side has gone; their time-outs are not among it, since a rank that
# waited in vain is the best witness there is.
_PEER_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote process exited|ncclremoteerror", re.IGNORECASE
)
_COMMUNICATION = re.compile(r"gloo|nccl|tcpstore|socket|pair\.cc", re.IGNORECASE)
PEER_GRACE_SECONDS = 5.0
STOPPED = 75
"""Exit status of a run that stopped early, saved, and goes on when started again: EX_TEMPFAIL of sysexits.h."""


def resolve_address(env: LaunchEnv) -> LaunchEnv:
    """Agree on the address where ranks meet; under MPI rank 0 picks a free port and mpi4py broadcasts it.

    Then the local rank comes from mpi4py too, as the rank among those that share memory: not every MPI leaves it in the
    environment. Raises `ConfigError` when MPI started the job, no address is given and mpi4py cannot be used.
    """
    if env.world_size == 1 or (env.master_addr is not None and env.master_port is not None):
        return env
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"mpirun started this job, and ranks find each other through mpi4py, which cannot be imported ({error}); "
            "run pip install 'mrlhf[mpi]', or set MASTER_ADDR and MASTER_PORT for all ranks"
        ) from None
    world = MPI.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (env.rank, env.world_size):
        raise ConfigError(
            f"mpirun's environment says rank {env.rank} of {env.world_size}, but mpi4py says rank "
            f"{world.Get_rank()} of {world.Get_size()}; mpi4py must use the MPI that started the job"
        )
    here = world.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank, local_world_size = here.Get_rank(), here.Get_size()
    here.Free()
    host = "127.0.0.1" if local_world_size == env.world_size else socket.gethostname()
    address, port = world.bcast((env.master_addr or host, env.master_port or _free_port()), root=0)
    return replace(env, local_rank=local_rank, local_world_size=local_world_size, master_addr=address, master_port=port)


def initialize(env: LaunchEnv, backend: str = "auto", timeout: timedelta = timedelta(minutes=60)) -> LaunchEnv:
    """Make the default process group; returns the environment with the address that was used.

    ``auto`` is NCCL for CUDA tensors beside gloo for CPU tensors where CUDA is present, else gloo. Groups made later
    need the same ``timeout`` handed to them, torch does not inherit it. Raises `ConfigError` when a backend or a GPU
    that is asked for is not there.
    """
    import torch
    import torch.distributed as dist

    from mrlhf.parallel.allocator import keep_freed_memory
    from mrlhf.parallel.pulse import start_pulse
    from mrlhf.parallel.rendezvous import join_store, keeps_store

    env = resolve_address(env)
    cuda = torch.cuda.is_available()
    if not cuda:
        keep_freed_memory()
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
        torch.cuda.set_device(device_index(env, torch.cuda.device_count(), os.environ))
    chosen = {"auto": "cpu:gloo,cuda:nccl" if cuda else "gloo", "nccl": "cpu:gloo,cuda:nccl"}.get(backend, backend)
    if env.world_size == 1:
        dist.init_process_group(chosen, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return env
    # For libraries that look themselves.
    os.environ.update(
        RANK=str(env.rank),
        WORLD_SIZE=str(env.world_size),
        LOCAL_RANK=str(env.local_rank),
        LOCAL_WORLD_SIZE=str(env.local_world_size),
        MASTER_ADDR=str(env.master_addr),
        MASTER_PORT=str(env.master_port),
    )
    address, port = str(env.master_addr), int(env.master_port or 0)
    prefix, store = join_store(address, port, env.rank, env.world_size, timeout)
    start_pulse(address, port, prefix, env.rank, env.world_size, serves=env.rank == 0 and not keeps_store(os.environ))
    dist.init_process_group(chosen, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout)
    return env


def device_index(env: LaunchEnv, visible: int, environ: Mapping[str, str]) -> int:
    """Which of the ``visible`` GPUs this rank uses. Raises `ConfigError` where there is none for it."""
    if env.launcher == "slurm" and visible == 1 and "SLURM_GPUS_PER_TASK" in environ:
        # Slurm shows each task its own GPU only.
        return 0
    if env.local_rank >= visible:
        raise ConfigError(
            f"local rank {env.local_rank} has no GPU of its own, {visible} visible; "
            "start at most one rank per GPU on each node"
        )
    return env.local_rank


def shutdown() -> None:
    """Destroy all process groups, if there are any."""
    pulse = _pulse()
    if pulse is not None:
        pulse.leave()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def run_guarded(main: Callable[[], Result], env: LaunchEnv, grace: float = PEER_GRACE_SECONDS) -> Result:
    """Call ``main``; with several ranks, an exception ends this process at once, and by it the job.

    The rank that fails first prints its traceback as the last thing it does and exits with 1, past all destructors
    that could wait for peers. Ranks that fail only since a peer has gone wait ``grace`` seconds, in which the launcher
    normally ends them, then print one line with the ranks and nodes that have gone (`mrlhf.parallel.pulse`). An error
    of ours (`MrlhfError`) is shown by rank 0 as its message alone, exit status 2; the same error of another rank waits
    too, since rank 0 usually has it as well.

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
        _tell(error)
        if env.rank != 0:
            time.sleep(grace)
        # Only now: torchrun's summary repeats what each rank has left, and rank 0 usually has left the same.
        _record(error)
        _end_job(2, f"[rank {env.rank}] error: {error}" if env.rank else f"error: {error}")
    except BaseException as error:
        if is_peer_failure(error):
            first_line = (str(error).splitlines() or [""])[0]
            lost = _gone(grace)
            who = f"{lost}; " if lost else ""
            _end_job(
                1, f"[rank {env.rank}] stopped, since another rank ended: {who}{type(error).__name__}: {first_line}"
            )
        if is_timeout(error) and (lost := _gone(grace)):
            error.add_note(lost)
        _record(error)
        _tell(error)
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


def _pulse() -> Pulse | None:
    # Not imported here: whoever has none needs no torch.
    module = sys.modules.get("mrlhf.parallel.pulse")
    return module.own_pulse() if module is not None else None


def _tell(error: BaseException) -> None:
    pulse = _pulse()
    if pulse is not None:
        pulse.tell(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


def _gone(seconds: float) -> str:
    """Which other ranks have ended, as far as can be told in ``seconds``, which this takes."""
    pulse = _pulse()
    if pulse is None:
        time.sleep(seconds)
        return ""
    gone = pulse.gone(seconds)
    if pulse.serves:
        # The others ask the store in this process the same, some of them later.
        time.sleep(seconds)
    return gone


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
