"""A server may close an idle connection at the moment at which a request is sent on it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from millrace.engines.server.client import Client, Streams
from millrace.engines.server.server_dialect import Sampled

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 9\r\n\r\ndata: 1\n\n"


@pytest.fixture
def url() -> Iterator[str]:
    """A server that offers to keep each connection, and closes it at its second request."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve(connection: socket.socket) -> None:
            with connection:
                if connection.recv(65536):
                    connection.sendall(ANSWER)
                    connection.recv(65536)

        def accept() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def test_calls_use_fresh_connections(url: str) -> None:
    client = Client(url)
    assert [client.has("/health") for _ in range(3)] == [True] * 3
    client.close()


def test_streams_use_fresh_connections(url: str) -> None:
    server = SimpleNamespace(
        url=url, generate="/generate", open_reader=lambda: lambda data: Sampled(finish_reason="stop")
    )
    streams = Streams(server)  # type: ignore[arg-type]
    for key in range(3):
        streams.send(key, {})
        assert [one.error for one in streams.take([key], wait_s=10)] == [None]
        streams.end([key], after_s=10)
    streams.close()
