"""Plain records: a list of dicts that can become a pandas frame."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from millrace.core.extras import refuse_missing


class Records(list[dict[str, Any]]):
    """A list of plain dicts, one a row."""

    def __init__(self, rows: Iterable[dict[str, Any]] = ()) -> None:
        super().__init__(rows)

    def frame(self) -> Any:
        """The records as a `pandas.DataFrame`. A key that a record lacks is a missing value."""
        refuse_missing("pandas", "a frame of records")
        import pandas

        return pandas.DataFrame(list(self))
