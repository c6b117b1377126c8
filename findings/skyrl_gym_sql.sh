#!/usr/bin/env bash
# skyrl-gym 0.4.0: the reward of SQL compares sets of rows, so order and repeated rows do not count.
#
# Expected. The reward is 1.0 if the query gives what the reference gives. A list of cities from the warmest to the coldest
#   is not the list from the coldest to the warmest, and one row for each order is not one row for each customer.
# Seen. `execute_sql_wrapper_single` makes a frozenset of the rows. A query that sorts the wrong way earns 1.0, one that
#   does not sort too, and so do a missing DISTINCT, an added DISTINCT and a join that repeats rows.
# Output. Reference, query, reward:
#   ORDER BY degrees DESC          ORDER BY degrees ASC             1.0   (wrong)
#   ORDER BY degrees DESC          no ORDER BY                      1.0   (wrong)
#   SELECT DISTINCT country        SELECT country                   1.0   (wrong)
#   SELECT degrees (two are 30)    SELECT DISTINCT degrees          1.0   (wrong)
#   ORDER BY degrees DESC LIMIT 1  ORDER BY degrees LIMIT 1         0.0   (wrong, and seen: another row)
# Why it matters. "From the highest to the lowest" and "how many of each" are common in questions about tables. The policy is
#   paid for leaving out ORDER BY and DISTINCT.
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
{
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q skyrl-gym==0.4.0
} || exit 2

cd "$venv"
"$venv/bin/python" - <<'PY'
import sqlite3

from skyrl_gym.envs.sql.utils import compute_score_single

CITIES = [("Oslo", "Norway", 12), ("Bergen", "Norway", 9), ("Rome", "Italy", 30), ("Milan", "Italy", 30)]
with sqlite3.connect("cities.db") as db:
    db.execute("CREATE TABLE cities (name TEXT, country TEXT, degrees INTEGER)")
    db.executemany("INSERT INTO cities VALUES (?, ?, ?)", CITIES)

CASES = (
    ("SELECT name FROM cities ORDER BY degrees DESC", "SELECT name FROM cities ORDER BY degrees ASC", 1.0),
    ("SELECT name FROM cities ORDER BY degrees DESC", "SELECT name FROM cities", 1.0),
    ("SELECT DISTINCT country FROM cities", "SELECT country FROM cities", 1.0),
    ("SELECT degrees FROM cities", "SELECT DISTINCT degrees FROM cities", 1.0),
    ("SELECT degrees FROM cities ORDER BY degrees DESC LIMIT 1", "SELECT degrees FROM cities ORDER BY degrees LIMIT 1", 0.0),
)
for reference, query, seen in CASES:
    reward = compute_score_single(f"<think>.</think><solution>{query}</solution>", reference, "cities.db")
    print(f"{reference:57} {query:52} {reward}")
    assert reward == seen, f"changed: {query} for {reference}"
PY
