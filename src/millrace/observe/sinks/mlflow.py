"""Step metrics and samples for MLflow (the `mlflow` extra)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from millrace.core.events import Event
from millrace.observe.samples import as_markdown

_TAG = "millrace.run"
_REFUSED = re.compile(r"[^\w/.\- :]|(?<![^/])\.{0,2}(?![^/])|^\.\.")
"""A name with one of these characters makes MLflow refuse all metrics of a step. So does one that begins
with two dots, or that has between two slashes no text, one dot or two dots."""
_LENGTH_MAX = 200
"""MLflow refuses names of over 250 characters too."""


class MlflowTracker:
    """Logs to `experiment` on the tracking server that MLflow's own settings name. A resumed run goes on with
    the MLflow run that has its id as a tag."""

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
