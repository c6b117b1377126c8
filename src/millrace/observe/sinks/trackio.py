"""Step metrics and samples for Trackio (the `trackio` extra)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.core.events import Event
from millrace.observe.samples import as_markdown


class TrackioTracker:
    """Logs to `project` on this machine, or where Trackio's own settings name. A resumed run goes on with the
    Trackio run that has its id as a name."""

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
