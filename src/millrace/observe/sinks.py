"""The sinks a configuration asks for, opened together and closed together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from millrace.config.schema import Observe
from millrace.core.events import Event, Events
from millrace.observe.jsonl import EventLog, MetricsLog


class ClosableSink(Protocol):
    def __call__(self, event: Event) -> None: ...

    def close(self) -> None: ...


@contextmanager
def open_sinks(
    events: Events, observe: Observe, directory: Path, config: Mapping[str, Any]
) -> Iterator[None]:
    """Subscribe what every run records in `directory`, and what `observe` adds. `config` is shown by
    the services that show one.

    Raises ConfigError: a service's package is not installed.
    """
    with ExitStack() as stack:
        for sink in _sinks(observe, directory, config):
            stack.callback(sink.close)
            events.subscribe(sink)
        yield


def _sinks(observe: Observe, directory: Path, config: Mapping[str, Any]) -> Iterator[ClosableSink]:
    yield EventLog(directory / "events.jsonl")
    yield MetricsLog(directory / "metrics.jsonl")
    if observe.tensorboard:
        from millrace.observe.tensorboard import TensorBoardSink

        yield TensorBoardSink(directory / "tensorboard")
    if observe.wandb is not None:
        from millrace.observe.wandb import WandbSink

        yield WandbSink(observe.wandb, directory, config)
    if observe.mlflow is not None:
        from millrace.observe.mlflow import MlflowSink

        yield MlflowSink(observe.mlflow, directory, config)
