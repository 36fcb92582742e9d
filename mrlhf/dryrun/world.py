"""A world of which this process is one rank and the others do not exist."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from mrlhf.parallel.launch_env import LaunchEnv
from mrlhf.parallel.products import chosen


@contextmanager
def fake_world(rank: int, world_size: int, gpus_per_node: int = 8) -> Iterator[LaunchEnv]:
    """Join a world of ``world_size`` ranks through torch's ``fake`` backend, which transports nothing; then leave it.

    Raises:
        RuntimeError: the process is in a world already.
    """
    # Registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("a dry run needs a process that has joined no world")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        # The products of the run, not those of the processor that walks through it.
        with chosen("native"):
            yield LaunchEnv(
                rank=rank,
                world_size=world_size,
                local_rank=rank % gpus_per_node,
                local_world_size=min(world_size, gpus_per_node),
            )
    finally:
        dist.destroy_process_group()


@contextmanager
def quiet() -> Iterator[None]:
    """Without Megatron-Core's remarks on every model that is built."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
