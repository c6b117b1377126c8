#!/usr/bin/env bash
# bfcl-eval 2026.3.23: the checker of the Berkeley Function-Calling Leaderboard accepts other dates, numbers and addresses.
#
# Expected. A call with a wrong value is wrong. The comment in standardize_string gives its reason: "We don't want to
#   punish model for answer like April 1, 2024 vs April 1,2024, vs April 1 2024".
# Seen. Before strings are compared, blanks and , . / - _ * ^ are removed from both. So digits move across the removed
#   signs: 11/2/2024 equals 1/12/2024, -40 equals 40, 12.5 equals 1.25. In a parameter of type dict, True equals 1.
# Output.
#   date    '11/2/2024'  for '1/12/2024'  accepted
#   date    '2024-11-2'  for '2024-1-12'  accepted
#   amount  '12.5'       for '1.25'       accepted
#   celsius '-40'        for '40'         accepted
#   host    '10.0.12.1'  for '10.0.1.21'  accepted
#   time    '1:30'       for '13:0'       refused
# Why it matters. The checker decides a leaderboard, and is at hand as a reward for tool calls. Dates, amounts and
#   addresses are values that a model can get wrong, and here a transposed date counts as right.
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
{
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q --no-deps --no-warn-conflicts bfcl-eval==2026.3.23 tree-sitter==0.21.3 \
        tree-sitter-java==0.21.0 tree-sitter-javascript==0.21.4
} || exit 2

# The table of models, which imports the SDK of every provider, is replaced by an empty one. The checker reads it only
# for function names with a dot.
"$venv/bin/python" - <<'PY'
import sys
import types

models = types.ModuleType("bfcl_eval.constants.model_config")
models.MODEL_CONFIG_MAPPING = {}
sys.modules[models.__name__] = models

from bfcl_eval.constants.enums import Language  # noqa: E402
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker  # noqa: E402


def accepted(name, kind, given, wanted):
    parameters = {"type": "dict", "properties": {name: {"type": kind, "description": ""}}, "required": [name]}
    function = {"name": "book", "description": "", "parameters": parameters}
    calls, answers = [{"book": {name: given}}], [{"book": {name: [wanted]}}]
    return ast_checker([function], calls, answers, Language.PYTHON, "simple_python", "model")["valid"]


CASES = [
    ("date", "11/2/2024", "1/12/2024", True),
    ("date", "2024-11-2", "2024-1-12", True),
    ("amount", "12.5", "1.25", True),
    ("celsius", "-40", "40", True),
    ("host", "10.0.12.1", "10.0.1.21", True),
    ("time", "1:30", "13:0", False),
]
for name, given, wanted, seen in CASES:
    verdict = accepted(name, "string", given, wanted)
    print(f"{name:8}{given!r:12} for {wanted!r:12} {'accepted' if verdict else 'refused'}")
    assert verdict is seen, f"changed: {given} for {wanted}"
assert accepted("options", "dict", {"count": True}, {"count": [1]}), "changed: True is not 1 in a dict"
assert not accepted("count", "integer", True, 1), "True is 1 as an integer"
PY
