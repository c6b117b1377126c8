"""Completions that one replica sampled are drafts of another one, and of a resumed run."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from engine_models import make_exact_engine, make_model, make_work, prompt_of
from ledger_records import complete, lease, ready_group, step_of
from test_controller_state import NUMBERS, run_state
from test_engines_drafts import Completions, make_drafting, played

from millrace.controller import row_selection
from millrace.controller.row_selection import EarlierOfRows
from millrace.controller.state.run_state import RunState
from millrace.core.completion.columns import token_array
from millrace.core.types import Group, Prompt, Sampling, State, Trajectory, Work
from millrace.engines.own.drafts import earlier
from millrace.engines.own.drafts.earlier import Followers, Hints
from millrace.ledger.sqlite import SqliteLedger

ROW, PROMPT = "row-0", prompt_of(0, 9)
SAMPLING = Sampling(max_tokens=20, temperature=0.05, ignore_eos=True)


def two_replicas() -> RunState:
    state = run_state(replace(NUMBERS, group_size=2, sampling=SAMPLING), ["a", "b"])
    for name in "ab":
        state.replicas.up(name, 1)
        state.replicas.served(name, 0)
    return state


def admitted(state: RunState, group_id: int, replica: str, row_id: str = ROW) -> list[Work]:
    return state.admit(Prompt(group_id, row_id, token_array(PROMPT), ""), replica, now_s=0.0)[1]


def trained_by(ledger: SqliteLedger, version: int, group_id: int, sampled: Completions) -> None:
    members = [Trajectory(tid, group_id, columns=columns) for tid, (columns, _) in sampled.items()]
    for reward, member in enumerate(members):
        lease(member)
        complete(member, float(reward))
    group = Group(group_id, ROW, token_array(PROMPT), "", members)
    ledger.admit([group])
    ledger.commit_step(step_of(version, group))


@pytest.fixture(scope="module")
def sampled() -> Completions:
    """What replica `a` samples of the row."""
    return played(make_exact_engine(make_model()), admitted(two_replicas(), 0, "a"))


@pytest.fixture
def ledger(sampled: Completions) -> SqliteLedger:
    ledger = SqliteLedger(":memory:", run={})
    trained_by(ledger, 1, 0, sampled)
    return ledger


@pytest.mark.parametrize("resumed", [False, True])
def test_another_replica_and_a_resumed_run_draft_from_what_was_sampled(
    ledger: SqliteLedger, sampled: Completions, resumed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = two_replicas()
    if resumed:
        earlier = EarlierOfRows("earlier", ledger)
    else:
        earlier = EarlierOfRows("earlier", SqliteLedger(":memory:", run={}))
        monkeypatch.setattr(earlier, "_ledger", ledger)
        earlier.learn(ledger.steps_after(0))
    works = admitted(state, 1, "b")
    hinted = earlier.hinted(works, state, "b")
    assert hinted[0].earlier == [columns.tokens for columns, _ in reversed(sampled.values())]
    assert hinted[1:] == works[1:]
    model = make_model()
    plain, without, drafting = make_exact_engine(model), make_drafting(model), make_drafting(model)
    assert played(drafting, hinted) == played(plain, works) == played(without, works)
    steps = [engine.load().steps_since_swap for engine in (plain, without, drafting)]
    assert steps[2] < steps[1] < steps[0] == 20


def test_a_replica_gets_a_hint_once_for_each_of_its_lives(ledger: SqliteLedger) -> None:
    earlier, state = EarlierOfRows("earlier", ledger), two_replicas()
    works = admitted(state, 1, "a")
    assert [bool(work.earlier) for work in earlier.hinted(works, state, "a")] == [True, False]
    assert earlier.hinted(works, state, "a") == works
    assert [bool(work.earlier) for work in earlier.hinted(works[1:], state, "b")] == [True]
    state.replicas.up("a", 2)
    assert earlier.figures(earlier.hinted(works, state, "a")) == {"earlier_tokens": 40}
    assert earlier.hinted(other := admitted(state, 2, "a", "row-1"), state, "a") == other
    off = EarlierOfRows(None, ledger)
    off.learn(ledger.steps_after(0))
    assert off.hinted(works, state, "b") is works and off.figures(works) == {}


def test_the_newest_trained_group_counts_and_a_hint_is_bounded(
    ledger: SqliteLedger, sampled: Completions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_selection, "TOKENS_MAX", 10)
    earlier, state = EarlierOfRows("earlier", ledger), two_replicas()
    newer = {tid + 2: (columns[7:], finish) for tid, (columns, finish) in sampled.items()}
    trained_by(ledger, 2, 1, newer)
    earlier.learn(ledger.steps_after(1))
    for one in (earlier, EarlierOfRows("earlier", ledger)):
        first, _ = one.hinted(admitted(state, 5, "a"), state, "a")
        assert first.earlier == [columns.tokens[7:12] for columns, _ in reversed(sampled.values())]
        state.end_group(5, State.REJECTED, "")


def test_a_resume_looks_up_a_bounded_number_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_selection, "RESUMED_MAX", 2)
    ledger = SqliteLedger(":memory:", run={})
    for number in range(4):
        ledger.admit([group := ready_group(number)])
        ledger.commit_step(step_of(number + 1, group))
    assert EarlierOfRows("earlier", ledger)._groups == {"row-2": (3, 2), "row-3": (4, 3)}


def test_of_more_rows_than_fit_those_of_longest_ago_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_selection, "ROWS_MAX", 2)
    ledger = SqliteLedger(":memory:", run={})
    for number, row_id in enumerate(["row-0", "row-1", "row-0", "row-2"]):
        ledger.admit([group := replace(ready_group(number), row_id=row_id)])
        ledger.commit_step(step_of(number + 1, group))
    assert dict(EarlierOfRows("earlier", ledger)._groups) == {"row-0": (3, 2), "row-2": (4, 3)}


def test_hints_that_wait_unread_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier, "TOKENS_MAX", 25)
    kept = Hints()
    for number in range(4):
        two = [array("i", [number] * 5), array("i", [7] * 5)]
        kept.keep(number, make_work(number, [1, 2], SAMPLING, earlier=two))
    assert kept.num_tokens == 24, "prompts count"
    assert kept.take(1) == [] and kept.take(3) == [[1, 2, 3, 3, 3, 3, 3], [1, 2, 7, 7, 7, 7, 7]]
    assert kept.take(3) == [] and kept.num_tokens == 12
    kept.keep(4, make_work(4, [1, 2], SAMPLING, earlier=[array("i", [7] * 5)], tokens=array("i", [3] * 6)))
    assert kept.num_tokens == 25, "tokens that the trajectory goes on from count"


def test_a_hint_that_is_known_changes_nothing() -> None:
    table, tokens = Followers(), [1, 2, 3, 4, 5, 6]
    table.add(0, tokens, 1)
    assert table.guess(0, [1, 2, 3, 4])[0] == 5
    before = [table.guess(0, tokens[:end]) for end in range(1, 6)]
    table.add(0, tokens, 1)
    assert [table.guess(0, tokens[:end]) for end in range(1, 6)] == before
