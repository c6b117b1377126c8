#!/usr/bin/env bash
# skyrl-gym 0.4.0: the exact match of its search environment drops signs inside numbers and names, and an answer that is an article.
#
# Expected. `compute_score` is the exact match of answers to questions, `compute_score_subem` whether the answer is in the
#   text. 1.5 is not 15, -40 is not 40, C++ is not C#, and not every text has the answer "A" in it.
# Seen. The text is compared without any sign of string.punctuation and without the words a, an and the. So a decimal point
#   and a minus are lost. An answer such as "A" (a vitamin, a blood group) becomes an empty text. It equals "The", and it is
#   in every text, so `compute_score_subem` pays for each.
# Output. Reference, completion's answer, exact match, match of a part:
#   1.5 million   15 million     1.0   1.0   (wrong answer)
#   -40           40             1.0   1.0   (wrong answer)
#   3:10          310            1.0   1.0   (wrong answer)
#   C++           C#             1.0   1.0   (wrong answer)
#   A             The            1.0   1.0   (wrong answer)
#   A             no idea        0.0   1.0   (wrong answer)
#   1.5 million   1,500,000      0.0   0.0   (right answer)
# Why it matters. The rule is that of SQuAD, which had few numbers. Here it is a reward: amounts, temperatures, scores and
#   times are common answers to questions for a search engine. The policy is paid for answers that are wrong by a factor of ten.
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
{
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q skyrl-gym==0.4.0
} || exit 2

"$venv/bin/python" - <<'PY'
from skyrl_gym.envs.search.utils import compute_score, compute_score_subem

CASES = (
    ("1.5 million", "15 million", 1.0, 1.0, "wrong answer"),
    ("-40", "40", 1.0, 1.0, "wrong answer"),
    ("3:10", "310", 1.0, 1.0, "wrong answer"),
    ("C++", "C#", 1.0, 1.0, "wrong answer"),
    ("A", "The", 1.0, 1.0, "wrong answer"),
    ("A", "no idea", 0.0, 1.0, "wrong answer"),
    ("1.5 million", "1,500,000", 0.0, 0.0, "right answer"),
)
assert compute_score("<answer>rome</answer>", {"target": ["Rome"]}) == 1.0
assert compute_score_subem("<answer>Milan</answer>", {"target": ["Rome"]}) == 0.0
for reference, answer, *seen, note in CASES:
    completion, target = f"<answer>{answer}</answer>", {"target": [reference]}
    scores = [compute_score(completion, target), compute_score_subem(completion, target)]
    print(f"{reference:13} {answer:12} {scores[0]:5.1f} {scores[1]:5.1f}   ({note})")
    assert scores == seen, f"changed: {answer} for {reference}"
PY
