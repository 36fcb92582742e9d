"""What ranks under a real mpirun learn from the communicators, and what they say without mpi4py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.end_to_end.launching import clean_environment, run

MPIRUN = Path(sys.executable).parent / "mpirun"
COMMAND = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable]
MEET = """
import json, os
from dataclasses import asdict
from mrlhf.parallel.launch import detect_launch, resolve_address
for name in ("LOCAL_RANK", "LOCAL_SIZE"):
    del os.environ[f"OMPI_COMM_WORLD_{name}"]  # not every MPI has them
before = detect_launch(os.environ)
print(json.dumps({"before": before.local_rank, **asdict(resolve_address(before))}))
"""
ALONE = """
import os, sys
from mrlhf.parallel.launch import detect_launch, resolve_address, run_guarded
sys.modules["mpi4py"] = None
env = detect_launch(os.environ)
run_guarded(lambda: resolve_address(env), env, grace=3.0)
"""


@pytest.fixture(autouse=True)
def _mpi() -> None:
    pytest.importorskip("mpi4py")
    if not MPIRUN.exists():
        pytest.skip("no mpirun beside this Python; pip install 'mrlhf[mpi]'")


def test_ranks_and_address_come_from_the_communicators() -> None:
    status, said = run([*COMMAND, "-c", MEET], clean_environment(), timeout=60)
    assert status == 0, said
    ranks = sorted((json.loads(line) for line in said.splitlines()), key=lambda rank: rank["rank"])
    assert [(r["rank"], r["local_rank"], r["world_size"], r["local_world_size"]) for r in ranks] == [
        (0, 0, 3, 3),
        (1, 1, 3, 3),
        (2, 2, 3, 3),
    ]
    assert {r["master_addr"] for r in ranks} == {"127.0.0.1"}
    assert len({r["master_port"] for r in ranks}) == 1
    assert all(r["launcher"] == "mpi" for r in ranks)


def test_without_mpi4py_one_message_says_what_to_install() -> None:
    status, said = run([*COMMAND, "-c", ALONE], clean_environment(), timeout=60)
    assert status == 2, said
    assert said.count("error: mpirun started this job, and ranks find each other through mpi4py") == 1
    assert "pip install 'mrlhf[mpi]', or set MASTER_ADDR and MASTER_PORT" in said
    assert "Traceback" not in said
