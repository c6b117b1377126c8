"""The table of sizes in the documents is the planner's."""

from __future__ import annotations

import sizes


def test_the_document_has_the_table_that_the_planner_writes() -> None:
    table = sizes.DOCUMENT.read_text().partition(sizes.BEGIN)[2].partition(sizes.END)[0]
    assert table.splitlines() == sizes.rows(), "run `python benchmarks/sizes.py --write`"
