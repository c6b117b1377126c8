"""Step metrics for TensorBoard, through its own writer: neither torch nor TensorFlow is imported."""

from __future__ import annotations

from pathlib import Path

from tensorboard.summary import Writer

from millrace.core.events import Event
from millrace.observe.scalars import step_scalars


class TensorBoardSink:
    """One scalar per name of `step_scalars`, at the version the step made. Replays are left out:
    their curves are there already."""

    def __init__(self, directory: Path) -> None:
        self._writer = Writer(str(directory))

    def __call__(self, event: Event) -> None:
        if event.kind != "step" or event.fields.get("replayed"):
            return
        for name, value in step_scalars(event.fields).items():
            self._writer.add_scalar(name, float(value), event.fields["version"], wall_time=event.wall_s)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
