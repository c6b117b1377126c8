"""Which runs of a comparison form one line, and the keys of their configurations that differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millrace_ui.drawing import fragments
from millrace_ui.drawing.runs_table import COMPARED_MAX, GROUPED_MAX
from millrace_ui.record.run_rows import RunRow, varying
from millrace_ui.record.runs_view import COLUMNS, RunsView, written

GROUPS_MAX = 12
VALUES_MAX = 4
"""The most different values of a group that a cell names."""


@dataclass(frozen=True, slots=True)
class RunGroups:
    """Runs by the label of their line. `left_out`: runs for which there is no room."""

    members: Mapping[str, Sequence[RunRow]]
    grouped: bool
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, rows: Sequence[RunRow], group: str) -> RunGroups:
        """By a column or key that any run has. Else each run is alone."""
        if not any(group in row.keys or group in COLUMNS for row in rows):
            alone = {row.name: [row] for row in rows[:COMPARED_MAX]}
            return cls(alone, False, tuple(row.name for row in rows[COMPARED_MAX:]))
        groups = RunsView(group=group).groups(rows[:GROUPED_MAX])
        rest = [row for _, members in groups[GROUPS_MAX:] for row in members] + list(rows[GROUPED_MAX:])
        members = {f"{group} = {value or '–'}": several for value, several in groups[:GROUPS_MAX]}
        return cls(members, True, tuple(row.name for row in rest))

    @property
    def names(self) -> list[str]:
        return [row.name for rows in self.members.values() for row in rows]

    @property
    def most(self) -> str:
        """What there is room for."""
        return f"{GROUPED_MAX} runs and {GROUPS_MAX} groups" if self.grouped else f"{COMPARED_MAX} runs"


def configurations(members: Mapping[str, Sequence[RunRow]]) -> str:
    """One table: a row for each key that differs, a column for each run or group."""
    every = [row for rows in members.values() for row in rows]
    lines = [(key, *(_values(key, rows) for rows in members.values())) for key in varying(every)]
    return fragments.table(("key", *members), lines, empty="Their configurations are equal.")


def _values(key: str, rows: Sequence[RunRow]) -> str:
    values = list(dict.fromkeys(written(row.keys[key]) if key in row.keys else "not there" for row in rows))
    more = f", and {len(values) - VALUES_MAX} more" if len(values) > VALUES_MAX else ""
    return ", ".join(values[:VALUES_MAX]) + more
