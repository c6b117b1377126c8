"""Published numbers beside what the simulator predicts for them.

python benchmarks/validation.py [--only verl,areal,laminar,llamarl] [--json]

`--json` gives the largest relative error over the rows held out of each source, and every row.
"""

from __future__ import annotations

import argparse
import json

from published import areal, laminar, llamarl, verl
from published.row import Row, largest_error

SOURCES = {"verl": verl, "areal": areal, "laminar": laminar, "llamarl": llamarl}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(SOURCES), help="sources, with commas")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tables = {name: SOURCES[name].rows() for name in options.only.split(",")}
    largest = {name: largest_error(rows) for name, rows in tables.items()}
    if options.json:
        print(json.dumps({**largest, "rows": [_as_dict(row) for rows in tables.values() for row in rows]}))
        return
    for name, rows in tables.items():
        for row in rows:
            mark = "  (calibrates)" if row.calibrates else ""
            values = f"{row.published:8.3g} {row.predicted:8.3g} {row.unit:2} {row.error:+5.0%}"
            print(f"{row.what:58} {values}{mark}")
        print(f"{name}: largest error held out {largest[name]:.0%}\n")


def _as_dict(row: Row) -> dict[str, object]:
    return {**vars(row), "error": row.error}


if __name__ == "__main__":
    main()
