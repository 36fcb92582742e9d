"""The 70B script on four hosts with networks of their own.

``python -m tests.end_to_end.test_four_hosts`` does the same as a script.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.end_to_end.hosts import INTERFACE, Host, make_hosts, unplug, why_not
from tests.end_to_end.jobs import TinyJob, function_reward, write_tiny_job
from tests.end_to_end.launching import SCRIPT, Processes, clean_environment, layout
from tests.tiny_run import read_lines

HOSTS = 4
PORT = 29500


@pytest.fixture(scope="module")
def permitted() -> None:
    reason = why_not()
    if reason:
        pytest.skip(f"no hosts can be made: {reason}")


def start(hosts: list[Host], job: TinyJob, *overrides: str) -> Processes:
    """``bash examples/run_ppo_70b.sh`` on each host."""
    environment = clean_environment(
        NNODES=str(len(hosts)),
        NPROC_PER_NODE="1",
        MASTER_ADDR=hosts[0].address,
        MASTER_PORT=str(PORT),
        MRLHF_CONFIG=str(job.config),
        PYTHON=sys.executable,
        # Their names are in no DNS.
        GLOO_SOCKET_IFNAME=INTERFACE,
    )
    environment["PYTHONPATH"] += f":{job.folder}"
    arguments = [*layout(tp=2, pp=2), *overrides]
    commands = [host.command("bash", str(SCRIPT), *arguments) for host in hosts]
    environments = [
        {**environment, "NODE_RANK": str(index), "PET_LOCAL_ADDR": host.address} for index, host in enumerate(hosts)
    ]
    return Processes(commands, environments)


def train_to_the_end(job: TinyJob, folder: Path) -> None:
    """One iteration on all of them."""
    with make_hosts(HOSTS) as hosts, start(hosts, job, f"trainer.output_dir={folder}/out") as nodes:
        assert nodes.wait(400) == [0] * HOSTS
        said = nodes.outputs()
    assert sum("torchrun: world 4 = TP 2 x PP 2 x DP 1" in text for text in said) == 1
    assert len(read_lines(folder / "out" / "metrics.jsonl")) == 1


def lose_a_host(job: TinyJob, folder: Path, lost: int = 2, *, silently: bool = False) -> str:
    """Kill everything on one host, or only take its cable out; what the others say then."""
    overrides = (function_reward("tinyrewards:vowels"), "trainer.iterations=500", f"trainer.output_dir={folder}/out")
    with make_hosts(HOSTS) as hosts, start(hosts, job, *overrides) as nodes:
        end = time.monotonic() + 300
        while not (folder / "out" / "metrics.jsonl").exists():
            assert time.monotonic() < end
            time.sleep(0.2)
        if silently:
            unplug(hosts[lost])
        else:
            nodes.kill(lost)
        # launch.timeout_minutes is 1; silence is noticed only then.
        end = time.monotonic() + (120 if silently else 60)
        others = [process for index, process in enumerate(nodes.processes) if index != lost]
        assert all(process.wait(max(end - time.monotonic(), 0.1)) for process in others)
        return "".join(nodes.outputs())


@pytest.mark.slow
@pytest.mark.usefixtures("permitted")
def test_four_hosts_train_to_the_end(tiny_job: TinyJob, tmp_path: Path) -> None:
    train_to_the_end(tiny_job, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("permitted")
def test_a_lost_host_is_named(tiny_job: TinyJob, tmp_path: Path) -> None:
    said = lose_a_host(tiny_job, tmp_path)
    assert "stopped, since another rank ended: node node2 (rank " in said
    assert ", all of it) gave no sign of life for 5 s" in said


@pytest.mark.slow
@pytest.mark.usefixtures("permitted")
def test_a_host_that_falls_silent_is_named(tiny_job: TinyJob, tmp_path: Path) -> None:
    """No connection ends, as when a machine loses power: there are only time-outs."""
    said = lose_a_host(tiny_job, tmp_path, silently=True)
    assert re.search(r"warning: no sign of life for \d+ s of node node2 \(rank \d, all of it\)", said)
    assert re.search(r"node node2 \(rank \d, all of it\) gave no sign of life for 5 s", said)


def main() -> None:
    """Both, with what was said."""
    reason = why_not()
    if reason:
        sys.exit(f"no hosts can be made: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        job = write_tiny_job(Path(folder) / "job")
        train_to_the_end(job, Path(folder) / "whole")
        print("four hosts trained to the end")
        said = lose_a_host(job, Path(folder) / "lost")
        print("\n".join(line for line in said.splitlines() if "stopped, since" in line))


if __name__ == "__main__":
    main()
