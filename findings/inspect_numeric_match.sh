#!/usr/bin/env bash
# inspect-ai 0.3.285: `match(numeric=True)` compares five significant digits, also with location="exact".
#
# Expected. The documentation of match: "numbers are normalized and compared", and "exact requires the output be exactly
#   equal to the target". So a number is correct if it is the target's number.
# Seen. Both numbers are written with format(number, ".5g"), and the texts are compared. Numbers that agree in their first
#   five digits are equal.
# Output.
#   says 997003     target 997002     numeric C   exact and numeric C   exact as text I
#   says 1234599    target 1234567    numeric C   exact and numeric C   exact as text I
#   says 20251231   target 20251229   numeric C   exact and numeric C   exact as text I
#   says 0.333334   target 0.333331   numeric C   exact and numeric C   exact as text I
#   says 99713      target 99712      numeric I   exact and numeric I   exact as text I
# Why it matters. A product, a date or a population has more than five digits, and the digits behind them do not count. As
#   a reward it teaches nothing about them, and a benchmark of large numbers is too high. Where the answer is the number
#   alone, match("exact") compares it as text.
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
{ python3 -m venv "$venv" && "$venv/bin/pip" install -q inspect-ai==0.3.285; } || exit 2

"$venv/bin/python" - <<'PY'
import asyncio

from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Target, match
from inspect_ai.solver import TaskState


def score(scorer, said, target):
    output = ModelOutput.from_content("model", said)
    state = TaskState(model="a/model", sample_id=1, epoch=1, input="How much?", messages=[], output=output)
    return asyncio.run(scorer(state, Target(target))).value


CASES = {
    ("997003", "997002"): "CCI",
    ("1234599", "1234567"): "CCI",
    ("20251231", "20251229"): "CCI",
    ("0.333334", "0.333331"): "CCI",
    ("99713", "99712"): "III",
}
scorers = match(numeric=True), match("exact", numeric=True), match("exact")
for (said, target), seen in CASES.items():
    scores = [score(scorer, said, target) for scorer in scorers]
    numeric, exact, text = scores
    print(f"says {said:10} target {target:10} numeric {numeric}   exact and numeric {exact}   exact as text {text}")
    assert "".join(scores) == seen, f"changed: {said} for {target}"
PY
