"""Who has gone, as the signs of life in the store tell it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from mrlhf.parallel.pulse import Pulse, Sign, describe, own_pulse, start_pulse

HOST = socket.gethostname()


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def pulses(store: dist.TCPStore) -> Iterator[list[Pulse]]:
    made = [Pulse("127.0.0.1", store.port, "test", rank, 3) for rank in range(3)]
    yield made
    for pulse in made:
        pulse.leave()


def test_only_the_rank_that_stands_still_has_gone(pulses: list[Pulse], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrlhf.parallel.pulse.INTERVAL_SECONDS", 0.1)
    first, second, third = pulses
    for living in (first, second):
        living.start()
    begun = time.monotonic()
    said = second.gone(1.0)
    assert 1 <= time.monotonic() - begun < 6
    assert said == f"rank 2 on node {HOST} gave no sign of life for 1 s"
    third.tell("ValueError: the real cause")
    assert f"rank 2 on node {HOST} (ValueError: the real cause) gave no sign" in first.gone(1.0)
    third.leave()
    assert first.signs()[2] == Sign(HOST, None)
    assert first.gone(1.0) == ""


def test_a_store_that_has_gone_names_its_node(store: dist.TCPStore) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pulse = Pulse("127.0.0.1", server.port, "test", 0, 1)
    del server
    assert pulse.gone(0.2).startswith("the node 127.0.0.1, where the ranks met")
    pulse.tell("nobody hears it")
    pulse.leave()


def test_a_long_silence_is_told_once(pulses: list[Pulse], capsys: pytest.CaptureFixture[str]) -> None:
    signs = {0: Sign("n0", 40), 1: Sign("n1", 3), 2: Sign("n2", None)}
    for _ in range(2):
        pulses[0]._warn(signs, {0: 0.0, 1: 31.0, 2: 60.0})
    assert capsys.readouterr().err == "warning: no sign of life for 31 s of node n1 (rank 1, all of it)\n"


def test_nodes_and_ranks_are_named() -> None:
    signs = {rank: Sign(f"n{rank // 2}", 1) for rank in range(6)}
    assert describe(signs, {2: "", 3: ""}) == "node n1 (ranks 2, 3, all of it)"
    assert describe(signs, {1: "", 4: "KeyError: 'x'", 5: ""}) == (
        "rank 1 on node n0; node n2 (ranks 4, 5, all of it) (KeyError: 'x')"
    )


def test_the_pulse_of_this_process(store: dist.TCPStore) -> None:
    assert own_pulse() is None
    pulse = start_pulse("127.0.0.1", store.port, "own", 0, 1)
    assert own_pulse() is pulse
    pulse.leave()
    assert own_pulse() is None
