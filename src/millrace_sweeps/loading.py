"""A sweep's file and the configuration that it changes: read, merged and checked before any trial starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.api.configure import Components, PreparedConfig, prepare
from millrace.api.sweep import SweepLike
from millrace.config.load import Source, load_as, merge, read_file, read_mapping, read_overrides, validate
from millrace.config.schema import Config
from millrace.config.toml_text import key_lines
from millrace.core.errors import ConfigError
from millrace_sweeps.decisions.space import Overrides
from millrace_sweeps.sweep_config import SweepConfig

EVALUATION = "evaluation/"


@dataclass(frozen=True)
class LoadedSweep:
    """`name` is the file's, for the directory of runs. `origins`: where the keys of the sweep stand."""

    name: str
    config: SweepConfig
    base: Source
    directory: Path
    origins: Mapping[str, str] = field(default_factory=dict)
    components: Components = field(default_factory=Components)

    def prepared(self, overrides: Overrides) -> PreparedConfig:
        """The configuration of one trial. Raises: ConfigError, DataError, RewardError: it is not possible."""
        above = read_mapping(Config, overrides, "sweep", self.directory)
        tree = merge(Config, self.base.tree, above.tree)
        places = {key: self._place(key) for key in overrides}
        return prepare(Source(tree, self.base.origins | places), self.components, {}, ())

    def _place(self, key: str) -> str:
        tables = ("grid", "random.keys", "optuna.keys")
        names = ["seeds"] if key == "seed" and self.config.seeds else [f"{table}.{key}" for table in tables]
        return next((self.origins[name] for name in names if name in self.origins), "sweep")


def load_sweep(
    sweep: SweepLike,
    *,
    components: Components | None = None,
    keywords: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> LoadedSweep:
    """A file, or a mapping with the same keys. `keywords` and `overrides` change the base.

    Raises: ConfigError: names the key, its place and what to do.
    """
    origins: dict[str, str] = {}
    if isinstance(sweep, Mapping):
        name, directory = "sweep", Path.cwd()
        source = read_mapping(SweepConfig, sweep, "sweep")
        config = validate(SweepConfig, source.tree, source.origins)
    else:
        path = Path(sweep)
        name, directory = path.stem, path.absolute().parent
        config = load_as(SweepConfig, path)
        origins = {key: f"{path}:{n}" for key, n in key_lines(path.read_text(encoding="utf-8-sig")).items()}
    base = _base(config.base, directory, origins)
    for above in (
        read_mapping(Config, keywords or {}, "keyword"),
        read_overrides(Config, overrides, Path.cwd()),
    ):
        base = Source(merge(Config, base.tree, above.tree), base.origins | above.origins)
    return LoadedSweep(name, config, base, directory, origins, components or Components())


def figure_by(config: Config, metric: str) -> str | None:
    """`by` of the evaluation whose one figure is the metric. None: the metric is another one."""
    return next((one.by for one in config.evaluations if metric == f"{EVALUATION}{one.name}"), None)


def check_metric(sweep: LoadedSweep, config: Config) -> None:
    """Raises: ConfigError: the metric is of an evaluation that the run does not have."""
    metric, names = sweep.config.metric, [evaluation.name for evaluation in config.evaluations]
    if metric.startswith(EVALUATION) and metric.split("/")[1] not in names:
        known = (
            f"Its evaluations are {', '.join(names)}" if names else "It has none: add [[evaluations]] to it"
        )
        raise ConfigError(
            f"`metric` ({metric!r}) is of an evaluation that the configuration does not have.\n  {known}"
            f"   [{sweep.origins.get('metric', 'sweep')}]"
        )


def _base(base: str | dict[str, Any], directory: Path, origins: Mapping[str, str]) -> Source:
    if isinstance(base, str):
        return read_file(Config, directory / Path(base).expanduser())
    source = read_mapping(Config, base, origins.get("base", "base"), directory)
    return Source(
        source.tree,
        source.origins | {k.removeprefix("base."): o for k, o in origins.items() if k.startswith("base.")},
    )
