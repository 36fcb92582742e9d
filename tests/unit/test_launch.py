"""Launch environments, the rank grid, and real jobs in which a rank fails."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrlhf.errors import ConfigError
from mrlhf.parallel.launch import (
    LaunchEnv,
    detect_launch,
    is_peer_failure,
    resolve_address,
    stopped_status,
)
from mrlhf.parallel.layout import Coordinates, RankGrid, data_parallel_slice
from mrlhf.parallel.slurm import first_slurm_host
from mrlhf.planner import ParallelSizes

ROOT = Path(__file__).parents[2]
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),1",
    "SLURM_STEP_NODELIST": "gpu[007-008,12]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_single_process() -> None:
    assert detect_launch({"PATH": "/bin", "MASTER_ADDR": "n0"}) == LaunchEnv()


def test_torchrun_comes_first() -> None:
    assert detect_launch({**OPEN_MPI, **SLURM, **TORCHRUN}) == LaunchEnv(5, 8, 1, 4, "n0", 29500, "torchrun")


def test_slurm() -> None:
    env = detect_launch(SLURM)
    assert env == LaunchEnv(5, 7, 2, 3, "gpu007", env.master_port, "slurm")
    assert env.master_port is not None
    assert 15000 <= env.master_port < 30000
    assert detect_launch({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}).master_port == (
        env.master_port
    )
    given_address = detect_launch({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (given_address.master_addr, given_address.master_port) == ("head", 1234)
    assert detect_launch({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == LaunchEnv()


def test_batch_script_without_srun_is_refused() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "a", "SLURM_LOCALID": "0"}
    with pytest.raises(ConfigError, match="start the command with srun"):
        detect_launch(batch)


def test_mpirun_inside_a_slurm_allocation_wins() -> None:
    daemon = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    assert detect_launch({**daemon, **OPEN_MPI}).launcher == "mpi"
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "a", "SLURM_LOCALID": "0"}
    assert detect_launch({**batch, **OPEN_MPI}).launcher == "mpi"
    same = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "7"}
    assert detect_launch({**SLURM, **same}).launcher == "slurm"


def test_mpi_flavours() -> None:
    assert detect_launch(OPEN_MPI) == LaunchEnv(3, 4, 1, 2, None, None, "mpi")
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert detect_launch(hydra) == LaunchEnv(1, 2, 1, 2, None, None, "mpi")
    given_address = detect_launch({**OPEN_MPI, "MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert resolve_address(given_address) == given_address


def test_mpi_without_mpi4py_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigError, match=r"pip install 'mrlhf\[mpi\]', or set MASTER_ADDR and MASTER_PORT"):
        resolve_address(detect_launch(OPEN_MPI))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK, MASTER_ADDR, MASTER_PORT are missing"),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 is not below the world size 8"),
        ({**TORCHRUN, "RANK": "x"}, "RANK is 'x', expected a whole number"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 is not below the local world size 4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "local world size 9 is over the world size 8"),
        ({**SLURM, "SLURM_PROCID": "7"}, "rank 7 is not below the world size 7"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}, "set MASTER_ADDR"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_LOCALID"}, "did not set SLURM_LOCALID"),
    ],
)
def test_inconsistent_environments(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect_launch(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu[007-009,12],cpu1", "gpu007"),
        ("a,b[1-2]", "a"),
        ("rack1-n[3,5]", "rack1-n3"),
        ("n[1-2].local", "n1.local"),
        ("r[2-3]n[1,4-5],x", "r2n1"),
    ],
)
def test_first_slurm_host(nodes: str, first: str) -> None:
    assert first_slurm_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", " ", ",a", "gpu[1-2", "gpu]", "gpu[]"])
def test_lists_of_hosts_that_are_none(nodes: str) -> None:
    with pytest.raises(ConfigError, match="node list .* cannot be read; set MASTER_ADDR"):
        first_slurm_host(nodes)


def test_peer_failures_are_told_from_causes() -> None:
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3"
    assert is_peer_failure(RuntimeError(gloo))
    assert not is_peer_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_peer_failure(ConnectionResetError("Connection reset by peer"))  # a reward function's own server
    assert not is_peer_failure(RuntimeError("gloo: Timed out waiting 1800000ms for recv operation to complete"))


def test_groups_by_hand() -> None:
    grid = RankGrid(ParallelSizes(8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2))
    assert grid.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("pp") == grid.groups("embd") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.groups("mp") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert grid.groups("cp") == [[rank] for rank in range(8)]
    assert grid.groups("dp_cp") == grid.groups("dp")
    assert grid.coordinates(6) == Coordinates(tp=0, cp=0, dp=1, pp=1)
    with pytest.raises(ConfigError, match="rank 8 is outside a world of 8"):
        grid.coordinates(8)


def test_groups_with_context_parallel_and_middle_stages() -> None:
    sizes = ParallelSizes(12, tensor_model_parallel_size=2, pipeline_model_parallel_size=3, context_parallel_size=2)
    grid = RankGrid(sizes)
    assert grid.groups("cp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11]]
    assert grid.groups("tp_cp") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert grid.groups("mp") == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    assert grid.groups("embd") == [[0, 8], [1, 9], [2, 10], [3, 11]]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_grid_is_a_partition(tp: int, cp: int, dp: int, pp: int) -> None:
    sizes = ParallelSizes(
        tp * cp * dp * pp,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
    )
    grid = RankGrid(sizes)
    world = list(range(sizes.world_size))
    assert [grid.rank(grid.coordinates(rank)) for rank in world] == world
    for kind, size in (("tp", tp), ("cp", cp), ("dp", dp), ("pp", pp), ("mp", tp * pp), ("dp_cp", dp * cp)):
        groups = grid.groups(kind)
        assert {len(ranks) for ranks in groups} == {size}
        assert sorted(rank for ranks in groups for rank in ranks) == world


def test_grid_agrees_with_megatron() -> None:
    from megatron.core.parallel_state import RankGenerator

    sizes = ParallelSizes(24, tensor_model_parallel_size=2, pipeline_model_parallel_size=3, context_parallel_size=2)
    theirs = RankGenerator(tp=2, ep=1, dp=2, pp=3, cp=2, order="tp-cp-ep-dp-pp")
    ours = RankGrid(sizes)
    for kind, token in (("tp", "tp"), ("cp", "cp"), ("dp", "dp"), ("pp", "pp"), ("mp", "tp-pp"), ("dp_cp", "dp-cp")):
        assert ours.groups(kind) == theirs.get_ranks(token), kind


def test_data_parallel_slice() -> None:
    rows = list(range(6))
    assert [rows[data_parallel_slice(6, rank, 3)] for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ConfigError, match="7 rows cannot be shared evenly by DP 3"):
        data_parallel_slice(7, 0, 3)


JOB = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from mrlhf.errors import DataError
from mrlhf.parallel.launch import detect_launch, initialize, run_guarded

env = detect_launch(os.environ)

def main():
    initialize(env, "gloo", timedelta(minutes=10))
    dist.all_reduce(torch.ones(1))
    if sys.argv[1] == "ours":
        raise DataError("prompts.jsonl:3: not an object")
    if env.rank == 1:
        raise ValueError("the real cause")
    dist.all_reduce(torch.ones(1))

run_guarded(main, env, grace=float(sys.argv[2]))
print("not reached")
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


def job_environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


def test_a_failing_rank_ends_a_torchrun_job_with_its_own_traceback(job: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-port"]
    command += [str(free_port()), str(job), "fail", "60"]
    start = time.monotonic()
    done = subprocess.run(command, env=job_environment(), capture_output=True, text=True, timeout=120)
    # Well under the grace of the others and the time-out of the collective they wait in.
    assert time.monotonic() - start < 60
    assert done.returncode != 0
    assert "[rank 1] ValueError: the real cause" in done.stderr
    assert "[rank 0]" not in done.stderr
    assert "[rank 2]" not in done.stderr
    # torchrun's closing summary names the same cause, so it is also the last thing shown.
    assert done.stderr.rindex("ValueError: the real cause") > done.stderr.rindex("Root Cause")
    assert "not reached" not in done.stdout


@pytest.mark.parametrize("mode", ["fail", "ours"])
def test_without_a_launcher_that_kills_every_rank_still_ends(job: Path, mode: str) -> None:
    port, world = str(free_port()), 2
    ranks = []
    for rank in range(world):
        environment = job_environment(
            RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port
        )
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(job), mode, "2"],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [rank.communicate(timeout=90) for rank in ranks]
    first, second = (error.strip().splitlines() for _, error in outputs)
    if mode == "fail":
        assert [rank.returncode for rank in ranks] == [1, 1]
        assert second[-1] == "[rank 1] ValueError: the real cause"
        assert any("[rank 1] Traceback" in line for line in second)
        assert first[-1].startswith("[rank 0] stopped, since another rank ended: ")
        assert "rank 1 on node " in first[-1]
        assert "(ValueError: the real cause) gave no sign of life for 2 s; " in first[-1]
        assert not any("Traceback" in line for line in first)
    else:
        assert [rank.returncode for rank in ranks] == [2, 2]
        assert first[-1] == "error: prompts.jsonl:3: not an object"
        assert second[-1] == "[rank 1] error: prompts.jsonl:3: not an object"
        assert not any("Traceback" in line for line in first + second)
    assert not any("not reached" in output for output, _ in outputs)


def test_mpirun_starts_ranks_that_find_each_other_and_fail_together(job: Path) -> None:
    pytest.importorskip("mpi4py")
    mpirun = Path(sys.executable).parent / "mpirun"
    if not mpirun.exists():
        pytest.skip("no mpirun beside this Python; pip install 'mrlhf[mpi]'")
    command = [str(mpirun), "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, str(job), "fail", "60"]
    start = time.monotonic()
    done = subprocess.run(command, env=job_environment(), capture_output=True, text=True, timeout=120)
    assert time.monotonic() - start < 60
    assert done.returncode != 0
    assert "[rank 1] ValueError: the real cause" in done.stderr
    assert "[rank 0]" not in done.stderr


def test_status_of_a_run_that_was_asked_to_stop() -> None:
    assert stopped_status({}) == 75
    assert stopped_status({"TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RESTART_COUNT": "0"}) == 75
    assert stopped_status({"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "3"}) == 75
    # torchrun would start it again at once.
    assert stopped_status({"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "1"}) == 0
