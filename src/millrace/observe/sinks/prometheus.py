"""Metrics for Prometheus, served by its own library (the `prometheus` extra)."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from millrace.core.errors import ConfigError
from millrace.core.events import Event
from millrace.observe.sinks.exported import COUNTERS, GAUGES, Exported
from millrace.observe.sinks.extras import refuse_uninstalled

CLOSE_S = 5.0


class PrometheusSink:
    """Serves `http://ADDRESS/metrics` from a thread of its own until `close`. The metrics are those of
    `observe.sinks.exported`.

    Raises:
        ConfigError: prometheus_client is not installed, or the address cannot be used.
    """

    def __init__(self, address: str) -> None:
        refuse_uninstalled("prometheus", address)
        import prometheus_client as client

        registry = client.CollectorRegistry()
        self._gauges = {
            name: client.Gauge(name, about, labels, registry=registry)
            for name, (about, labels) in GAUGES.items()
        }
        self._counters = {
            name: client.Counter(name, about, labels, registry=registry)
            for name, (about, labels) in COUNTERS.items()
        }
        self._exported = Exported(self._set, self._add)
        host, port = split(address)
        with _taking(address):
            self._server, self._thread = client.start_http_server(port, host, registry)

    def __call__(self, event: Event) -> None:
        self._exported(event)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLOSE_S)

    def _set(self, name: str, value: float, *labels: str) -> None:
        _of(self._gauges[name], labels).set(value)

    def _add(self, name: str, amount: float, *labels: str) -> None:
        _of(self._counters[name], labels).inc(amount)


def refuse_unusable(address: str) -> None:
    """Before a run starts. Raises ConfigError: the library is missing, or another process has the port."""
    refuse_uninstalled("prometheus", address)
    host, port = split(address)
    with _taking(address):
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = addresses[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(where)


def split(address: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


@contextmanager
def _taking(address: str) -> Iterator[None]:
    """An OSError in the block becomes a ConfigError about `address`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"`observe.prometheus` ({address}) cannot be listened on: {error.strerror or error}\n"
            "  Another run may have the port: name a free one, or leave the key out."
        ) from error


def _of(metric: Any, labels: tuple[str, ...]) -> Any:
    return metric.labels(*labels) if labels else metric
