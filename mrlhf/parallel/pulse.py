"""A sign of life of every rank, so that when one has gone the others can say which, and on which node.

When a process or a whole node dies, the others get an error that names an address at best, and those that waited for a
rank that waited for it name the wrong one. So each rank counts up in the store that the ranks met at, every second and
from a thread of its own; whoever gets such an error looks twice, and those whose count stands still have gone. This
needs no file system that all nodes share, and nothing of it is in the way of the training.
"""

from __future__ import annotations

import atexit
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

INTERVAL_SECONDS = 1.0
SILENCE_SECONDS = 30.0
"""After which rank 0 says that a rank gives no sign of life; nothing is ended for it."""
_STORE_SECONDS = 10.0
_LEAVE_SECONDS = 5.0
_LEFT = "left"


@dataclass(frozen=True)
class Sign:
    """What a rank has last said: ``count`` is None once it has left as it should."""

    host: str
    count: int | None


class Pulse(threading.Thread):
    """The thread that counts; there is one in a process that has joined others."""

    def __init__(
        self, address: str, port: int, prefix: str, rank: int, world_size: int, *, serves: bool = False
    ) -> None:
        """Give the first sign; all ranks do this before they make a process group.

        Args:
            address: of the store, whose server runs already.
            port: of the store.
            prefix: of the keys, of this start of the job alone.
            rank: of this process.
            world_size: number of ranks.
            serves: whether the store is in this process.
        """
        super().__init__(name="pulse", daemon=True)
        self.address, self.rank, self.world_size, self.serves = address, rank, world_size, serves
        # A connection of its own: whoever waits for a key keeps a connection busy until it is there.
        client = dist.TCPStore(
            address, port, is_master=False, timeout=timedelta(seconds=_STORE_SECONDS), wait_for_workers=False
        )
        self.store = dist.PrefixStore(f"{prefix}/pulse", client)
        self._host = socket.gethostname()
        self._end = threading.Event()
        self._told: set[int] = set()
        # torch writes a page about every call to a store that has gone.
        self._lost = False
        self.store.set(f"sign/{rank}", f"0 {self._host}")

    def run(self) -> None:
        """Count until `leave`; where the store has gone, nobody can listen any more."""
        count, before, changed = 0, dict[int, Sign](), dict[int, float]()
        looked = time.monotonic()
        while not self._end.wait(INTERVAL_SECONDS):
            count += 1
            try:
                self.store.set(f"sign/{self.rank}", f"{count} {self._host}")
                if self.rank == 0 and time.monotonic() - looked > SILENCE_SECONDS / 3:
                    looked, now = time.monotonic(), self.signs()
                    changed |= {rank: looked for rank, sign in now.items() if sign != before.get(rank)}
                    before = now
                    self._warn(now, {rank: looked - since for rank, since in changed.items()})
            except RuntimeError:
                self._lost = True
                return

    def leave(self) -> None:
        """This rank ends as it should."""
        if self._end.is_set():
            return
        self._end.set()
        if self.is_alive():
            self.join(_STORE_SECONDS)
        if self._lost:
            return
        with suppress(RuntimeError):
            self.store.set(f"sign/{self.rank}", f"{_LEFT} {self._host}")
            # The others still need the store to say the same.
            end = time.monotonic() + _LEAVE_SECONDS
            while self.serves and time.monotonic() < end and any(s.count is not None for s in self.signs().values()):
                time.sleep(0.02)

    def tell(self, cause: str) -> None:
        """This rank ends, and why, in one line."""
        if not self._lost:
            with suppress(RuntimeError):
                self.store.set(f"cause/{self.rank}", cause)

    def signs(self) -> dict[int, Sign]:
        """The last sign of every rank. Raises `RuntimeError` when the store does not answer."""
        keys = [f"sign/{rank}" for rank in range(self.world_size)]
        found = {}
        for rank, value in enumerate(self.store.multi_get(keys)):
            count, _, host = bytes(value).decode().partition(" ")
            found[rank] = Sign(host, None if count == _LEFT else int(count))
        return found

    def gone(self, seconds: float) -> str:
        """Who gives no sign for ``seconds``, which this takes, and what they said before; empty where all do."""
        answer: list[str] = []
        # The connection to a node that has lost its power says nothing at all, for minutes.
        looker = threading.Thread(target=lambda: answer.append(self._look(seconds)), daemon=True)
        looker.start()
        looker.join(seconds + _STORE_SECONDS)
        return answer[0] if answer else self._no_store()

    def _look(self, seconds: float) -> str:
        begun = time.monotonic()
        try:
            if self._lost:
                raise RuntimeError
            before = self.signs()
            time.sleep(seconds)
            now = self.signs()
            still = [rank for rank, sign in now.items() if sign.count is not None and sign == before[rank]]
            causes = {rank: self._cause(rank) for rank in still if rank != self.rank}
        except RuntimeError:
            self._lost = True
            time.sleep(max(begun + seconds - time.monotonic(), 0.0))
            return self._no_store()
        return f"{describe(now, causes)} gave no sign of life for {seconds:g} s" if causes else ""

    def _cause(self, rank: int) -> str:
        key = f"cause/{rank}"
        return bytes(self.store.get(key)).decode() if self.store.check([key]) else ""

    def _no_store(self) -> str:
        return f"the node {self.address}, where the ranks met (rank 0 or torchrun's agent), does not answer"

    def _warn(self, signs: Mapping[int, Sign], silent: Mapping[int, float]) -> None:
        new = {
            rank: ""
            for rank, seconds in silent.items()
            if seconds > SILENCE_SECONDS and signs[rank].count is not None and rank not in self._told
        }
        if new:
            self._told |= set(new)
            text = f"warning: no sign of life for {max(silent[rank] for rank in new):.0f} s of {describe(signs, new)}"
            print(text, file=sys.stderr, flush=True)


def start_pulse(address: str, port: int, prefix: str, rank: int, world_size: int, *, serves: bool = False) -> Pulse:
    """Make the `Pulse` of this process and start it; it ends with `Pulse.leave`, at the latest at the exit."""
    pulse = Pulse(address, port, prefix, rank, world_size, serves=serves)
    pulse.start()
    atexit.register(pulse.leave)
    return pulse


def own_pulse() -> Pulse | None:
    """The pulse of this process, if it has one."""
    return next((thread for thread in threading.enumerate() if isinstance(thread, Pulse)), None)


def describe(signs: Mapping[int, Sign], causes: Mapping[int, str]) -> str:
    """The ranks of ``causes`` by node: ``node n2 (ranks 4, 5, all of it)``, ``rank 3 on node n1 (KeyError: 'x')``."""
    parts = []
    for host in sorted({signs[rank].host for rank in causes}):
        lost = sorted(rank for rank in causes if signs[rank].host == host)
        said = next((f" ({causes[rank]})" for rank in lost if causes[rank]), "")
        name = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))}"
        whole = len(lost) == sum(sign.host == host for sign in signs.values())
        parts.append(f"node {host} ({name}, all of it){said}" if whole else f"{name} on node {host}{said}")
    return "; ".join(parts)
