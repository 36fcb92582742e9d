"""Hosts on one machine: network namespaces with a name of their own, joined by veth pairs to a bridge.

Needs Linux, root and ``ip``. Nothing is changed outside the namespaces, which go when the context ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

INTERFACE = "net0"


@dataclass(frozen=True)
class Host:
    """One of them; it reaches the others by their addresses, and nothing else."""

    name: str
    namespace: str
    address: str

    def command(self, *command: str) -> list[str]:
        """``command`` as this host would run it."""
        rename = f'hostname {self.name} && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", rename, "sh", *command]


def why_not() -> str | None:
    """Why there can be no hosts here; None where they can be made."""
    missing = [name for name in ("ip", "unshare", "hostname") if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)} here"
    probe = f"mrlhf-probe-{os.getpid()}"
    for command in (["ip", "netns", "add", probe], ["ip", "netns", "exec", probe, "unshare", "--uts", "true"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{' '.join(command)}: {done.stderr.strip()}"
    veth = ["ip", "-n", probe, "link", "add", "veth0", "type", "veth", "peer", "name", "veth1"]
    made = subprocess.run(veth, capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", probe], check=False)
    return None if made.returncode == 0 else f"{' '.join(veth)}: {made.stderr.strip()}"


@contextmanager
def make_hosts(count: int) -> Iterator[list[Host]]:
    """``count`` hosts ``node0``, ``node1``, ... on one network."""
    prefix = f"mrlhf{os.getpid()}"
    switch = f"{prefix}-switch"
    hosts = [Host(f"node{index}", f"{prefix}-{index}", f"10.231.0.{index + 1}") for index in range(count)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for index, host in enumerate(hosts):
            _ip("netns", "add", host.namespace)
            port = f"port{index}"
            peer = ["peer", "name", INTERFACE, "netns", host.namespace]
            _ip("-n", switch, "link", "add", port, "type", "veth", *peer)
            _ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            _ip("-n", host.namespace, "link", "set", INTERFACE, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield hosts
    finally:
        for namespace in (*(host.namespace for host in hosts), switch):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def unplug(host: Host) -> None:
    """Take its network cable out: nobody is told that a connection has ended."""
    _ip("-n", host.namespace, "link", "set", INTERFACE, "down")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
