#!/usr/bin/env bash
# mathruler 0.1.0 (pylatexenc 2.10, sympy 1.14.0): a fraction loses the brackets around its numerator and denominator.
#
# Expected. The docstring of grade_answer: an answer is correct if "sympy can simplify the difference between the
#   expressions to 0". \frac{x+1}{2} and x+\frac{1}{2} differ by x/2, so the answer is wrong.
# Seen. pylatexenc writes \frac{x+1}{2} as text: x+1/2. sympy then reads x + 1/2. So a wrong answer is accepted. A right
#   answer in another form is refused, since 2x+2 over 4 becomes 2x + 2/4.
# Output.
#   \frac{x+1}{2}   for  x+\frac{1}{2}    True   (wrong answer)
#   \frac{1}{x+1}   for  \frac{1}{x}+1    True   (wrong answer)
#   \frac{1+3}{2}   for  2.5              True   (wrong answer: it is 2)
#   \frac{2x+2}{4}  for  \frac{x+1}{2}    False  (right answer)
# Why it matters. The function grades the mathematics of models. Its source says that it is largely the grader of
#   PRM800K, and verl's prime_math reads fractions in the same way. Sums inside fractions are common in algebra. The
#   reward is wrong in both directions without a word: the run pays for a slip, and not for an equal form.
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
{
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q --no-deps mathruler==0.1.0 pylatexenc==2.10 sympy==1.14.0 mpmath==1.3.0 tqdm==4.70.1
} || exit 2

"$venv/bin/python" - <<'PY'
from mathruler.grader import grade_answer

CASES = [
    (r"\frac{x+1}{2}", r"x+\frac{1}{2}", True, "wrong answer"),
    (r"\frac{1}{x+1}", r"\frac{1}{x}+1", True, "wrong answer"),
    (r"\frac{1+3}{2}", "2.5", True, "wrong answer: it is 2"),
    (r"\frac{2x+2}{4}", r"\frac{x+1}{2}", False, "right answer"),
]
assert grade_answer(r"\frac{1}{2}", "0.5"), "a plain fraction is no longer equal to its value"
assert not grade_answer("3", "2"), "two numbers are equal"
for given, reference, seen, note in CASES:
    verdict = grade_answer(given, reference)
    print(f"{given:15} for  {reference:16} {verdict!s:6} ({note})")
    assert verdict is seen, f"changed: {given} for {reference}"
PY
