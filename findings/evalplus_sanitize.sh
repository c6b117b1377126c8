#!/usr/bin/env bash
# evalplus 0.3.1: sanitize removes decorated functions, loops and tuple assignments that the solution needs.
#
# Expected. The module's docstring: "Post-processing LLM-generated Python code". It takes text around a program away, so
#   a program that passes its tests passes them after it.
# Seen. At the top level only imports, classes, functions and assignments to one name stay, as far as the entry point
#   needs them. A function below a decorator (`@lru_cache`) is none of these and is removed. So are `for` loops that
#   fill a table, `A, B = 1, 2`, and imports inside `try`. The rest raises an error. `bigcodebench.sanitize` has the same
#   list of what stays (bigcodebench 0.2.5, read, not run).
# Output.
#   decorated function    before 55  after NameError: name 'fib' is not defined
#   loop fills a table    before 13  after IndexError: list index out of range
#   tuple assignment      before 9   after NameError: name 'START' is not defined
#   import inside try     before 4   after NameError: name 'gcd' is not defined
# Why it matters. Used in front of an evaluation or as the reward of a code environment, it gives 0 to right programs,
#   and above all to those with memoisation. A policy unlearns `@lru_cache`. The failure looks like the model's own.
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
{
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q --no-deps --no-warn-conflicts evalplus==0.3.1
    "$venv/bin/pip" install -q --no-warn-conflicts datasets==5.2.0 tree-sitter==0.26.1 tree-sitter-python==0.25.0 appdirs==1.4.4 \
        tempdir==0.7.1 wget==3.2 multipledispatch==1.0.0 termcolor==3.1.0
} || exit 2

"$venv/bin/python" - <<'PY'
from evalplus.sanitize import sanitize

PROGRAMS = {
    "decorated function": """
from functools import lru_cache

@lru_cache(maxsize=None)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)

def solve():
    return fib(10)
""",
    "loop fills a table": """
PRIMES = []
for number in range(2, 50):
    if all(number % prime for prime in PRIMES):
        PRIMES.append(number)

def solve():
    return PRIMES[5]
""",
    "tuple assignment": """
START, STEP = 1, 4

def solve():
    return START + 2 * STEP
""",
    "import inside try": """
try:
    from math import gcd
except ImportError:
    from fractions import gcd

def solve():
    return gcd(12, 8)
""",
}


def outcome(program):
    names = {}
    try:
        exec(program, names)
        return str(names["solve"]())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


for name, program in PROGRAMS.items():
    before, after = outcome(program), outcome(sanitize(program, entrypoint="solve"))
    print(f"{name:21} before {before:3} after {after}")
    assert before.isdigit(), "the program itself does not run"
    assert after.startswith(("NameError", "IndexError")), f"changed: {name}"
PY
