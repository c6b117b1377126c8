"""What the requests of one server share: whom they may ask, and their limits."""

from __future__ import annotations

import traceback
from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping
from concurrent.futures import Future as ThreadFuture
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tornado.concurrent import Future

from millrace.episodes.gateway.calls import RefusedCall
from millrace.episodes.gateway.dialects.dialect import GatewayDialect
from millrace.episodes.gateway.sessions import OpenSessions, Session

Answer = dict[str, Any]
Auxiliary = Callable[[Session, bytes], Answer | ThreadFuture[Answer]]
"""An answer that takes long is a future, so that the thread can go on."""
Told = Mapping[str, Callable[[], Answer]]


@dataclass(frozen=True, kw_only=True)
class GatewayLimits:
    """`call_s`: a connection waits so long for a reply. A stream that waits longer than `grace_s` begins with
    comments, one each `keepalive_s`. Until then, an error keeps its HTTP status. `connections_max`: two for
    each of the agents that a worker keeps (`episodes.open_episodes.KEPT_MAX`)."""

    body_bytes_max: int = 64 << 20
    header_bytes_max: int = 64 << 10
    connections_max: int = 8192
    idle_s: float = 120.0
    body_s: float = 120.0
    call_s: float = 3600.0
    grace_s: float = 30.0
    keepalive_s: float = 5.0


@dataclass(kw_only=True)
class Surroundings:
    """`told`: of each path, what GET gives. `name`: of the server, in words for its clients. `hosts`:
    permitted Host headers, or None for all. `work`: runs a function on another thread. `waiting`: refuses
    each request that waits. `writes`: of answers that their clients have yet to read. `end`: of the server,
    which refuses each request from then on."""

    sessions: OpenSessions
    dialects: Mapping[str, GatewayDialect]
    auxiliary: Mapping[str, Auxiliary]
    told: Told
    name: str
    limits: GatewayLimits
    models: dict[str, Any]
    hosts: frozenset[str] | None
    loop: AbstractEventLoop
    work: Callable[[Callable[[], None]], None]
    on_fault: Callable[[str], None]
    faults: int = 0
    waiting: set[Callable[[RefusedCall], None]] = field(default_factory=set)
    writes: set[Future[Any]] = field(default_factory=set)
    end: RefusedCall | None = None

    def fault(self, error: Exception) -> None:
        self.faults += 1
        with suppress(Exception):
            self.on_fault("".join(traceback.format_exception(error)))
