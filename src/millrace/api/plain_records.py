"""Plain records: a list of dicts that can become a pandas frame, and several runs side by side, to print, to
show in a notebook or to read field by field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType

from millrace.core.extras import refuse_missing
from millrace.core.wings import wing
from millrace.observe.terminal import as_text


class Records(list[dict[str, Any]]):
    """A list of plain dicts, one a row."""

    def __init__(self, rows: Iterable[dict[str, Any]] = ()) -> None:
        super().__init__(rows)

    def frame(self) -> Any:
        """The records as a `pandas.DataFrame`. A key that a record lacks is a missing value."""
        refuse_missing("pandas", "a frame of records")
        import pandas

        return pandas.DataFrame(list(self))


# ---------------------------------------------------------------- several runs


WIDTH = 110


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side. Its text is what `millrace compare` prints.

    `figures`: the values of each figure, in the order of `runs`. `reward`: the curve of each run.
    `differences`: the keys of the configuration in which a run differs from the first, with `key`, `old` and
    `new`.
    """

    runs: list[str]
    figures: dict[str, list[Any]]
    reward: dict[str, list[float]]
    differences: dict[str, list[dict[str, Any]]]

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON types."""
        return dict(json.loads(json.dumps(asdict(self), default=str)))

    def __str__(self) -> str:
        return as_text(self, WIDTH)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield from wing("ui.tables")(self, options.max_width)

    def _repr_html_(self) -> str:
        return str(wing("ui.html")(self))
