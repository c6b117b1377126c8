"""Step metrics and samples for TensorBoard, by its own writer: it needs neither torch nor TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event as Record
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from millrace.core.events import Event
from millrace.observe.samples import as_markdown
from millrace.observe.sinks.scalars import scalars_of


class TensorBoardSink:
    """One scalar per name of `scalars_of`, at the version that it is of, and samples as texts. Replays are
    left out: their curves are there already."""

    def __init__(self, directory: Path) -> None:
        self._file = EventFileWriter(str(directory))

    def __call__(self, event: Event) -> None:
        if event.kind == "sample":
            tag = f"samples/{event.fields['place']}"
            self._add(event, text_pb(tag, as_markdown(event.fields)))
        elif scalars := scalars_of(event.kind, event.fields):
            self._add(event, _summary(scalars))

    def close(self) -> None:
        self._file.close()

    def _add(self, event: Event, summary: Any) -> None:
        self._file.add_event(Record(wall_time=event.wall_s, step=event.fields["version"], summary=summary))
        self._file.flush()


def _summary(scalars: Mapping[str, float]) -> Summary:
    """One record for all of a step. A record for each would cost the controller milliseconds a step."""
    return Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()])
