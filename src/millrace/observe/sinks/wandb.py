"""Step metrics and samples for Weights & Biases (the `wandb` extra)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.core.events import Event
from millrace.observe.samples import transcript

_COLUMNS = ["trajectory_id", "row_id", "prompt", "completion", "reward", "num_tokens", "finish"]


class WandbTracker:
    """Logs to `project`; the run is named after its directory, and goes on when that resumes. The axis of
    every curve is `version`: W&B drops values of its own step that come late, as those of an evaluation."""

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
