#!/usr/bin/env bash
# lm-eval 0.4.13: in the maj@8 of gsm8k_cot_self_consistency answers that could not be read win the vote.
#
# Expected. Self-consistency (arXiv:2203.11171) takes the most frequent answer among the samples. The filter's docstring:
#   "We select the response that occurs most frequently". The task's metric says that commas do not count.
# Seen. Each sample without a readable answer becomes the text "[invalid]", and the filter counts this text as an
#   answer. Three unreadable samples outvote two right ones. Answers are counted before the metric removes commas, so
#   1,800 and 1800 are two answers, and the right one loses although four of eight samples have it, and 900 has three.
# Output.
#   5 x 18, 3 x unreadable              majority 18         exact match 1.0
#   2 x 18, 3 x unreadable, 3 others    majority [invalid]  exact match 0.0
#   2 x 1,800, 2 x 1800, 3 x 900, 7     majority 900        exact match 0.0
# Why it matters. Unreadable answers are common where completions are cut by the length limit, and in the first steps of
#   a run. maj@k is then too low, and training that only shortens completions looks like a gain in reasoning.
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

folder = pathlib.Path(lm_eval.__file__).parent / "tasks" / "gsm8k"
task = yaml.safe_load((folder / "gsm8k-cot-self-consistency.yaml").read_text())
ignored = yaml.safe_load((folder / "gsm8k-cot.yaml").read_text())["metric_list"][0]["regexes_to_ignore"]
steps = next(entry["filter"] for entry in task["filter_list"] if entry["name"] == "maj@8")


def answer_of(completions):
    instance = Instance("generate_until", {}, (), 0)
    instance.resps = completions
    parts = [(step["function"], {k: v for k, v in step.items() if k != "function"}) for step in steps]
    build_filter_ensemble("maj@8", parts).apply([instance])
    return instance.filtered_resps["maj@8"]


def correct(answer, reference):
    return exact_match_hf_evaluate([answer], [reference], regexes_to_ignore=ignored)["exact_match"]


def show(name, values, reference):
    said = [f"The answer is {value}." if value else "I have to think about this again, because" for value in values]
    majority = answer_of(said)
    print(f"{name:36}majority {majority:10} exact match {correct(majority, reference)}")
    return majority, correct(majority, reference)


assert show("5 x 18, 3 x unreadable", ["18"] * 5 + [None] * 3, "18") == ("18", 1.0), "the plain case has changed"
unreadable = show("2 x 18, 3 x unreadable, 3 others", ["18", "18", None, None, None, "20", "21", "22"], "18")
assert unreadable == ("[invalid]", 0.0), "changed: unreadable answers do not vote"
assert correct("1,800", "1800") == 1.0, "commas count"
commas = show("2 x 1,800, 2 x 1800, 3 x 900, 7", ["1,800"] * 2 + ["1800"] * 2 + ["900"] * 3 + ["7"], "1800")
assert commas == ("900", 0.0), "changed: 1,800 and 1800 are one answer"
PY
