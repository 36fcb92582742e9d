"""How ranks that torchrun starts again find each other, and not the addresses that dead ranks left.

torchrun's agent keeps one store for all starts of its ranks, and torch puts the keys of the process groups there
without a mark of the start. Ranks of a second start then read the addresses of the first one and wait for processes
that are dead (https://github.com/pytorch/pytorch/issues/135712). ``TORCHELASTIC_RESTART_COUNT`` is no mark: every
agent counts its own restarts. So rank 0 invents one, and hands it out.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

_POLL_SECONDS = 0.02


def keeps_store(environ: Mapping[str, str]) -> bool:
    """Whether torchrun's agent serves the store, beyond the life of the ranks."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def join_store(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> tuple[str, dist.Store]:
    """The store in which the ranks of this start meet, and the prefix of keys that are its own.

    Raises:
        RuntimeError: ranks did not come within ``timeout``; under torchrun the message names them.
    """
    serves = rank == 0 and not keeps_store(os.environ)
    base = dist.TCPStore(
        address, port, world_size, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True
    )
    # A store of rank 0 ends with it, and the next start has a new one.
    prefix = f"mrlhf/{agree(base, rank, world_size, timeout)}" if keeps_store(os.environ) else "mrlhf"
    return prefix, dist.PrefixStore(prefix, base)


def agree(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A mark that no earlier start had, the same on every rank.

    A dead rank may have left its greeting under the same name, so rank 0 answers whatever greeting is there until it is
    told that the answer has arrived. Answers have the greeting in their name: an old one is never taken.
    """
    if rank != 0:
        greeting = uuid.uuid4().hex
        store.set(f"mrlhf/greeting/{rank}", greeting)
        mark = store.get(f"mrlhf/mark/{rank}/{greeting}").decode()
        store.set(f"mrlhf/arrived/{mark}/{rank}", "")
        return mark
    mark, missing = uuid.uuid4().hex, list(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        for other in missing:
            if store.check([f"mrlhf/greeting/{other}"]):
                store.set(f"mrlhf/mark/{other}/{store.get(f'mrlhf/greeting/{other}').decode()}", mark)
        time.sleep(_POLL_SECONDS)
        missing = [other for other in missing if not store.check([f"mrlhf/arrived/{mark}/{other}"])]
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"ranks {missing} did not come within {timeout.total_seconds():g} s")
    return mark
