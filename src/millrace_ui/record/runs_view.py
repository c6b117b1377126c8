"""Which runs a list shows and how: the choices in its address. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import urlencode

from millrace_ui.record.runs import RunRow

COLUMNS: dict[str, Callable[[RunRow], Any]] = {
    "run": lambda row: row.name,
    "state": lambda row: row.state,
    "step": lambda row: row.version,
    "reward": lambda row: row.reward,
    "started": lambda row: row.started_s,
    "duration": lambda row: row.took_s,
    "model": lambda row: row.model,
    "task": lambda row: row.task,
    "algorithm": lambda row: row.algorithm,
    "schedule": lambda row: row.schedule,
    "tags": lambda row: ", ".join(row.tags),
}
"""What a column shows and sorts by. A narrow window has the first ones."""
LARGEST_FIRST = ("started", "duration", "step", "reward")
WORDS = ("run", "state", "model", "task", "algorithm", "schedule", "tags")
"""Columns in which a word of a search is looked for."""


@dataclass(frozen=True, slots=True)
class RunsView:
    """`find`: words that a run must all have; `KEY=VALUE` is a key of its configuration, `-WORD` leaves out.
    `sort`: a column; empty: as given. `reverse` turns the order round. `group`: a column or a key."""

    find: str = ""
    sort: str = ""
    reverse: str = ""
    group: str = ""
    num: str = ""

    @classmethod
    def of(cls, query: Mapping[str, list[str]]) -> RunsView:
        given = {one.name: (query.get(one.name) or [""])[0] for one in fields(cls)}
        return cls(**given | {"sort": given["sort"] if given["sort"] in COLUMNS else ""})

    def address(self, **changes: str) -> str:
        """The query string of this view with changes."""
        changed = replace(self, **changes)
        values = {one.name: getattr(changed, one.name) for one in fields(changed)}
        return "?" + urlencode({name: value for name, value in values.items() if value})

    def sorted_by(self, column: str) -> str:
        """The address of this view sorted by a column. A second time turns the order round."""
        again = self.sort == column and not self.reverse
        return self.address(sort=column, reverse="1" if again else "")

    @property
    def is_descending(self) -> bool:
        return (self.sort in LARGEST_FIRST) != bool(self.reverse)

    def chosen(self, rows: Sequence[RunRow]) -> list[RunRow]:
        """Runs without a value come last."""
        words = self.find.split()
        kept = [row for row in rows if all(_has(row, word) for word in words)]
        if not self.sort:
            return kept
        value = COLUMNS[self.sort]
        known = [row for row in kept if value(row) not in (None, "")]
        known.sort(key=value, reverse=self.is_descending)
        return known + [row for row in kept if value(row) in (None, "")]

    def groups(self, rows: Sequence[RunRow]) -> list[tuple[str, list[RunRow]]]:
        """Rows by the value of `group`, the value with most rows first. Without `group`: all rows."""
        if not self.group:
            return [("", list(rows))]
        grouped: dict[str, list[RunRow]] = {}
        for row in rows:
            grouped.setdefault(_value(row, self.group), []).append(row)
        return sorted(grouped.items(), key=lambda item: -len(item[1]))


def written(value: Any) -> str:
    """A value as a configuration file has it, without quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def _value(row: RunRow, name: str) -> str:
    if name in COLUMNS:
        return str(COLUMNS[name](row))
    return written(row.keys[name]) if name in row.keys else "not there"


def _has(row: RunRow, word: str) -> bool:
    if len(bare := word.lstrip("-")) < len(word) and bare:
        return _has(row, bare) == ((len(word) - len(bare)) % 2 == 0)
    key, equals, value = word.partition("=")
    if not (equals and key):
        return any(word.casefold() in str(COLUMNS[name](row)).casefold() for name in WORDS)
    if key in COLUMNS:
        return value.casefold() in _value(row, key).casefold()
    return any(
        _equal(written(own), value)
        for name, own in row.keys.items()
        if name == key or name.endswith(f".{key}")
    )


def _equal(own: str, wanted: str) -> bool:
    """1e-6 is 1e-06."""
    try:
        return float(own) == float(wanted)
    except ValueError:
        return own.casefold() == wanted.casefold()
