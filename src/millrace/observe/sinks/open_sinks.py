"""The sinks of a configuration, opened together and closed together."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from millrace.config.freeze import NOT_KEPT
from millrace.config.tables.operation import Observe
from millrace.core.events import Event, Events
from millrace.core.extras import is_installed
from millrace.observe.environment_use import EnvironmentUse
from millrace.observe.sinks import prometheus
from millrace.observe.sinks.jsonl import EventLog, MetricsLog
from millrace.observe.sinks.notify import Notifier, deliverer
from millrace.observe.sinks.trackers import (
    PACKAGES,
    MlflowTracker,
    TensorBoardTracker,
    Tracked,
    Tracker,
    TrackioTracker,
    WandbTracker,
    end_all,
    refuse_uninstalled,
)

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


@asynccontextmanager
async def open_sinks(
    events: Events, observe: Observe, directory: Path, config: Mapping[str, Any], run_id: str = ""
) -> AsyncIterator[None]:
    """Subscribe the sinks of every run, which write in `directory`, and the sinks of `observe`. `config` is
    for trackers that show a configuration. By `run_id` they find a run that is resumed.

    Raises ConfigError: a package is not installed, or an address cannot be used.
    """
    refuse_unusable(observe)
    openers = _trackers(observe, directory, config, run_id)
    trackers: list[Tracked] = []
    with ExitStack() as stack:
        try:
            for sink in _sinks(events, observe, directory, openers):
                stack.callback(sink.close)
                events.subscribe(sink)
                trackers += [sink] if isinstance(sink, Tracked) else []
            if observe.tensorboard and not is_installed("tensorboard"):
                reason = "no files: the extra millrace[tensorboard] is not installed"
                events.emit("warned", source="tensorboard", reason=reason)
            if observe.notify is not None and observe.notify.endswith(NOT_KEPT):
                reason = f"nobody is told: of {observe.notify} {_NOT_KEPT}"
                events.emit("warned", source="notify", reason=reason)
            yield
        finally:
            await end_all(trackers)


def _sinks(
    events: Events, observe: Observe, directory: Path, openers: Mapping[str, Callable[[], Tracker]]
) -> Iterator[ClosableSink]:
    environment = EnvironmentUse()
    events.subscribe(environment)
    yield EventLog(directory / "events.jsonl")
    yield MetricsLog(directory / "metrics.jsonl", environment)
    for name, open_tracker in openers.items():
        yield Tracked(events, name, open_tracker, environment)
    if observe.prometheus is not None:
        yield prometheus.PrometheusSink(observe.prometheus)
    if observe.notify is not None and not observe.notify.endswith(NOT_KEPT):
        yield Notifier(events, observe.notify, directory)  # last: it is closed first, and may emit a warning


def _trackers(
    observe: Observe, directory: Path, config: Mapping[str, Any], run_id: str
) -> dict[str, Callable[[], Tracker]]:
    """What opens each tracker of `observe`, and imports its package."""
    name = directory.resolve().name
    run_id = re.sub(r"[^A-Za-z0-9.-]", "-", run_id or name)[-64:]  # as services permit

    openers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoardTracker(directory / "tensorboard"),
        "wandb": lambda: WandbTracker(str(observe.wandb), directory, run_id, config),
        "mlflow": lambda: MlflowTracker(str(observe.mlflow), name, run_id, config),
        "trackio": lambda: TrackioTracker(str(observe.trackio), run_id, config),
    }
    if not is_installed("tensorboard"):
        del openers["tensorboard"]
    return {key: opener for key, opener in openers.items() if getattr(observe, key)}
