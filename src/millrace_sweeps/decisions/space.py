"""Which combinations of keys are tried: a grid, or draws from ranges and choices; and their names. Pure.

Keys are dotted, as of `--set`. A combination is a dict of keys with their values.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product
from random import Random
from typing import Any

Overrides = dict[str, Any]

DRAWS_PER_TRIAL = 20
"""A combination that was drawn before is drawn again, so often at most."""
DIGITS = 4
"""Significant digits of a drawn number, so that it can be read and typed."""


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included. Integers if both are. `log`: uniform in the logarithm."""

    low: float
    high: float
    log: bool = False

    @property
    def of_integers(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def draw(self, random: Random) -> float:
        if self.log:
            return self.rounded(math.exp(random.uniform(math.log(self.low), math.log(self.high))))
        return (
            random.randint(int(self.low), int(self.high))
            if self.of_integers
            else self.rounded(random.uniform(self.low, self.high))
        )

    def rounded(self, value: float) -> float:
        """`value` with few digits, or as an integer, and within the range."""
        near = round(value) if self.of_integers else float(f"{value:.{DIGITS}g}")
        return min(max(near, self.low), self.high)


Domain = Range | list[Any]


def holds(domain: Domain, value: Any) -> bool:
    """Whether a value could be proposed from a domain."""
    if isinstance(domain, Range):
        kinds = (int,) if domain.of_integers else (int, float)
        return type(value) in kinds and domain.low <= value <= domain.high
    return identity({"": value}) in [identity({"": one}) for one in domain]


def choices(grid: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The values of each key. Raises: ValueError: a value is no list, or a list is empty or repeats."""
    keys = dict(_leaves(grid))
    for key, values in keys.items():
        _check_choices(f"grid.{key}", values)
    return keys


def domains(keys: Mapping[str, Any], table: str) -> dict[str, Domain]:
    """The domain of each key. Raises: ValueError: a value is neither choices nor a range."""
    if not keys:
        raise ValueError(f'`{table}` is empty.\n  Write "optimizer.lr" = {{ low = 1e-5, high = 1e-3 }}')
    return {key: _domain(f"{table}.{key}", value) for key, value in _leaves(keys)}


def grid(values: Mapping[str, Sequence[Any]]) -> list[Overrides]:
    """Every combination; the last key changes first. Without keys, the empty combination alone."""
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def drawn(domain_of: Mapping[str, Domain], trials: int, seed: int) -> list[Overrides]:
    """`trials` different combinations, fewer if there are no more. The first do not depend on `trials`."""
    combinations: dict[str, Overrides] = {}
    for index in range(DRAWS_PER_TRIAL * trials):
        if len(combinations) == trials:
            break
        random = Random(f"{seed}/{index}")
        overrides = {
            key: domain.draw(random) if isinstance(domain, Range) else random.choice(domain)
            for key, domain in domain_of.items()
        }
        combinations.setdefault(identity(overrides), overrides)
    return list(combinations.values())


def corners(domain_of: Mapping[str, Domain]) -> list[Overrides]:
    """The combination of the first values of all keys, and that of the last."""
    ends = {k: (d.low, d.high) if isinstance(d, Range) else (d[0], d[-1]) for k, d in domain_of.items()}
    return [{key: pair[side] for key, pair in ends.items()} for side in (0, 1)]


def with_seeds(combinations: Sequence[Overrides], seeds: Sequence[int]) -> list[Overrides]:
    """Each combination with each seed. All combinations have the first seed before any has the second."""
    if not seeds:
        return list(combinations)
    return [{**one, "seed": seed} for seed in seeds for one in combinations]


def identity(overrides: Mapping[str, Any]) -> str:
    """Equal exactly for equal combinations."""
    return json.dumps(overrides, sort_keys=True)


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys with what they are given. A range is a table too, of `low` and `high`."""
    for name, value in table.items():
        if isinstance(value, dict) and not value.keys() & {"low", "high"}:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _check_choices(key: str, values: Any) -> None:
    if not isinstance(values, list) or not values:
        raise ValueError(f"`{key}` ({values!r}) must be a list of values.\n  Write [VALUE, OTHER]")
    if len({identity({"": value}) for value in values}) < len(values):
        raise ValueError(f"`{key}` ({values!r}) has a value twice.\n  Leave one of them out")


def _domain(key: str, value: Any) -> Domain:
    if not isinstance(value, dict):
        _check_choices(key, value)
        return list(value)
    write = "Write { low = 1e-5, high = 1e-3 }, with log = true for a uniform logarithm"
    if not {"low", "high"} <= value.keys() <= {"low", "high", "log"}:
        raise ValueError(f"`{key}` ({value!r}) must have `low` and `high`, and may have `log`.\n  {write}")
    low, high, log = value["low"], value["high"], value.get("log", False)
    if type(low) not in (int, float) or type(high) not in (int, float) or not isinstance(log, bool):
        raise ValueError(f"`{key}` ({value!r}) must have numbers as `low` and `high`.\n  {write}")
    if not low < high or (log and low <= 0):
        least = "0 < low < high" if log else "low < high"
        raise ValueError(f"`{key}` ({value!r}) must have {least}.\n  Correct the range")
    return Range(low, high, log)


# ---------------------------------------------------------------- the name of a trial, which is its directory

NAME_MAX = 100
DIGEST_BYTES = 4


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """The last part of each key, or all of it if two keys end alike."""
    keys = list(keys)
    last = [key.rpartition(".")[2] for key in keys]
    return {key: end if last.count(end) == 1 else key for key, end in zip(keys, last, strict=True)}


def trial_name(overrides: Mapping[str, Any]) -> str:
    """What a name cannot show, such as a path or a table, is in a digest at its end."""
    short = short_keys(overrides)
    exact = ",".join(f"{short[key]}={_text(value)}" for key, value in overrides.items())
    name = re.sub(r"[^\w.,=+-]+", "_", exact, flags=re.ASCII)[:NAME_MAX]
    if name == exact and all(map(_is_exact, overrides.values())):
        return name
    digest = blake2b(identity(overrides).encode(), digest_size=DIGEST_BYTES).hexdigest()
    return f"{name}-{digest}"


def shown(value: Any) -> str:
    """A value in a table."""
    return _text(value)


def _text(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.{DIGITS}g}"
        case {"kind": str(kind)}:
            return kind
    return str(value)


def _is_exact(value: Any) -> bool:
    """Whether the text of a value tells it from every other value."""
    if isinstance(value, float):
        return float(_text(value)) == value
    return isinstance(value, bool | int | str)
