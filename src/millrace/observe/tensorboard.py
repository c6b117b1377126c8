"""Step metrics and samples for TensorBoard, by its own writer: it needs neither torch nor TensorFlow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event as Record
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from millrace.core.events import Event
from millrace.observe.samples import as_markdown
from millrace.observe.scalars import scalars_of


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
            for name, value in scalars.items():
                self._add(event, scalar_pb(name, float(value)))
        else:
            return
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _add(self, event: Event, summary: Any) -> None:
        self._file.add_event(Record(wall_time=event.wall_s, step=event.fields["version"], summary=summary))
