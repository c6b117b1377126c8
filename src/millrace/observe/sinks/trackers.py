"""Scalars and samples of a run for trackers, each sent from a thread of its own.

A tracker imports its package when it is opened. All are extras of Millrace.
"""

from __future__ import annotations

import asyncio
import queue
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from millrace.core.events import Event, Events
from millrace.core.extras import refuse_missing
from millrace.observe.environment_use import EnvironmentUse
from millrace.observe.shown_samples import as_markdown, transcript
from millrace.observe.sinks.jsonl import scalars_of

CLOSE_S = 30.0
"""At the end of a run, the longest wait for all trackers together until they have what was sent."""
QUEUED_MAX = 1000
_THREAD = "tracker "


class Tracker(Protocol):
    """One run in a tracking service. One thread makes it and calls it."""

    def log_sample(self, event: Event) -> None: ...

    def log_scalars(self, event: Event, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Tracked:
    """A sink. Its thread opens the tracker and waits for it, so a tracker that fails or hangs never delays or
    ends the run. The first failure is one `warned` event. Replays are left out: their curves are there.
    `environment`: a sink of the same events."""

    kinds = ("step", "sample", "evaluated", "report", "run_ended")  # with each it looks for a failure

    def __init__(
        self,
        events: Events,
        name: str,
        open_tracker: Callable[[], Tracker],
        environment: EnvironmentUse | None = None,
    ) -> None:
        self._events, self._name = events, name
        self._environment = environment or EnvironmentUse()
        self._queue: queue.Queue[tuple[Event, Mapping[str, float]] | None] = queue.Queue()
        self._failure = ""
        self._has_warned = self._has_ended = False
        self.done: Future[None] = Future()
        thread = threading.Thread(target=self._work, args=(open_tracker,), name=_THREAD + name, daemon=True)
        thread.start()

    def __call__(self, event: Event) -> None:
        if event.kind == "run_ended":
            self.end()
        elif event.kind == "sample":
            self._put((event, {}))
        elif scalars := scalars_of(event.kind, event.fields):
            of_step = self._environment.scalars(event) if event.kind == "step" else {}
            self._put((event, scalars | of_step))
        self._warn()

    def end(self) -> None:
        """Nothing follows: once the tracker has what waits, it is closed, and `done` is set."""
        if not self._has_ended:
            self._has_ended = True
            self._queue.put(None)

    def close(self) -> None:
        if not self.done.done():
            self._failure = self._failure or (
                f"it was not done at the end of the run, and got {CLOSE_S:g} s more at most"
            )
        self._warn()

    def _put(self, item: tuple[Event, Mapping[str, float]]) -> None:
        if self._queue.qsize() < QUEUED_MAX:
            self._queue.put(item)
        else:
            self._failure = self._failure or (
                f"it does not keep up: {QUEUED_MAX} steps and samples wait, one was left out"
            )

    def _work(self, open_tracker: Callable[[], Tracker]) -> None:
        try:
            self._send_all(open_tracker)
        finally:
            self.done.set_result(None)

    def _send_all(self, open_tracker: Callable[[], Tracker]) -> None:
        try:
            tracker = open_tracker()
        except BaseException as error:
            self._fail(error, "gets nothing until the run is resumed")
            return
        while (item := self._queue.get()) is not None:
            try:
                self._send(tracker, *item)
            except Exception as error:
                self._fail(error, f"did not get all of version {item[0].fields['version']}")
        try:
            tracker.close()
        except Exception as error:
            self._fail(error, "may not have all of the run")

    def _send(self, tracker: Tracker, event: Event, scalars: Mapping[str, float]) -> None:
        if event.kind == "sample":
            tracker.log_sample(event)
        else:
            tracker.log_scalars(event, scalars)

    def _fail(self, error: BaseException, effect: str) -> None:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        self._failure = self._failure or f"it {effect}, the run goes on: {text:.500}"

    def _warn(self) -> None:
        if self._failure and not self._has_warned:
            self._has_warned = True
            self._events.emit("warned", source=self._name, reason=self._failure)


async def end_all(trackers: Sequence[Tracked]) -> None:
    """Wait until all trackers are done, for `CLOSE_S` at most. Signals are obeyed meanwhile. A cancellation
    ends the wait alone, so that how the run ended stays known."""
    for tracker in trackers:
        tracker.end()
    if trackers:
        with suppress(asyncio.CancelledError):
            await asyncio.wait([asyncio.wrap_future(one.done) for one in trackers], timeout=CLOSE_S)


def any_hangs() -> bool:
    """A tracker of this process is not done."""
    return any(thread.name.startswith(_THREAD) for thread in threading.enumerate())


PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio", "prometheus": "prometheus_client"}
"""Key of `[observe]` -> package."""


def refuse_uninstalled(key: str, value: str) -> None:
    """Raises: ConfigError: the package behind `observe.KEY` is not installed. It is not imported."""
    refuse_missing(PACKAGES[key], f"`observe.{key}` ({value})", "leave the key out")


_COLUMNS = ["trajectory_id", "row_id", "prompt", "completion", "reward", "num_tokens", "finish"]


class WandbTracker:
    """For Weights & Biases. Logs to `project`; the run is named after its directory, and goes on when that
    resumes. The axis of every curve is `version`: W&B drops values of its own step that come late, as those
    of an evaluation."""

    def __init__(self, project: str, directory: Path, run_id: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._wandb, name = wandb, directory.resolve().name
        self._run = wandb.init(
            project=project, name=name, id=run_id, resume="allow", dir=str(directory), config=dict(config)
        )
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")

    def log_sample(self, event: Event) -> None:
        fields = event.fields | {"completion": transcript(event.fields)}
        row = [fields[name] for name in _COLUMNS]
        table = self._wandb.Table(columns=_COLUMNS, data=[row])
        self._run.log({f"samples/{event.fields['place']}": table, "version": event.fields["version"]})

    def log_scalars(self, event: Event, scalars: Mapping[str, float]) -> None:
        self._run.log({**scalars, "version": event.fields["version"]})

    def close(self) -> None:
        self._run.finish()


_TAG = "millrace.run"
_REFUSED = re.compile(r"[^\w/.\- :]|(?<![^/])\.{0,2}(?![^/])|^\.\.")
"""A name with one of these characters makes MLflow refuse all metrics of a step. So does one that begins
with two dots, or that has between two slashes no text, one dot or two dots."""
_LENGTH_MAX = 200
"""MLflow refuses names of over 250 characters too."""


class MlflowTracker:
    """For MLflow. Logs to `experiment` on the tracking server that MLflow's own settings name. A resumed run
    goes on with the MLflow run that has its id as a tag."""

    def __init__(self, experiment: str, name: str, run_id: str, config: Mapping[str, Any]) -> None:
        import mlflow

        self._mlflow = mlflow
        self._names: dict[str, str] = {}
        mlflow.set_experiment(experiment)
        earlier = mlflow.search_runs(
            filter_string=f"tags.`{_TAG}` = '{run_id}'", max_results=1, output_format="list"
        )
        if earlier:
            mlflow.start_run(run_id=earlier[0].info.run_id)
        else:
            mlflow.start_run(run_name=name, tags={_TAG: run_id})
        mlflow.log_dict(dict(config), "config.json")

    def log_sample(self, event: Event) -> None:
        name = f"samples/{event.fields['version']:08d}-{event.fields['place']}.md"
        self._mlflow.log_text(as_markdown(event.fields), name)

    def log_scalars(self, event: Event, scalars: Mapping[str, float]) -> None:
        values = {name: float(scalars[own]) for own, name in self._accepted(scalars).items()}
        self._mlflow.log_metrics(values, step=event.fields["version"], timestamp=int(event.wall_s * 1000))

    def _accepted(self, scalars: Mapping[str, float]) -> dict[str, str]:
        """Each scalar's name -> its name in MLflow, which no other scalar has. A name that MLflow accepts is
        kept, so these names come first."""
        plain = {own: _REFUSED.sub("_", own) for own in scalars}
        for own, name in sorted(plain.items(), key=lambda item: item[0] != item[1]):
            if own not in self._names:
                if len(name) > _LENGTH_MAX or name in self._names.values():
                    name = f"{name[:_LENGTH_MAX]}-{blake2b(own.encode(), digest_size=3).hexdigest()}"
                self._names[own] = name
        return {own: self._names[own] for own in scalars}

    def close(self) -> None:
        self._mlflow.end_run()


class TrackioTracker:
    """For Trackio. Logs to `project` on this machine, or where Trackio's own settings name. A resumed run
    goes on with the Trackio run that has its id as a name."""

    def __init__(self, project: str, run_id: str, config: Mapping[str, Any]) -> None:
        import trackio

        self._trackio = trackio
        trackio.TRACKIO_DIR.mkdir(parents=True, exist_ok=True)  # else Trackio loses all with a warning alone
        self._run = trackio.init(
            project=project, name=run_id, resume="allow", config=dict(config), embed=False
        )

    def log_sample(self, event: Event) -> None:
        text = self._trackio.Markdown(as_markdown(event.fields))
        self._run.log({f"samples/{event.fields['place']}": text}, step=event.fields["version"])

    def log_scalars(self, event: Event, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=event.fields["version"])

    def close(self) -> None:
        self._run.finish()


class TensorBoardTracker:
    """For TensorBoard, by its own writer, which needs neither torch nor TensorFlow. One scalar per name, at
    the version that it is of, and samples as texts."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._record, self._summary, self._text = event_pb2.Event, summary_pb2.Summary, text_pb
        self._file = EventFileWriter(str(directory))

    def log_sample(self, event: Event) -> None:
        self._add(event, self._text(f"samples/{event.fields['place']}", as_markdown(event.fields)))

    def log_scalars(self, event: Event, scalars: Mapping[str, float]) -> None:
        """One record for all of a step. A record for each would cost the controller milliseconds a step."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._add(event, self._summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _add(self, event: Event, summary: Any) -> None:
        version = event.fields["version"]
        self._file.add_event(self._record(wall_time=event.wall_s, step=version, summary=summary))
        self._file.flush()
