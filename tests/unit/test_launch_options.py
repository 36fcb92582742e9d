"""A world smaller than the layout: the message says which option of the launcher was forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrlhf.errors import ConfigError
from mrlhf.parallel.launch import device_index
from mrlhf.parallel.launch_env import LaunchEnv, explained, missing_options, visible_gpus
from mrlhf.parallel.slurm import tasks_on_node

NEEDED = 32


def started(launcher: str, nodes: int, per_node: int) -> LaunchEnv:
    return LaunchEnv(0, nodes * per_node, 0, per_node, "n0", 29500, launcher)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("env", "gpus", "options"),
    [
        # One process on each of four nodes: torchrun was not told how many.
        (started("torchrun", 4, 1), 8, "give torchrun --nproc-per-node 8 (or export PET_NPROC_PER_NODE)"),
        (started("torchrun", 1, 1), 8, "give torchrun --nproc-per-node 8 --nnodes 4 (or export"),
        (started("torchrun", 2, 8), 8, "give torchrun --nnodes 4"),
        (started("torchrun", 4, 4), 0, "give torchrun --nproc-per-node 8 (or export"),
        (started("slurm", 4, 1), 8, "give srun --ntasks-per-node 8"),
        (started("slurm", 2, 8), 8, "give srun --nodes 4"),
        (started("mpi", 1, 8), 8, "give mpirun -n 32 --map-by ppr:8:node"),
        (started("mpi", 1, 8), 0, "give mpirun -n 32"),
        (LaunchEnv(), 8, "start it with torchrun --nproc-per-node 8 --nnodes 4"),
    ],
)
def test_options(env: LaunchEnv, gpus: int, options: str) -> None:
    hint = missing_options(env, NEEDED, gpus)
    assert hint is not None
    assert options in hint
    assert "the layout needs 32" in hint
    assert ("8 GPUs are visible here" in hint) == (gpus > env.local_world_size)


def test_enough_ranks_need_no_option() -> None:
    assert missing_options(started("torchrun", 4, 8), NEEDED, 8) is None
    assert missing_options(started("torchrun", 6, 8), NEEDED, 8) is None


def test_the_option_follows_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    with (
        pytest.raises(ConfigError, match=r"(?s)world size 4 .*\ntorchrun started 1 process on this node, 4 in all"),
        explained(started("torchrun", 4, 1), NEEDED),
    ):
        raise ConfigError("world size 4 is not a multiple of 32")
    with pytest.raises(ConfigError, match=r"^heads$"), explained(started("torchrun", 4, 8), NEEDED):
        raise ConfigError("heads")


def test_gpus_are_counted_without_torch(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == 0
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,GPU-abc,5"}, tmp_path) == 3
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-1a2b-11,GPU-2c-1d"}, tmp_path) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,-1,2"}, tmp_path) == 1
    assert visible_gpus({}, tmp_path / "none") == 0


def test_the_gpu_of_a_rank() -> None:
    env = LaunchEnv(5, 8, 1, 4, "n0", 29500, "slurm")
    assert device_index(env, 4, {}) == 1
    assert device_index(env, 1, {"SLURM_GPUS_PER_TASK": "1"}) == 0
    with pytest.raises(ConfigError, match="local rank 1 has no GPU of its own, 1 visible"):
        device_index(env, 1, {})


def test_tasks_of_a_node() -> None:
    assert [tasks_on_node("2(x3),1", node) for node in range(5)] == [2, 2, 2, 1, None]
