"""Ranks of a second start do not meet what the first one left in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from mrlhf.parallel.rendezvous import agree, join_store, keeps_store

WORLD = 3
TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def agent() -> dist.TCPStore:
    """The store that torchrun's agent serves."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _start(agent: dist.TCPStore) -> list[str]:
    def rank_main(rank: int) -> str:
        client = dist.TCPStore("127.0.0.1", agent.port, is_master=False, timeout=TIMEOUT, wait_for_workers=False)
        return agree(client, rank, WORLD, TIMEOUT)

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(rank_main, range(WORLD)))


def test_every_start_has_its_own_mark(agent: dist.TCPStore) -> None:
    first, second = _start(agent), _start(agent)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


def test_greetings_of_ranks_that_died_while_they_waited(agent: dist.TCPStore) -> None:
    for rank in range(1, WORLD):
        agent.set(f"mrlhf/greeting/{rank}", "dead")
    marks = _start(agent)
    assert len(set(marks)) == 1


def test_ranks_that_do_not_come_are_named(agent: dist.TCPStore) -> None:
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] did not come within 0.2 s"):
        agree(agent, 0, WORLD, timedelta(seconds=0.2))


def test_keys_of_another_start_are_not_seen(agent: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def store_of(rank: int) -> dist.Store:
        return join_store("127.0.0.1", agent.port, rank, 2, TIMEOUT)[1]

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(store_of, range(2))
    one.set("address", "here")
    assert two.get("address") == b"here"
    with ThreadPoolExecutor(2) as pool:
        again = list(pool.map(store_of, range(2)))
    assert not any(store.check(["address"]) for store in again)


def test_only_torchruns_store_outlives_its_ranks() -> None:
    assert keeps_store({"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert not keeps_store({"TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert not keeps_store({})
