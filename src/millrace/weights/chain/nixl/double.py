"""A double of NIXL's agent, for relays of one process: a pull is a copy within its memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Runs = list[tuple[int, int]]  # (address, bytes)


@dataclass(slots=True, eq=False)
class PullDouble:
    """A pull from `there` to `here`. `ends`: whether the pull ends when its state is read."""

    source: str
    here: Runs
    there: Runs
    ends: bool = True

    def filled(self) -> NDArray[np.uint8]:
        address, size = self.here[0][0], sum(size for _, size in self.here)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def land(self) -> None:
        """The bytes arrive."""
        for (target, size), (origin, _) in zip(self.here, self.there, strict=True):
            ctypes.memmove(target, origin, size)


@dataclass(slots=True)
class AgentDouble:
    """The methods of an agent that `link` calls.

    Attributes:
        frozen  pulls that begin now do not end by themselves
        known   sources; a pull from another source has no state, and may still end
        gone    sources that are dead
        pulls   all pulls that have begun
        landed  gets the number of a pull, and the bytes that it filled, before they are read
    """

    name: str
    frozen: bool = False
    known: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    pulls: list[PullDouble] = field(default_factory=list)
    landed: Callable[[int, NDArray[np.uint8]], object] = lambda number, filled: None

    def register_memory(self, descs: object, kind: str) -> object:
        return descs

    def deregister_memory(self, descs: object) -> None: ...

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        name = metadata.decode()
        assert name not in self.known, "its pulls would be forgotten"
        self.known.add(name)
        return name

    def remove_remote_agent(self, name: str) -> None:
        self.known.remove(name)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}

    def get_xfer_descs(self, spans: NDArray[Any], kind: str) -> Runs:
        return [(int(address), int(size)) for address, size, _ in spans]

    def initialize_xfer(self, operation: str, here: Runs, there: Runs, source: str) -> PullDouble:
        return PullDouble(source, here, there, not self.frozen)

    def transfer(self, pull: PullDouble) -> str:
        self.pulls.append(pull)
        return "PROC"

    def check_xfer_state(self, pull: PullDouble) -> str:
        if pull.source not in self.known:
            raise LookupError("NIXL_ERR_NOT_FOUND")
        if pull.source in self.gone:
            raise ConnectionResetError("NIXL_ERR_REMOTE_DISCONNECT")
        if not pull.ends:
            return "PROC"
        pull.land()
        self.landed(self.pulls.index(pull), pull.filled())
        return "DONE"
