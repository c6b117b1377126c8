"""A schedule from a function that the configuration names."""

from __future__ import annotations

from millrace.config.objects import load_function
from millrace.config.schema import Config
from millrace.core.errors import ConfigError, boundary
from millrace.schedule.schedule import Schedule


def from_function(path: str, config: Config) -> Schedule:
    """Raises: ConfigError: there is no such function, it fails, or it returns something else."""
    make, _ = load_function("schedule.path", path)
    with boundary("`schedule.path`", f"calling {path!r} with the configuration", ConfigError):
        schedule = make(config)
    if not isinstance(schedule, Schedule):
        raise ConfigError(
            f"`schedule.path` ({path!r}) returned a {type(schedule).__name__}, "
            "not a millrace.schedule.Schedule"
        )
    return schedule
