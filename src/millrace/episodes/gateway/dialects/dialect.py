"""What the gateway asks of a dialect: one form of requests, replies, streams and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from millrace.episodes.gateway.calls import Call, Reply


class GatewayDialect(Protocol):
    """A dialect holds no state: any thread may use one."""

    def read(self, body: bytes) -> Call:
        """A field that changes nothing is kept in `Call.unheeded`. A field that is null was not given.

        Raises: RefusedCall: the request cannot be answered as the agent expects.
        """

    def reply(self, call: Call, reply: Reply) -> dict[str, Any]:
        """The answer to a request without `stream`, as JSON."""

    def events(self, call: Call, reply: Reply) -> Iterator[bytes]:
        """The whole reply as server-sent events, which add up to what `reply` returns."""

    def error(self, status: int, message: str, field: str | None = None) -> dict[str, Any]:
        """The body of an answer with the HTTP status `status`."""

    def error_event(self, status: int, message: str, field: str | None = None) -> bytes:
        """The error as the last event of a stream whose HTTP status was sent before."""
