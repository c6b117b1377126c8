#!/usr/bin/env bash
# jsonschema 4.26.0: of draft 2019-09, an object with additional properties that a schema allows is refused.
#
# Expected. `additionalProperties` evaluates the properties that it allows, so `unevaluatedProperties: false` allows them too
#   (https://json-schema.org/draft/2019-09/json-schema-core#unevaluatedProperties). The JSON Schema Test Suite has the case
#   "unevaluatedProperties with adjacent non-bool additionalProperties", and calls such an object valid.
# Seen. Draft201909Validator refuses it if `additionalProperties` is a schema, and accepts it if it is `true`.
#   Draft202012Validator accepts both.
# Output.
#   2019-09  additionalProperties {"type": "string"}  refused: Unevaluated properties are not allowed ('note' was unexpected)
#   2019-09  additionalProperties true                accepted
#   2020-12  additionalProperties {"type": "string"}  accepted
#   2020-12  additionalProperties true                accepted
# Why it matters. The validator is a reward for JSON, and a check of tool arguments. The same schema, but for the year in
#   `$schema`, makes a right answer a wrong one.
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
{
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q jsonschema==4.26.0 referencing==0.37.0 jsonschema-specifications==2025.9.1 rpds-py==0.30.0 \
        attrs==25.4.0
} || exit 2

"$venv/bin/python" - <<'PY'
import json

from jsonschema import validators

DRAFTS = {"2019-09": False, "2020-12": True}  # whether a schema is accepted there
for draft, wanted in DRAFTS.items():
    for additional in ({"type": "string"}, True):
        schema = {
            "$schema": f"https://json-schema.org/draft/{draft}/schema",
            "properties": {"id": {"type": "integer"}},
            "additionalProperties": additional,
            "unevaluatedProperties": False,
        }
        validator = validators.validator_for(schema)(schema)
        errors = [error.message for error in validator.iter_errors({"id": 1, "note": "x"})]
        said = f"refused: {errors[0]}" if errors else "accepted"
        print(f"{draft}  additionalProperties {json.dumps(additional):18}  {said}")
        assert (not errors) is (wanted or additional is True), f"changed: {draft} {additional}"
        assert list(validator.iter_errors({"id": "one"})), "a wrong object is accepted"
PY
