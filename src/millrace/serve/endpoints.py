"""The addresses of a served model: the gateway's HTTP server, with its deadlines and limits, without keys."""

from __future__ import annotations

import resource
from collections.abc import Callable

from millrace.episodes.gateway.server import GatewayServer
from millrace.episodes.gateway.sessions import OpenSessions, Session
from millrace.episodes.gateway.surroundings import GatewayLimits
from millrace.runtime.kernel import FILES_BESIDE, allow_open_files
from millrace.serve.completions import Completions

BODY_BYTES_MAX = 4 << 20
WAIT_S = 660.0
"""A request waits so long for an engine that hangs: the engine's own deadlines come first."""


class Endpoints:
    """Answers from the start until `close`. `url` is without `/v1`. `on_fault` gets the traceback of a bug.

    Raises: OSError: the port is taken, or the host is not here.
    """

    def __init__(
        self,
        host: str,
        port: int,
        completions: Completions,
        *,
        limits: GatewayLimits | None = None,
        on_fault: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._server = GatewayServer(
            _Everyone(),
            {},
            auxiliary={
                "/v1/chat/completions": lambda _, body: completions.chat(body),
                "/v1/completions": lambda _, body: completions.text(body),
            },
            told={"/health": completions.health, "/v1/models": completions.models},
            name="server",
            limits=limits or served_limits(),
            on_fault=on_fault,
        )
        self._server.start(host, port)
        self.url, self.port = self._server.url, self._server.port

    def close(self) -> None:
        """Refuse what waits, and end every connection and thread."""
        self._server.close()


class _Everyone(OpenSessions):
    """Who reaches the address may ask: no key is needed, and every request is of one session."""

    def __init__(self) -> None:
        super().__init__()
        self._only = self.open()

    def find(self, *keys: str) -> Session:
        return self._only


def served_limits() -> GatewayLimits:
    """The gateway's, with as many connections as this process may have open files."""
    allow_open_files(0)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = GatewayLimits.connections_max
    if files != resource.RLIM_INFINITY:
        most = max(1, min(most, files - FILES_BESIDE))
    return GatewayLimits(body_bytes_max=BODY_BYTES_MAX, connections_max=most, call_s=WAIT_S)
