"""Files changed between two sessions, a moved directory, hostile rows and rewards, in real processes."""

from __future__ import annotations

import pytest
from tests.long import long

from millrace_chaos import hostile
from millrace_chaos.sessions import Sessions, refusal_problem

pytestmark = pytest.mark.usefixtures("warm")


@long
def test_a_run_goes_on_or_is_refused_in_words_whatever_was_done_to_its_files(start, tmp_path):
    kinds = ("half a checkpoint", "moved in the run")
    outcomes = Sessions(start, tmp_path, [], 2, kinds=kinds).try_all(len(kinds))
    assert not [outcome for outcome in outcomes if outcome.problem], outcomes
    assert {outcome.end for outcome in outcomes} == {"went on", "refused"}


@pytest.mark.smoke
@long
def test_hostile_rows_and_rewards_fail_their_trajectories_and_nothing_else(start, tmp_path, monkeypatch):
    monkeypatch.setattr(hostile, "TIMEOUT_S", 1)
    many_rows = ["steps=2", "batch.prompts=8", "batch.group_size=2"]
    [outcome] = hostile.try_hostile(start, tmp_path, many_rows, 1, 1)
    assert (outcome.end, outcome.problem) == ("went on", "")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("LedgerError: ledger run/ledger.sqlite: damaged\n  Restore it.", ""),
        ("Traceback (most recent call last)\nKeyError: 1", "a raw exception: KeyError: 1"),
        ("LedgerError: something is wrong", "the error names none of ['ledger.sqlite']"),
        ("", "status 1 with 0 errors of ours"),
    ],
)
def test_a_refusal_is_one_error_that_names_the_file(words, problem):
    assert refusal_problem(1, words, ["ledger.sqlite"]) == problem
