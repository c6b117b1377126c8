"""What `benchmarks/kills.py` says of a kill: whether it met a turn, and whether other tokens were trained."""

from __future__ import annotations

import math

import kills
import pytest
from kill_points import MOMENT_MAX, SUITES, Kill, OpenTurns, kill_point, open_turns, untrue_steps
from kill_points import foreign_tokens as foreign

from millrace.chaos.attack import Attack
from millrace.core.completion.columns import OBSERVED, TokenColumns
from millrace.core.events import Event


def event(kind, wall_s, **fields):
    return Event(kind, wall_s, wall_s, fields)


def leased(wall_s, ids, replica):
    return event("leased", wall_s, trajectory_ids=ids, replica=replica, version=0, resumed_tokens=0)


LIFE = [
    leased(1.0, [0, 1], "replica-0"),
    leased(1.5, [2], "replica-1"),
    event("finished", 2.0, trajectory_id=0),
    event("worker_died", 3.0, name="replica-1"),
    event("observed", 4.0, trajectory_id=0),
    event("run_started", 5.0),
    leased(6.0, [0], "replica-1"),
    event("step", 7.0, version=1),
    event("finished", 8.0, trajectory_id=0),
    event("step", 9.0, version=1),
    event("scored", 10.0, trajectory_id=0),
]


@pytest.mark.parametrize(
    ("wall_s", "sampled", "waiting"),
    [
        (0.5, {}, set()),
        (1.9, {0: "replica-0", 1: "replica-0", 2: "replica-1"}, set()),
        (2.0, {1: "replica-0", 2: "replica-1"}, {0}),
        (3.0, {1: "replica-0"}, {0}),
        (4.0, {1: "replica-0"}, set()),
        (5.0, {}, set()),
        (6.5, {0: "replica-1"}, set()),
        (8.5, {}, {0}),
        (10.0, {}, set()),
    ],
)
def test_events_tell_which_turns_are_under_way(wall_s, sampled, waiting):
    turns = open_turns(LIFE, wall_s)
    assert (turns.sampled, turns.waiting, len(turns)) == (sampled, waiting, len(sampled) + len(waiting))


def test_events_of_turns_count_from_a_new_version_and_not_from_a_repeated_one():
    turns = OpenTurns()
    counts = [(turns(one), turns.version, turns.events)[1:] for one in LIFE]
    assert counts[6:] == [(0, 5), (1, 0), (1, 1), (1, 1), (1, 1)]


def columns(*stretches):
    made = TokenColumns()
    for tokens, version in stretches:
        for token in tokens:
            made.append(token, math.nan if version == OBSERVED else -0.5, version)
    return made


def test_tokens_that_differ_in_id_or_version_are_foreign_and_observed_ones_are_not():
    due = columns(([1, 2], 0), ([3], OBSERVED), ([4, 5], 0))
    assert foreign(columns(([1, 2], 0), ([3], OBSERVED), ([4, 5], 0)), due) == 0
    assert foreign(columns(([1, 9], 0), ([3], OBSERVED), ([4, 5], 0)), due) == 1
    assert foreign(columns(([1, 2], 0), ([3], OBSERVED), ([4, 5], 1)), due) == 2
    assert foreign(columns(([1, 2], 0), ([9], OBSERVED), ([4, 5], 0)), due) == 0
    assert foreign(columns(([1, 2], 0), ([3], OBSERVED), ([4, 5, 6], 0)), due) == 1
    assert foreign(due, None) == 4


def test_a_step_on_other_tokens_than_the_ledgers_is_told():
    held = {0: columns(([1, 2], 0), ([3], OBSERVED))}

    def step(tokens, gap):
        return event("step", 1.0, version=1, trained_tokens=tokens, logprob_gap={"0": [0.0, gap, tokens]})

    assert untrue_steps([step(2, 1e-7), step(2, 1e-7)], held) == []  # made again
    assert untrue_steps([step(3, 1e-7)], held) == ["3 tokens trained, 2 in the ledger"]
    assert untrue_steps([step(2, 0.1)], held) == ["log-probs differ by 0.1"]


def test_points_depend_on_the_seed_alone_and_meet_every_role_equally():
    made = [kill_point("agents", index, 3) for index in range(100)]
    assert made == [kill_point("agents", index, 3) for index in range(100)]
    assert made != [kill_point("agents", index, 4) for index in range(100)]
    assert [sum(one.role == role for one in made) for role in SUITES["agents"]] == [25] * 4
    assert all(1 <= one.moment <= MOMENT_MAX for one in made)
    assert all(1 <= one.earlier().moment <= one.moment or one.moment == 1 for one in made)


def test_the_file_goes_on_where_it_was_and_only_with_the_same_points(tmp_path):
    path, points = tmp_path / "kills.jsonl", [kill_point("turns", index, 0) for index in range(2)]
    results = kills.Results(path, {"seed": 0}, resume=False)
    kill = Kill(points[0], Attack("reward worker", "reward-worker-0", "kill", 0, 1.0), 0, met=2)
    results.add(kills.row_of(kill, kills.Verdict(True, False, 0, ["other weights"])))
    again = kills.Results(path, {"seed": 0}, resume=True)
    assert [again.has(point) for point in points] == [True, False] and again.rows == results.rows
    assert kills.summary(again.rows) == {
        "turns: environment worker": {
            **{"points": 1, "in_turn": 1, "closed": 1, "equal": 0, "foreign_tokens": 0},
            **{"recovery_s": None, "until_step_s": None},
        }
    }
    with pytest.raises(SystemExit, match="already"):
        kills.Results(path, {"seed": 0}, resume=False)
    with pytest.raises(SystemExit, match="another --file"):
        kills.Results(path, {"seed": 1}, resume=True)
