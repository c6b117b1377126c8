#!/usr/bin/env bash
# verl 0.9.1: the reward of the DAPO recipe refuses "Answer: 34." and pays for "Answer: $5$ or $7$".
#
# Expected. verl.utils.reward_score.math_dapo.compute_score gives 1.0 to a right answer on a line `Answer: ...`, and -1.0
#   to a wrong one. The docstring: "1.0 for correct, -1.0 for incorrect".
# Seen. The whole rest of the line is compared as text. A full stop, bold type or \( \) makes the right answer wrong.
#   Of several formulas in dollar signs only the first remains, so a line with two different answers is right if the
#   first one is. "1,2" loses its comma and equals 12.
# Output.
#   'Answer: 34'            for 34  1.0
#   'Answer: 34.'           for 34 -1.0   (right)
#   '**Answer:** 34'        for 34 -1.0   (right)
#   '**Answer: 34**'        for 34 -1.0   (right)
#   'Answer: \\(34\\)'      for 34 -1.0   (right)
#   'Answer: $5$ or $7$'    for 5   1.0   (two answers)
#   'Answer: 1,2'           for 12  1.0   (another answer)
# Why it matters. verl takes this function for every row whose data source is "math_dapo", "math" or begins with
#   "aime". Chat models write bold type and full stops. So a part of the reward is for punctuation, a comparison of two
#   start models measures their habits too, and an evaluation on AIME counts right answers as wrong.
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
{ python3 -m venv "$venv" && "$venv/bin/pip" install -q --no-deps verl==0.9.1; } || exit 2

# The module imports only `re`. It is loaded by its path, since `import verl` wants Ray and torch.
"$venv/bin/python" - <<'PY'
import runpy
import sysconfig

path = sysconfig.get_path("purelib") + "/verl/utils/reward_score/math_dapo.py"
compute_score = runpy.run_path(path)["compute_score"]

CASES = [
    ("Answer: 34", "34", 1.0, ""),
    ("Answer: 34.", "34", -1.0, "(right)"),
    ("**Answer:** 34", "34", -1.0, "(right)"),
    ("**Answer: 34**", "34", -1.0, "(right)"),
    (r"Answer: \(34\)", "34", -1.0, "(right)"),
    ("Answer: $5$ or $7$", "5", 1.0, "(two answers)"),
    ("Answer: 1,2", "12", 1.0, "(another answer)"),
]
for completion, reference, seen, note in CASES:
    score = compute_score(completion, reference)["score"]
    print(f"{completion!r:23} for {reference:3}{score:4}   {note}".rstrip())
    assert score == seen, f"changed: {completion!r} for {reference}"
PY
