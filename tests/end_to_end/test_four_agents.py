"""Four torchrun agents on this machine as four nodes: to the end of a run, and one of them lost on the way."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.jobs import TinyJob, function_reward
from tests.end_to_end.launching import SCRIPT, TORCHRUN, Processes, clean_environment, free_port, layout, of_70b
from tests.tiny_run import read_lines

NODES = 4


def node(job: TinyJob, *overrides: str, restarts: int = 0) -> tuple[list[str | Path], dict[str, str]]:
    """The literal command of a node and its environment: what torchrun needs besides comes from its own variables."""
    environment = clean_environment(
        PET_NPROC_PER_NODE="1",
        PET_RDZV_BACKEND="c10d",
        PET_RDZV_ENDPOINT=f"localhost:{free_port()}",
        PET_MAX_RESTARTS=str(restarts),
        MRLHF_CONFIG=str(job.config),
    )
    environment["PYTHONPATH"] += f":{job.folder}"
    return [*TORCHRUN, "--nnodes", str(NODES), SCRIPT, *layout(tp=2, pp=2), *overrides], environment


def agents(job: TinyJob, *overrides: str) -> Processes:
    """All four."""
    command, environment = node(job, *overrides)
    return Processes([command] * NODES, [environment] * NODES)


def wait_for(condition: Callable[[], bool], timeout: float = 300.0) -> None:
    """Poll."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
def test_four_agents_train_to_the_end(tiny_job: TinyJob, tmp_path: Path) -> None:
    with agents(tiny_job, f"trainer.output_dir={tmp_path}/out") as nodes:
        assert nodes.wait(400) == [0] * NODES
        said = nodes.outputs()
    assert sum("torchrun: world 4 = TP 2 x PP 2 x DP 1" in text for text in said) == 1
    assert len(read_lines(tmp_path / "out" / "metrics.jsonl")) == 1


@pytest.mark.slow
def test_four_agents_train_by_the_70b_configuration_itself(tiny_job: TinyJob, tmp_path: Path) -> None:
    """Without MRLHF_CONFIG: what is in the example's file, on tiny models."""
    command, environment = node(tiny_job)
    del environment["MRLHF_CONFIG"]
    command = [*TORCHRUN, "--nnodes", str(NODES), SCRIPT, *of_70b(tiny_job), f"trainer.output_dir={tmp_path}/out"]
    with Processes([command] * NODES, [environment] * NODES) as nodes:
        assert nodes.wait(400) == [0] * NODES
        said = " ".join("".join(nodes.outputs()).split())
    assert "torchrun: world 4 = TP 2 x PP 2 x DP 1, sequence parallel; layers: local" in said
    assert "fp8: hybrid, tensorwise, emulated (actor, reference, critic, reward0)" in said
    (row,) = read_lines(tmp_path / "out" / "metrics.jsonl")
    # One row in inference and in training alike, so that FP8's scales are the same.
    assert row["ratio_error_before_update"] == 0


@pytest.mark.slow
def test_an_agent_that_is_lost_ends_the_job_and_is_named(tiny_job: TinyJob, tmp_path: Path) -> None:
    overrides = (function_reward("tinyrewards:vowels"), "trainer.iterations=500", f"trainer.output_dir={tmp_path}/out")
    with agents(tiny_job, *overrides) as nodes:
        wait_for((tmp_path / "out" / "metrics.jsonl").exists)
        nodes.kill(2)
        begun = time.monotonic()
        statuses = nodes.wait(60)
        seconds = time.monotonic() - begun
        said = nodes.outputs()
    # launch.timeout_minutes is 1.
    assert seconds < 60
    assert all(statuses)
    text = "".join(said)
    assert "stopped, since another rank ended" in text
    assert f"on node {socket.gethostname()} gave no sign of life" in text


@pytest.mark.slow
def test_a_node_that_comes_back_joins_a_job_that_goes_on(tiny_job: TinyJob, tmp_path: Path) -> None:
    """With --max-restarts the others wait for a new agent, and the run goes on from its checkpoint.

    torchrun's shared store would keep the newcomer waiting: only the first round of a job tells its address.
    """
    output = tmp_path / "out"
    overrides = [function_reward("tinyrewards:vowels"), "trainer.iterations=6", f"trainer.output_dir={output}"]
    overrides += ["trainer.resume=auto", "trainer.overwrite=false", "checkpoint.interval=1"]
    command, environment = node(tiny_job, *overrides, restarts=2)
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # The first one serves the rendezvous, as the node named by --rdzv-endpoint does.
    environments = [{**environment, "PET_RDZV_CONF": f"is_host={int(index == 0)}"} for index in range(NODES)]
    with Processes([command] * NODES, environments) as nodes:
        wait_for((output / "checkpoints" / "iter_0000002").exists)
        lost = next(i for i, text in enumerate(nodes.outputs()) if i and "torchrun: world 4" not in text)
        nodes.kill(lost)
        nodes.start(command, environments[lost])
        statuses = nodes.wait(300)
        said = nodes.outputs()
    assert statuses == [-9 if index == lost else 0 for index in range(NODES + 1)]
    assert "stopped, since another rank ended" in "".join(said)
    rows = read_lines(output / "metrics.jsonl")
    assert len(rows) == 6


@pytest.mark.slow
def test_one_worker_per_node_is_refused_on_all_nodes(tiny_job: TinyJob, tmp_path: Path) -> None:
    """Within seconds: nobody waits for ranks that were never started."""
    sizes = layout(tp=2, pp=4)
    command, environment = node(tiny_job, *sizes, f"trainer.output_dir={tmp_path}/out")
    environment["CUDA_VISIBLE_DEVICES"] = "0,1"
    begun = time.monotonic()
    with Processes([command] * NODES, [environment] * NODES) as nodes:
        assert all(nodes.wait(120))
        said = "".join(nodes.outputs())
    assert time.monotonic() - begun < 120
    assert "\nerror: these sizes cannot work together:" in f"\n{said}"
    assert "torchrun started 1 process on this node, 4 in all, the layout needs 8; 2 GPUs are visible here" in said
    assert "give torchrun --nproc-per-node 2 (or export PET_NPROC_PER_NODE)" in said
