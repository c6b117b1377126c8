"""The sinks of a configuration, opened together and closed together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from millrace.config.freeze import NOT_KEPT
from millrace.config.tables.operation import Observe
from millrace.core.events import Event, Events
from millrace.observe.sinks import prometheus
from millrace.observe.sinks.extras import PACKAGES, refuse_uninstalled
from millrace.observe.sinks.jsonl import EventLog, MetricsLog
from millrace.observe.sinks.notify import Notifier, deliverer

_NOT_KEPT = "the run directory has only the host. Give the URL again, --set observe.notify=URL, or use $NAME"


class ClosableSink(Protocol):
    def __call__(self, event: Event) -> None: ...

    def close(self) -> None: ...


def refuse_unusable(observe: Observe) -> None:
    """Before a run starts. Raises ConfigError: an address or command that `observe` names cannot be used, or
    the package of a service is not installed."""
    for key in PACKAGES:
        if (value := getattr(observe, key)) is not None:
            refuse_uninstalled(key, value)
    if observe.prometheus is not None:
        prometheus.refuse_unusable(observe.prometheus)
    if observe.notify is not None and not observe.notify.endswith(NOT_KEPT):
        deliverer(observe.notify)


@contextmanager
def open_sinks(
    events: Events, observe: Observe, directory: Path, config: Mapping[str, Any]
) -> Iterator[None]:
    """Subscribe the sinks of every run, which write in `directory`, and the sinks of `observe`. `config` is
    for services that show a configuration.

    Raises ConfigError: a service's package is not installed, or its address cannot be used.
    """
    with ExitStack() as stack:
        for sink in _sinks(events, observe, directory, config):
            stack.callback(sink.close)
            events.subscribe(sink)
        if observe.notify is not None and observe.notify.endswith(NOT_KEPT):
            events.emit("warned", source="notify", reason=f"nobody is told: of {observe.notify} {_NOT_KEPT}")
        yield


def _sinks(
    events: Events, observe: Observe, directory: Path, config: Mapping[str, Any]
) -> Iterator[ClosableSink]:
    yield EventLog(directory / "events.jsonl")
    yield MetricsLog(directory / "metrics.jsonl")
    if observe.tensorboard:
        from millrace.observe.sinks.tensorboard import TensorBoardSink

        yield TensorBoardSink(directory / "tensorboard")
    if observe.wandb is not None:
        from millrace.observe.sinks.wandb import WandbSink

        yield WandbSink(observe.wandb, directory, config)
    if observe.mlflow is not None:
        from millrace.observe.sinks.mlflow import MlflowSink

        yield MlflowSink(observe.mlflow, directory, config)
    if observe.prometheus is not None:
        yield prometheus.PrometheusSink(observe.prometheus)
    if observe.notify is not None and not observe.notify.endswith(NOT_KEPT):
        yield Notifier(events, observe.notify, directory)  # last: it is closed first, and may emit a warning
