#!/usr/bin/env bash
# reasoning-gym 0.1.25: four families pay the whole reward for wrong answers.
#
# Expected. The documentation of `score_answer`: the score is 1.0 for a right answer. A wrong constant is not one.
# Seen. Each scorer loses what the row asks.
#   game_of_life_halting  compares bool(answer) with bool(reference). The reference is the text "True" or "False",
#                         and a text that is not empty is true. So every text earns 1.0.
#   puzzle24              looks at the value and at the range of the numbers, not at the numbers of the row. So one
#                         solution earns 1.0 in every row.
#   complex_arithmetic    takes min(1.0, exp(-distance)). Where the distance is nan, min gives its first argument.
#   coin_flip             pays the part of the digits that agree, over the shorter text. So "0" earns 1.0 for "0.3125", and
#                         nothing for the few references such as "7.6e-06".
# Output. The mean score of one answer over 50 rows, none of which has it as its answer:
#   game_of_life_halting   '4'               1.0
#   puzzle24               '1 + 2 + 3 * 7'   1.0
#   complex_arithmetic     'nan'             1.0
#   coin_flip              '0'               0.94
# Why it matters. The families are made for reinforcement learning. A policy that finds such an answer gives it for
#   every prompt, and the curve of the reward looks like success.
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
{
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q reasoning-gym==0.1.25 sympy==1.14.0
} || exit 2

"$venv/bin/python" - <<'PY'
import re
from collections import Counter

from reasoning_gym import create_dataset

SEEN = (
    ("game_of_life_halting", "4", 1.0),
    ("puzzle24", "1 + 2 + 3 * 7", 1.0),
    ("complex_arithmetic", "nan", 1.0),
    ("coin_flip", "0", 0.94),
)


def is_wrong(answer, row):
    if row["metadata"]["source_dataset"] == "puzzle24":
        return Counter(map(int, re.findall(r"\d+", answer))) != Counter(row["metadata"]["numbers"])
    return row["answer"] != answer


for family, answer, seen in SEEN:
    dataset = create_dataset(family, size=60, seed=1)
    rows = [row for row in dataset if is_wrong(answer, row)][:50]
    assert len(rows) == 50, f"{family}: {len(rows)} rows"
    assert all(dataset.score_answer(row["answer"], row) == 1.0 for row in rows), f"{family}: references"
    mean = sum(dataset.score_answer(answer, row) for row in rows) / len(rows)
    print(f"{family:22} {answer!r:17} {mean}")
    assert mean == seen, f"changed: {family}"
PY
