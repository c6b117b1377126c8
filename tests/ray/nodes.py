"""A Ray cluster of several nodes on this machine: each raylet is in a network namespace, behind a link."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.namespaces import Host, hosts
from tests.ray import clusters

PORT = 6379


class Nodes:
    """The first of `hosts` is the head. Those that have joined are nodes."""

    def __init__(self, hosts: Sequence[Host], stack: ExitStack, *options: str) -> None:
        self.hosts, self._stack = tuple(hosts), stack
        self.address = f"{hosts[0].address}:{PORT}"
        self.join(0, *options)

    def join(self, index: int, *options: str) -> None:
        """`options` of `ray start`."""
        host = self.hosts[index]
        role = (
            ("--head", f"--port={PORT}", "--include-dashboard=false")
            if index == 0
            else (f"--address={self.address}",)
        )
        self._stack.callback(self.kill, index)
        self._stack.enter_context(
            clusters.node(
                *role,
                f"--node-ip-address={host.address}",
                *options,
                command=(*host.prefix, *clusters.RAY),
            )
        )

    def pids(self, index: int, name: str = "") -> list[int]:
        """Processes there, whose command line has `name`."""
        listing = subprocess.run(
            ("ip", "netns", "pids", self.hosts[index].name), capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in listing.stdout.split() if name in _command(int(pid))]

    def kill_raylet(self, index: int) -> None:
        for pid in self.pids(index, "/raylet/raylet "):
            os.kill(pid, signal.SIGKILL)

    def kill(self, index: int) -> None:
        """Every process there, all at once."""
        pids = self.pids(index)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)


@contextmanager
def nodes(count: int, *, spare: int = 0, roles: Sequence[str] = ()) -> Iterator[Nodes]:
    """A cluster of `count` nodes, labelled with `roles` if these are given, and `spare` hosts."""
    labels = [(f"--labels=millrace-role={role}",) for role in roles] or [()] * count
    with hosts(count + spare) as found, ExitStack() as stack:
        cluster = Nodes(found, stack, *labels[0])
        for index in range(1, count):
            cluster.join(index, *labels[index])
        yield cluster


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""
