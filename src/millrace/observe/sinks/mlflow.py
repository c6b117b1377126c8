"""Step metrics and samples for MLflow (the `mlflow` extra)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from millrace.core.events import Event
from millrace.observe.samples import as_markdown

_TAG = "millrace.run"
_REFUSED = re.compile(r"[^\w/.\- :]")
"""A name with one of these characters makes MLflow refuse all metrics of a step."""


class MlflowTracker:
    """Logs to `experiment` on the tracking server that MLflow's own settings name. A resumed run goes on with
    the MLflow run that has its id as a tag."""

    def __init__(self, experiment: str, name: str, run_id: str, config: Mapping[str, Any]) -> None:
        import mlflow

        self._mlflow = mlflow
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
        values = {_REFUSED.sub("_", name): float(value) for name, value in scalars.items()}
        self._mlflow.log_metrics(values, step=event.fields["version"], timestamp=int(event.wall_s * 1000))

    def close(self) -> None:
        self._mlflow.end_run()
