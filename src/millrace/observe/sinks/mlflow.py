"""Step metrics and samples for MLflow (the `mlflow` extra)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.core.events import Event
from millrace.observe.samples import as_markdown
from millrace.observe.sinks.extras import refuse_uninstalled
from millrace.observe.sinks.scalars import Service


class MlflowSink(Service):
    """Logs to `experiment` on the tracking server that MLflow's own settings name.

    Raises:
        ConfigError: mlflow is not installed.
    """

    def __init__(self, experiment: str, directory: Path, config: Mapping[str, Any]) -> None:
        super().__init__()
        refuse_uninstalled("mlflow", experiment)
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(experiment)
        mlflow.start_run(run_name=directory.resolve().name)
        mlflow.log_dict(dict(config), "config.json")

    def log_sample(self, event: Event) -> None:
        name = f"samples/{event.fields['version']:08d}-{event.fields['place']}.md"
        self._mlflow.log_text(as_markdown(event.fields), name)

    def log_scalars(self, event: Event, scalars: Mapping[str, float]) -> None:
        values = {name: float(value) for name, value in scalars.items()}
        self._mlflow.log_metrics(values, step=event.fields["version"])

    def close(self) -> None:
        self._mlflow.end_run()
