"""Published numbers beside what the simulator predicts for them.

python benchmarks/validation.py [--only verl,areal,laminar,llamarl,real_run,policies] [--json]

`--json` gives the largest relative error over the rows held out of each source, of the simulations of real
runs made here (real_run.py), `millrace_over_laminar` (policies.py, one seed), and every row.
All of it takes 8 to 10 minutes on two cores: the published tables 3 to 5, real runs 2, policies 3. Real runs
want the machine for themselves.
"""

from __future__ import annotations

import json

import policies
import real_run
from common import parser_of, sized
from published import areal, laminar, llamarl, verl
from published.row import Row, largest_error

SOURCES = {"verl": verl, "areal": areal, "laminar": laminar, "llamarl": llamarl}
REAL_RUN, POLICIES = "real_run", "policies"


def main() -> None:
    parser = parser_of(__doc__)
    everything = ",".join([*SOURCES, *sized([REAL_RUN, POLICIES], [])])  # each has a benchmark
    parser.add_argument("--only", default=everything, help="sources, with commas")
    options = parser.parse_args()
    wanted = options.only.split(",")
    tables = {name: SOURCES[name].rows() for name in wanted if name in SOURCES}
    found = {name: largest_error(rows) for name, rows in tables.items()}
    if REAL_RUN in wanted:
        found[REAL_RUN] = real_run.worst(real_run.trained())
    if POLICIES in wanted:
        found["millrace_over_laminar"] = policies.millrace_over_laminar()
    if options.json:
        print(json.dumps({"rows": [_as_dict(row) for rows in tables.values() for row in rows], **found}))
        return
    for rows in tables.values():
        for row in rows:
            mark = "  (calibrates)" if row.calibrates else ""
            values = f"{row.published:8.3g} {row.predicted:8.3g} {row.unit:2} {row.error:+5.0%}"
            print(f"{row.what:58} {values}{mark}")
    for name, value in found.items():
        print(f"{name:58} {value:8.3f}")


def _as_dict(row: Row) -> dict[str, object]:
    return {**vars(row), "error": row.error}


if __name__ == "__main__":
    main()
