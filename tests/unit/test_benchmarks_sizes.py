"""The table of sizes in the documents is the planner's."""

from __future__ import annotations

import sizes
from common import parts_of


def test_the_document_has_the_table_that_the_planner_writes() -> None:
    table = parts_of(sizes.DOCUMENT, "sizes.py")[1]
    assert table.splitlines() == sizes.rows(), "run `python benchmarks/sizes.py --write`"
