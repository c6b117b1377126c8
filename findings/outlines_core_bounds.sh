#!/usr/bin/env bash
# outlines-core 0.2.14: bounds of numbers are ignored without an error, and a required name can make every answer wrong.
#
# Expected. The documentation of json_schema: "Returns errors if JSON schema's content is invalid or some feature is not
#   yet supported". `required` is in its list of supported features.
# Seen. minimum, maximum, multipleOf and uniqueItems are dropped in silence. Where `required`
#   names a property that `properties` does not list, the expression allows only answers without it, and all of these
#   are invalid. A pattern that begins with ^ and does not end with $ cannot be matched at all.
# Output.
#   {"type": "integer", "minimum": 1, "maximum": 5}              allows 99 (invalid)
#   {"type": "number", "maximum": 1}                             allows 1.5 (invalid)
#   {"type": "integer", "multipleOf": 5}                         allows 7 (invalid)
#   {"type": "array", "items": ..., "uniqueItems": true}         allows [1,1] (invalid)
#   {"type": "object", "properties": {"a": ...}, "required": ["b"]}  allows {"a":1} (invalid), refuses {"b":1}
#   {"type": "string", "pattern": "^[A-Z]"}                      refuses "A"
# Why it matters. A grade of 1 to 5, a probability, an index: bounds are what schemas of judges and tools are for. With
#   constrained decoding the caller does not validate again, so a judge's 99 becomes a reward of 99.
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
{ python3 -m venv "$venv" && "$venv/bin/pip" install -q outlines-core==0.2.14 jsonschema==4.26.0; } || exit 2

"$venv/bin/python" - <<'PY'
import json
import re

import jsonschema
from outlines_core.json_schema import build_regex_from_schema

A = {"a": {"type": "integer"}}
CASES = [
    ({"type": "integer", "minimum": 1, "maximum": 5}, 99, True),
    ({"type": "number", "maximum": 1}, 1.5, True),
    ({"type": "integer", "multipleOf": 5}, 7, True),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 1], True),
    ({"type": "object", "properties": A, "required": ["b"]}, {"a": 1}, True),
    ({"type": "object", "properties": A, "required": ["b"]}, {"b": 1}, False),
    ({"type": "string", "pattern": "^[A-Z]"}, "A", False),
    ({"type": "string", "pattern": "^[A-Z]$"}, "A", True),
]
for schema, value, seen in CASES:
    text = json.dumps(value, separators=(",", ":"))
    valid = jsonschema.Draft202012Validator(schema).is_valid(value)
    allowed = re.fullmatch(build_regex_from_schema(json.dumps(schema)), text) is not None
    print(f"{json.dumps(schema)}\n    {'allows' if allowed else 'refuses'} {text} ({'valid' if valid else 'invalid'})")
    assert allowed is seen, f"changed: {text}"
    assert allowed is not valid or schema.get("pattern", "").endswith("$"), "the case shows nothing"
PY
