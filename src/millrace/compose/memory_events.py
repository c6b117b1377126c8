"""How much memory each worker of the run uses, and how much the host has available: `memory` events."""

from __future__ import annotations

import os
import resource
import socket
import time
from contextlib import suppress
from pathlib import Path

from millrace.core.events import Event, Events

EVERY_S = 10.0


class MemoryReporter:
    """A sink. At a report or a step, at most every `EVERY_S`, it reads a small file of the kernel for each
    process of a worker on this host. Shared pages, like those of torch, count for each process that maps
    them."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._pids = {"controller": [os.getpid()]}
        self._emitted_s = float("-inf")

    def __call__(self, event: Event) -> None:
        fields = event.fields
        match event.kind:
            case "worker_started" if fields["pid"] is not None and _is_here(fields.get("address")):
                self._pids[fields["name"]] = fields.get("pids") or [fields["pid"]]
            case "worker_died":
                self._pids.pop(fields["name"], None)
            case "left":
                self._pids.pop(fields["replica"], None)
            case "report" | "step" if event.time_s >= self._emitted_s + EVERY_S:
                self._emitted_s = event.time_s
                self._emit()

    def _emit(self) -> None:
        resident_bytes_by_name = {}
        for name, pids in self._pids.items():
            with suppress(OSError):  # the process has just ended
                resident_bytes_by_name[name] = sum(map(resident_bytes, pids))
        self._events.emit(
            "memory",
            resident_bytes=resident_bytes_by_name,
            available_bytes=available_bytes(),
            controller_cpu_s=time.process_time(),
        )


def _is_here(address: str | None) -> bool:
    """Whether the host at `address` is this one. A process's number means another process on another host."""
    if address is None:
        return True
    with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return True
    return False


def resident_bytes(pid: int) -> int:
    """Raises: OSError: there is no such process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def available_bytes() -> int | None:
    """What the host could still give; None: the kernel does not report it."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
