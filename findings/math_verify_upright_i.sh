#!/usr/bin/env bash
# math-verify 0.9.0 (latex2sympy2-extended 1.11.0): the upright i of complex numbers is lost, so 4+3i is 7.
#
# Expected. \mathrm{i} is the imaginary unit and \mathrm{e} is Euler's number, as ISO 80000-2 writes them. So
#   $4+3\mathrm{i}$ is $4+3i$. With a plain i it is: the two spellings of $4+3i$ are equal, and 7 is not.
# Seen. Between dollar signs the letter is left out: 4+3\mathrm{i} is 3 + 4, 2\mathrm{i} is 2, 2\mathrm{e} is 2 and
#   4-\mathrm{i} is 4. So the real number is right, and the complex number with a plain i is refused.
# Output.
#   $4+3\mathrm{i}$  against  $7$   parsed 3 + 4   verify True
#   $2\mathrm{i}$  against  $2$   parsed 2   verify True
#   $4-\mathrm{i}$  against  $4$   parsed 4   verify True
#   $2\mathrm{e}$  against  $2$   parsed 2   verify True
#   $4-\mathrm{i}$  against  $4-i$   parsed 4   verify False
#   $4+3\mathrm{i}$  against  $4+3i$   parsed 3 + 4   verify False
# Why it matters. Public sets of Chinese examinations have references such as $4-\mathrm{i}$. A model learns from them
#   to leave the imaginary part out. Nothing is logged.
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
    (r"$4+3\mathrm{i}$", "$7$", True),
    (r"$2\mathrm{i}$", "$2$", True),
    (r"$4-\mathrm{i}$", "$4$", True),
    (r"$2\mathrm{e}$", "$2$", True),
    (r"$4-\mathrm{i}$", "$4-i$", False),
    (r"$4+3\mathrm{i}$", "$4+3i$", False),
]
assert verify(parse("$4+3i$"), parse("$3i+4$")), "complex numbers with a plain i are no longer equal"
assert not verify(parse("$4+3i$"), parse("$7$")), "a plain i is lost too"
for reference, given, seen in CASES:
    expression = parse(reference)
    verdict = verify(expression, parse(given))
    print(f"{reference}  against  {given}   parsed {expression[0]}   verify {verdict}")
    assert verdict is seen, f"changed: {reference} against {given}"
PY
