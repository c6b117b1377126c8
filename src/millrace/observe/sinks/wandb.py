"""Step metrics and samples for Weights & Biases (the `wandb` extra)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.core.events import Event
from millrace.observe.samples import transcript
from millrace.observe.sinks.extras import refuse_uninstalled
from millrace.observe.sinks.scalars import Service

_COLUMNS = ["trajectory_id", "row_id", "prompt", "completion", "reward", "num_tokens", "finish"]


class WandbSink(Service):
    """Logs to `project`; the run is named after its directory, and goes on when that resumes.

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(self, project: str, directory: Path, config: Mapping[str, Any]) -> None:
        super().__init__()
        refuse_uninstalled("wandb", project)
        import wandb

        self._wandb, name = wandb, directory.resolve().name
        self._run = wandb.init(
            project=project, name=name, id=name, resume="allow", dir=str(directory), config=dict(config)
        )

    def log_sample(self, event: Event) -> None:
        fields = event.fields | {"completion": transcript(event.fields)}
        row = [fields[name] for name in _COLUMNS]
        table = self._wandb.Table(columns=_COLUMNS, data=[row])
        self._run.log({f"samples/{event.fields['place']}": table}, step=event.fields["version"])

    def log_scalars(self, event: Event, scalars: Mapping[str, float]) -> None:
        if event.kind == "evaluated":  # later than steps, and W&B takes no step twice: its own axis
            self._run.log({**scalars, "evaluation/version": event.fields["version"]})
        else:
            self._run.log(scalars, step=event.fields["version"])

    def close(self) -> None:
        self._run.finish()
