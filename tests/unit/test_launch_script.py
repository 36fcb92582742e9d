"""The 70B script and the job files beside it: what they would start, without starting it."""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.end_to_end.launching import SCRIPT, clean_environment

EXAMPLES = SCRIPT.parent
RENDEZVOUS = ["--rdzv-backend", "c10d", "--rdzv-endpoint"]
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_PROCID": "1"}


def command(script: Path, *arguments: str, **environment: str) -> list[str]:
    """The command that the script prints, without the Python and itself."""
    done = subprocess.run(
        ["bash", str(script), *arguments],
        env=clean_environment(PRINT_COMMAND="1", PYTHON=sys.executable, **environment),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def torchrun_options(*arguments: str, **environment: str) -> list[str]:
    """Options of torchrun; the arguments come after the script."""
    parts = command(SCRIPT, *arguments, **environment)
    assert parts[:3] == [sys.executable, "-m", "torch.distributed.run"]
    at = parts.index(str(SCRIPT))
    assert parts[at + 1 :] == list(arguments)
    return parts[3:at]


def test_it_is_python_and_shell() -> None:
    ast.parse(SCRIPT.read_text())
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0
    assert SCRIPT.stat().st_mode & 0o111, "torchrun --no-python starts it as a program"


def test_one_node() -> None:
    options = torchrun_options("trainer.iterations=2", "a=[1, 2]", NPROC_PER_NODE="8", MAX_RESTARTS="3")
    assert options == ["--nnodes", "1", "--nproc-per-node", "8", "--max-restarts", "3", "--standalone"]


def test_four_nodes() -> None:
    given = {"NNODES": "4", "MASTER_ADDR": "n0", "NPROC_PER_NODE": "8"}
    options = torchrun_options(**given, NODE_RANK="0")
    assert options[:2] == ["--nnodes", "4"]
    assert options[6:] == [*RENDEZVOUS, "n0:29500", "--rdzv-id", "ppo_70b", "--rdzv-conf", "is_host=1"]
    assert torchrun_options(**given, NODE_RANK="3")[-1] == "is_host=0"
    assert "--rdzv-conf" not in torchrun_options(**given)
    assert torchrun_options(**given, MASTER_PORT="1234", RDZV_ID="x")[8:] == [
        *RENDEZVOUS[2:],
        "n0:1234",
        "--rdzv-id",
        "x",
    ]


def test_one_task_per_node_under_slurm() -> None:
    nodes = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NODELIST": "gpu[007-010]"}
    options = torchrun_options(**STEP, **nodes, NPROC_PER_NODE="8")
    assert options[:4] == ["--nnodes", "4", "--nproc-per-node", "8"]
    assert options[6:] == [*RENDEZVOUS, "gpu007:29500", "--rdzv-id", "7.0", "--rdzv-conf", "is_host=0"]


@pytest.mark.parametrize(
    "environment",
    [
        {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", "RANK": "0"},
        {**STEP, "SLURM_STEP_NUM_TASKS": "32", "SLURM_STEP_NUM_NODES": "4"},
        {"OMPI_COMM_WORLD_RANK": "3"},
        {"PMI_RANK": "3"},
    ],
    ids=["no-python", "slurm", "open-mpi", "hydra"],
)
def test_a_rank_starts_itself(environment: dict[str, str]) -> None:
    assert command(SCRIPT, "a=b", **environment) == [sys.executable, "-u", str(SCRIPT), "a=b"]


def test_torchruns_own_variables_need_no_option() -> None:
    assert torchrun_options("a=b", PET_NNODES="4", PET_NODE_RANK="1", RANK="1") == []


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"NNODES": "4"}, "NNODES is 4, but MASTER_ADDR is not set"),
        ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "4"}, "batch script of a Slurm job of 4 nodes; start it on each node"),
    ],
)
def test_refusals(environment: dict[str, str], message: str) -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT)], env=clean_environment(**environment), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert message in done.stderr


def test_the_70b_run_without_a_launcher_says_how_to_start_it(tmp_path: Path) -> None:
    """For real, with the configuration beside the script; the option comes with the first thing that is wrong."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), f"data.prompts={tmp_path}/none.jsonl"],
        env=clean_environment(CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7"),
        cwd=EXAMPLES.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert f"data.prompts: {tmp_path}/none.jsonl is not a file" in done.stderr
    assert "the layout needs 32; 8 GPUs are visible here: start it with torchrun --nproc-per-node 8" in done.stderr


def test_mpirun() -> None:
    pytest.importorskip("mpi4py")
    script = EXAMPLES / "mpi" / "run_ppo.sh"
    one = command(script, "a=b", NP="4", MPIRUN_OPTIONS="--oversubscribe --tag-output")
    assert one[:5] == ["mpirun", "-n", "4", "--bind-to", "none"]
    assert one[-6:] == ["--oversubscribe", "--tag-output", sys.executable, "-u", str(SCRIPT), "a=b"]
    many = command(script, HOSTFILE="hosts", PER_NODE="4", NCCL_SOCKET_IFNAME="ib0")
    assert many[:3] == ["mpirun", "-n", "32"]
    assert " ".join(many[5:9]) == "--hostfile hosts --map-by ppr:4:node"
    assert "-x NCCL_SOCKET_IFNAME" in " ".join(many)


def test_mpirun_without_mpi4py(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('not here')")
    done = subprocess.run(
        ["bash", str(EXAMPLES / "mpi" / "run_ppo.sh")],
        env={**clean_environment(PYTHON=sys.executable), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "pip install 'mrlhf[mpi]'" in done.stderr


def test_the_kubernetes_manifest() -> None:
    manifest: dict[str, Any] = yaml.safe_load((EXAMPLES / "kubernetes" / "ppo_70b.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    assert sum(group["replicas"] for group in replicas.values()) * int(manifest["spec"]["nprocPerNode"]) == 32
    for group in replicas.values():
        (container,) = group["template"]["spec"]["containers"]
        assert container["name"] == "pytorch", "the operator looks for this name"
        assert container["command"] == ["torchrun", "examples/run_ppo_70b.sh"]
        assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == manifest["spec"]["nprocPerNode"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in group["template"]["spec"]["volumes"]}
