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


class TensorBoardTracker:
    """One scalar per name, at the version that it is of, and samples as texts."""

    def __init__(self, directory: Path) -> None:
        self._file = EventFileWriter(str(directory))

    def log_sample(self, event: Event) -> None:
        self._add(event, text_pb(f"samples/{event.fields['place']}", as_markdown(event.fields)))

    def log_scalars(self, event: Event, scalars: Mapping[str, float]) -> None:
        """One record for all of a step. A record for each would cost the controller milliseconds a step."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._add(event, Summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _add(self, event: Event, summary: Any) -> None:
        self._file.add_event(Record(wall_time=event.wall_s, step=event.fields["version"], summary=summary))
        self._file.flush()
