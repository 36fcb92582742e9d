"""Every way to start the 70B script, on two ranks: the same run, and the same numbers."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrlhf.parallel.heartbeat import read_beats
from tests.end_to_end.jobs import TinyJob, function_reward
from tests.end_to_end.launching import ROOT, SCRIPT, TORCHRUN, Processes, clean_environment, free_port, layout, run
from tests.tiny_run import read_lines, steady

FAKE_SRUN = [sys.executable, str(ROOT / "tests" / "end_to_end" / "fake_srun.py")]
MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none"]
PARITY = ["-m", "mrlhf", "parity", str(ROOT / "tests" / "data" / "standard_trajectory"), "tensor_model_parallel_size=2"]
Way = tuple[list[list[str]], list[dict[str, str]], str]


def slurm(tasks: int, nodes: int = 1) -> dict[str, str]:
    """What sbatch and srun leave, and a port that is free here."""
    return {"SLURM_NTASKS": str(tasks), "SLURM_NNODES": str(nodes), "MASTER_PORT": str(free_port())}


def mpi() -> dict[str, str]:
    """Open MPI refuses root otherwise."""
    if shutil.which("mpirun", path=clean_environment()["PATH"]) is None:
        pytest.skip("no mpirun; pip install 'mrlhf[mpi]'")
    pytest.importorskip("mpi4py")
    return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def by_torchrun(program: list[str]) -> Way:
    return [[*TORCHRUN, "--standalone", "--nproc-per-node", "2", *program]], [{}], "torchrun"


def by_torchrun_without_python(program: list[str]) -> Way:
    return [[*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--no-python", *program]], [{}], "torchrun"


def by_bash_on_two_nodes(program: list[str]) -> Way:
    nodes = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    environments = [{**nodes, "NODE_RANK": str(rank)} for rank in range(2)]
    return [["bash", *program]] * 2, environments, "torchrun"


def by_srun_with_a_task_per_node(program: list[str]) -> Way:
    return [[*FAKE_SRUN, "bash", *program]], [{**slurm(2, nodes=2), "NPROC_PER_NODE": "1"}], "torchrun"


def by_srun_with_a_task_per_rank(program: list[str]) -> Way:
    return [[*FAKE_SRUN, "bash", *program]], [slurm(2)], "slurm"


def by_mpirun(program: list[str]) -> Way:
    environment = {**mpi(), "NP": "2", "MPIRUN_OPTIONS": "--oversubscribe"}
    return [["bash", str(ROOT / "examples" / "mpi" / "run_ppo.sh"), *program[1:]]], [environment], "mpi"


WAYS = [
    by_torchrun,
    by_torchrun_without_python,
    by_bash_on_two_nodes,
    by_srun_with_a_task_per_node,
    by_srun_with_a_task_per_rank,
    by_mpirun,
]


@pytest.fixture(scope="module")
def first_rows() -> list[Any]:
    """The metrics of the first way that ran."""
    return []


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_all_ways_run_the_same(
    way: Callable[[list[str]], Way], tiny_job: TinyJob, tmp_path: Path, first_rows: list[Any]
) -> None:
    program = [str(SCRIPT), *layout(tp=2), f"trainer.output_dir={tmp_path}/out"]
    commands, environments, launcher = way(program)
    configured = {"MRLHF_CONFIG": str(tiny_job.config), "PYTHON": sys.executable}
    environments = [clean_environment(**configured, **environment) for environment in environments]
    with Processes(commands, environments) as processes:
        assert processes.wait(300) == [0] * len(commands)
        said = "".join(processes.outputs())
    assert said.count(f"{launcher}: world 2 = TP 2 x PP 1 x DP 1") == 1
    rows = steady(read_lines(tmp_path / "out" / "metrics.jsonl"))
    assert len(rows) == 1
    first_rows.append(rows)
    assert rows == first_rows[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "environment"),
    [
        pytest.param([*TORCHRUN, "--standalone", "--nproc-per-node", "2"], dict, id="torchrun"),
        pytest.param([*FAKE_SRUN, sys.executable], lambda: slurm(2), id="slurm"),
        pytest.param([*MPIRUN, "-n", "2", sys.executable], mpi, id="mpi"),
    ],
)
def test_parity_under_each_launcher(command: list[str], environment: Callable[[], dict[str, str]]) -> None:
    status, said = run([*command, *PARITY], clean_environment(**environment()), timeout=400)
    assert status == 0, said


@pytest.mark.slow
def test_four_mpi_ranks(tiny_job: TinyJob, tmp_path: Path) -> None:
    """TP 2 x DP 2, and a message from one of them that fails."""
    program = [sys.executable, "-m", "mrlhf", "ppo", str(tiny_job.config), *layout(tp=2)]
    status, said = run(
        [*MPIRUN, "-n", "4", *program, f"trainer.output_dir={tmp_path}"], clean_environment(**mpi()), 300
    )
    assert status == 0, said
    assert said.count("mpi: world 4 = TP 2 x PP 1 x DP 2") == 1


def test_one_worker_per_node_is_told_about_the_other_gpus(tiny_job: TinyJob) -> None:
    """What torchrun does without --nproc-per-node. Refused within seconds, before the ranks look for each other."""
    environment = clean_environment(MRLHF_CONFIG=str(tiny_job.config), CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7")
    start = time.monotonic()
    status, said = run([*TORCHRUN, "--nnodes", "1", SCRIPT, *layout(tp=2, pp=2)], environment)
    assert status != 0
    assert time.monotonic() - start < 60
    assert "world size 1 is not a multiple of TP 2 x PP 2" in said
    assert "torchrun started 1 process on this node, 1 in all, the layout needs 4; 8 GPUs are visible here" in said
    assert "give torchrun --nproc-per-node 8 (or export PET_NPROC_PER_NODE)" in said


@pytest.fixture
def slurm_commands(tmp_path: Path) -> Path:
    """A folder for PATH with an srun, and an scontrol that writes down what it was asked for."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "srun").write_text(f'#!/bin/sh\nexec {" ".join(FAKE_SRUN)} "$@"\n')
    (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol.log\n')
    for file in folder.iterdir():
        file.chmod(0o755)
    return folder


@pytest.mark.slow
def test_the_batch_job_saves_at_the_signal_and_goes_back_into_the_queue(
    tiny_job: TinyJob, tmp_path: Path, slurm_commands: Path
) -> None:
    output = tmp_path / "out"
    arguments = [str(tiny_job.config), *layout(tp=2), "trainer.overwrite=false", f"trainer.output_dir={output}"]
    arguments += [function_reward("tinyrewards:vowels"), "trainer.iterations=400"]
    environment = clean_environment(**slurm(2), SLURM_JOB_ID="4711", PYTHON=sys.executable, MRLHF_ROOT=str(ROOT))
    environment["PATH"] = f"{slurm_commands}:{environment['PATH']}"
    environment["PYTHONPATH"] += f":{tiny_job.folder}"
    command = ["bash", str(ROOT / "examples" / "slurm" / "ppo.sbatch"), *arguments]
    log = tmp_path / "scontrol.log"
    with Processes([command], [environment]) as job:
        while not (output / "metrics.jsonl").exists():
            assert job.processes[0].poll() is None
            time.sleep(0.1)
        for beat in read_beats(output / "heartbeat", 2):
            # Slurm's --signal reaches every task.
            job.signal(beat.pid, "SIGUSR1")
        assert job.wait(120) == [75]
        said = job.outputs()[0]
    assert "SIGUSR1" in said
    assert log.read_text() == "requeue 4711\n"
    done = len(read_lines(output / "metrics.jsonl"))
    # From the queue, the same command; this time to the end.
    command.append(f"trainer.iterations={done + 1}")
    status, said = run(command, environment, 200)
    assert status == 0, said
    assert f"goes on after iteration {done} " in said
    assert log.read_text() == "requeue 4711\n", "a job that is done is not queued again"
    assert len(read_lines(output / "metrics.jsonl")) == done + 1
