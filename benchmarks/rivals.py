"""Other systems' schedules as presets: what their papers published, what ours gain, and why they differ.

    python benchmarks/rivals.py [--json] [--only staleflow,heddle]

Each paper's own setting is simulated, with our preset of the system against the paper's own baselines. What
is not published is chosen, and the docstring of each module of `published/` says what. Runs are kept, so a
call that was interrupted goes on.

rows                 system, what is compared, published, simulated, and why they differ
<system>_error       the largest relative error of a system's rows

A part that is more than published figures is a function that returns figures by name: see `PARTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from common import parser_of, report, sized
from frontier import SIZES, frontier, simulated
from published import areal_hex, heddle, rlboost, roll_flash, rollpacker, staleflow, streamrl
from published.row import largest_error

SYSTEMS = {
    "staleflow": staleflow,
    "heddle": heddle,
    "rollpacker": rollpacker,
    "areal_hex": areal_hex,
    "streamrl": streamrl,
    "roll_flash": roll_flash,
    "rlboost": rlboost,
}
"""Modules with `rows()`."""


def main() -> None:
    parser = parser_of(__doc__)
    names = [*SYSTEMS, *PARTS]
    parser.add_argument("--only", default=",".join(names), help=f"of {', '.join(names)}; with commas")
    options = parser.parse_args()
    only = options.only.split(",")
    result = published([name for name in only if name in SYSTEMS])
    for name, figures in PARTS.items():
        if name in only:
            result |= figures()
    report(result, as_json=options.json)


def published(names: Sequence[str]) -> dict[str, Any]:
    """The one table."""
    result: dict[str, Any] = {"rows": []}
    for name in names:
        rows = SYSTEMS[name].rows()
        result["rows"] += [{**vars(row), "error": row.error} for row in rows]
        result[f"{name}_error"] = largest_error(rows)
        for row in rows:
            print(f"{name:10} {row.what:58} {row.published:7.3g} {row.predicted:7.3g} {row.unit}")
        print(f"{'':10} differs: {rows[0].why}")
    return result


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "frontier": lambda: frontier(simulated(sized([*SIZES], [64]), seeds=1, jobs=1))
}
"""Other figures of this comparison, by name, each from a module of its own."""


if __name__ == "__main__":
    main()
