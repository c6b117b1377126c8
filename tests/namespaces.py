"""Hosts for tests and benchmarks: network namespaces on one switch, each behind a link of a given rate.

    with hosts(3, rate="1gbit") as (first, second, third):
        subprocess.Popen([*first.prefix, sys.executable, ...])   # listens on first.address
        second.link(up=False)                                    # its cable is out

The switch is a bridge in a namespace of its own, so that nothing of the machine's own network changes. A link
holds both directions to the rate, each with a token bucket. What a killed test left behind is removed by the
next one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NAMES = "millrace-"
SUBNET = "10.77.0"
BURST_BYTES = 256_000
"""At least one packet as the kernel hands it to a link, 64 kB; more would make small transfers look fast."""


@dataclass(frozen=True)
class Host:
    """A network namespace. `address` is its only one, beside the loopback."""

    name: str
    address: str
    switch: str
    port: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Before a command: it runs on this host."""
        return ("ip", "netns", "exec", self.name)

    def link(self, *, up: bool) -> None:
        """Put its cable in, or pull it out at the switch: the host itself notices nothing."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "up" if up else "down")


def refusal() -> str:
    """Why there can be no such hosts here; empty if there can."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"network namespaces need `{missing[0]}` (iproute2)"
    name = f"{NAMES}{os.getpid()}-try"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
        _shape(name, "eth0", "1gbit")
    except RuntimeError as error:
        return f"network namespaces are not permitted here: {error}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return ""


@contextmanager
def hosts(count: int, *, rate: str | None = "1gbit") -> Iterator[list[Host]]:
    """`count` hosts that reach each other, and nothing else; `rate` None: links as fast as the kernel."""
    _remove_abandoned()
    switch, made = f"{NAMES}{os.getpid()}-switch", list[str]()
    try:
        _run("ip", "netns", "add", switch)
        made.append(switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        found = []
        for index in range(count):
            host = Host(f"{NAMES}{os.getpid()}-{index}", f"{SUBNET}.{index + 1}", switch, f"port{index}")
            _run("ip", "netns", "add", host.name)
            made.append(host.name)
            _connect(host, rate)
            found.append(host)
        yield found
    finally:
        for name in made:
            _delete(name)


def _connect(host: Host, rate: str | None) -> None:
    peer = ("peer", "name", host.port, "netns", host.switch)
    _run("ip", "-n", host.name, "link", "add", "eth0", "type", "veth", *peer)
    _run("ip", "-n", host.switch, "link", "set", host.port, "master", "bridge", "up")
    _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _run("ip", "-n", host.name, "link", "set", device, "up")
    if rate is not None:
        _shape(host.name, "eth0", rate)
        _shape(host.switch, host.port, rate)


def _shape(namespace: str, device: str, rate: str) -> None:
    bucket = ("tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", "50ms")
    _run("ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, "root", *bucket)


def _remove_abandoned() -> None:
    for path in Path("/run/netns").glob(f"{NAMES}*"):
        owner = path.name.removeprefix(NAMES).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _delete(path.name)


def _delete(name: str) -> None:
    """With the interfaces in it. Processes that still run there keep it until they end."""
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
