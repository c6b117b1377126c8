"""A schedule from a function that the configuration names."""

from __future__ import annotations

from millrace.config.objects import load_function
from millrace.config.schema import Config
from millrace.core.errors import ConfigError, boundary
from millrace.schedule.schedule import Schedule


def from_function(path: str, config: Config) -> Schedule:
    """Raises: ConfigError: there is no such function, it fails, it returns something else, or a schedule that
    permits more staleness than `schedule.staleness_max`."""
    make, _ = load_function("schedule.path", path)
    with boundary("`schedule.path`", f"calling {path!r} with the configuration", ConfigError):
        schedule = make(config)
    if not isinstance(schedule, Schedule):
        raise ConfigError(
            f"`schedule.path` ({path!r}) returned a {type(schedule).__name__}, "
            "not a millrace.schedule.Schedule"
        )
    _refuse_looser(path, schedule.staleness_max, config.staleness_bound)
    return schedule


def _refuse_looser(path: str, bound: int | None, key: int | None) -> None:
    """The rest of a run goes by the key: what it keeps, what it promises, and what its checks permit."""
    if key is not None and (bound is None or bound > key):
        own = "no staleness bound" if bound is None else f"the staleness bound {bound}"
        more = '"none"' if bound is None else str(bound)
        raise ConfigError(
            f"`schedule.path` ({path!r}) returned a schedule with {own}, and `schedule.staleness_max` is "
            f"{key}.\n"
            f"  Give the schedule `config.staleness_bound`, or set schedule.staleness_max = {more}"
        )
