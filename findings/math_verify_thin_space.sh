#!/usr/bin/env bash
# math-verify 0.9.0 (latex2sympy2-extended 1.11.0): 10\,000 and 25\,000 are both 0, so they are equal.
#
# Expected. \, is how LaTeX writes the space between groups of three digits. So $10\,000$ is 10000 and not $25\,000$.
#   With commas, $10,000$ is read as 10000.
# Seen. The space is a multiplication: 10\,000 is 10 * 000 = 0. All numbers that end in a group of zeros are equal. The
#   right answer in another spelling, 10000, is refused. "\ ", "\;" and a blank between dollar signs do the same.
# Output.
#   $10\,000$  against  $25\,000$   parsed 10*0   verify True
#   $10 000$  against  $25 000$   parsed 10*0   verify True
#   \boxed{1\,200\,000}  against  \boxed{7\,000}   parsed 1*200*0   verify True
#   $10\,000$  against  $10000$   parsed 10*0   verify False
# Why it matters. Textbooks of most languages but English write numbers so, and models copy it. Where a row's answer
#   has it, every answer in thousands earns 1. Where the model has it, the right answer earns 0. Nothing is logged.
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
{
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q math-verify==0.9.0 latex2sympy2-extended==1.11.0 antlr4-python3-runtime==4.11.0 \
        sympy==1.14.0
} || exit 2

"$venv/bin/python" - <<'PY'
from math_verify import parse, verify

CASES = [
    (r"$10\,000$", r"$25\,000$", True),
    (r"$10\ 000$", r"$25\ 000$", True),
    (r"$10\;000$", r"$25\;000$", True),
    ("$10 000$", "$25 000$", True),
    (r"\boxed{1\,200\,000}", r"\boxed{7\,000}", True),
    (r"$10\,000$", "$10000$", False),
]
assert verify(parse("$10,000$"), parse("$10000$")), "a comma is no longer a separator"
assert not verify(parse("$10,000$"), parse("$25,000$")), "different numbers with commas are equal"
for reference, given, seen in CASES:
    expression = parse(reference)
    verdict = verify(expression, parse(given))
    print(f"{reference}  against  {given}   parsed {expression[0]}   verify {verdict}")
    assert verdict is seen, f"changed: {reference} against {given}"
PY
