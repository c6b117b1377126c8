"""Completions that make a built-in reward compute without end: each has failed at its deadline."""

from __future__ import annotations

import string
from pathlib import Path

import pytest

from millrace.config.load import load
from millrace.conversations.tokenizer import load_tokenizer, make_character_tokenizer
from millrace.core.completion.columns import token_array
from millrace.core.types import Failed, Finish, Scored, ScoreRequest
from millrace.evaluation.scoring import scores

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINES_S = {"math": 8.0, "pattern": 2.0}  # math-verify's parser is slow at its first expressions
RIGHT = {"math": r"\boxed{\sqrt{7}}", "pattern": "aaa"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_character_tokenizer(path, string.digits + string.ascii_letters + string.punctuation + " \n")
    return path


def scored(model, directory, kind, *completions):
    (directory / "rows.jsonl").write_text(r'{"prompt": "x^2 = 7", "answer": "\\sqrt{7}"}' + "\n")
    pattern = "pattern = '(a+)+'\n" if kind == "pattern" else ""
    (directory / "run.toml").write_text(
        f"[model]\npath = '{model}'\n[task]\nkind = 'file'\npath = 'rows.jsonl'\n"
        f"[reward]\nkind = '{kind}'\ntimeout_s = {DEADLINES_S[kind]}\n{pattern}"
    )
    tokenizer = load_tokenizer(str(model))
    requests = [
        ScoreRequest(i, i, token_array(tokenizer.encode(text)), Finish.STOP)
        for i, text in enumerate(completions)
    ]
    return [timed.score for timed in scores(load(directory / "run.toml"), requests)]


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("kind", "hostile"),
    [("math", r"\boxed{9^{9^{9^{9}}}}"), ("pattern", "a" * 60 + "b")],
    ids=["a tower of powers", "a pattern that backtracks"],
)
def test_a_completion_without_an_end_fails_at_its_deadline_and_the_next_is_scored(
    model, tmp_path, kind, hostile
):
    first, failed, last = scored(model, tmp_path, kind, RIGHT[kind], hostile, RIGHT[kind])
    assert first == last == Scored(1.0)
    assert isinstance(failed, Failed), failed


@pytest.mark.usefixtures("warm")
def test_deep_braces_end_and_earn_nothing(model, tmp_path):
    deep = r"\boxed{" + "{" * 300 + "8" + "}" * 300 + "}"
    fractions = r"\boxed{" + r"\frac{1}{1+" * 40 + "2" + "}" * 40 + "}"
    *hostile, right = scored(model, tmp_path, "math", deep, fractions, RIGHT["math"])
    assert right == Scored(1.0)
    assert all(isinstance(one, Failed) or one == Scored(0.0) for one in hostile)
