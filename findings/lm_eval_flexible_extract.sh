#!/usr/bin/env bash
# lm-eval 0.4.13: the flexible-extract score of gsm8k takes dots, commas and dollar signs for the last number.
#
# Expected. The filter exists for completions that do not write "#### 18": the last number of the text is the answer.
# Seen. Its pattern, (-?[$0-9.,]{2,})|(-?[0-9]+), asks for two characters of which none has to be a digit. "..." after
#   the answer, "?!.." or the closing dollar of a formula before a full stop ("$n$.") is the last "number". The metric
#   removes commas, dollar signs and one full stop, and compares the rest with 18.
# Output.
#   'The answer is 18.'                                 read '18.'     exact match 1.0
#   'The answer is 18. I hope this helps...'            read '...'     exact match 0.0
#   'So she earns 18 dollars, where $n$ is $m$.'        read '$.'      exact match 0.0
#   'The answer is 18... Let me know.'                  read '18...'   exact match 0.0
#   'So the answer is $18$..., as claimed.'             read '$18$...,' exact match 0.0
# Why it matters. This is the lenient one of the task's two scores, for models that do not write "####". Ellipses and
#   formulas are habits of style, which RL changes. So the score moves without a change in arithmetic, and right answers
#   count as wrong.
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
{
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q --no-deps --no-warn-conflicts lm-eval==0.4.13
    "$venv/bin/pip" install -q --no-warn-conflicts evaluate==0.4.6 datasets==5.2.0 sacrebleu==2.6.0 PyYAML==6.0.4
} || exit 2

"$venv/bin/python" - <<'PY'
import pathlib

import lm_eval
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import exact_match_hf_evaluate
from lm_eval.filters import build_filter_ensemble

task = yaml.safe_load((pathlib.Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml").read_text())
steps = next(entry["filter"] for entry in task["filter_list"] if entry["name"] == "flexible-extract")
ignored = task["metric_list"][0]["regexes_to_ignore"]

CASES = [
    ("The answer is 18.", 1.0),
    ("The answer is 18. I hope this helps...", 0.0),
    ("So she earns 18 dollars, where $n$ is $m$.", 0.0),
    ("The answer is 18... Let me know.", 0.0),
    ("So the answer is $18$..., as claimed.", 0.0),
]
for completion, seen in CASES:
    instance = Instance("generate_until", {}, (), 0)
    instance.resps = [completion]
    parts = [(step["function"], {k: v for k, v in step.items() if k != "function"}) for step in steps]
    build_filter_ensemble("flexible-extract", parts).apply([instance])
    read = instance.filtered_resps["flexible-extract"]
    score = exact_match_hf_evaluate([read], ["18"], regexes_to_ignore=ignored, ignore_case=True)["exact_match"]
    print(f"{completion!r:52}read {read!r:9} exact match {score}")
    assert score == seen, f"changed: {completion!r}"
PY
