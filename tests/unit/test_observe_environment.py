"""How long turns wait for answers, in every place that tells it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from observe_events import event, run_ended, run_started, step

from millrace.core.events import Event, Events
from millrace.observe.environment_use import EnvironmentUse, EpisodeWait
from millrace.observe.live.live_view import plain_line
from millrace.observe.live.status import Status
from millrace.observe.sinks.jsonl import MetricsLog
from millrace.observe.sinks.log_files import condense
from millrace.observe.sinks.prometheus import Exported
from millrace.observe.sinks.trackers import Tracked

EPISODES = [
    run_started(),
    event("leased", 0.0, trajectory_ids=[1, 2], replica="r", version=0, resumed_tokens=0),
    event("finished", 2.0, trajectory_id=1, tokens=10),
    event("finished", 3.0, trajectory_id=2, tokens=6),
    event("observed", 5.0, trajectory_id=1, tokens=4),
    event("leased", 6.0, trajectory_ids=[1], replica="r", version=0, resumed_tokens=14),
    event("finished", 7.0, trajectory_id=1, tokens=18),
    event("scored", 8.0, trajectory_id=2, outcome="scored", value=1.0, reason=""),
]
"""Trajectory 1 wrote 10 tokens, waited 3 s for 4 more, wrote 4 tokens, and waits again. 2 has its reward."""


def of(*events: Event) -> EnvironmentUse:
    use = EnvironmentUse()
    for one in events:
        use(one)
    return use


def test_answers_are_timed_and_counted() -> None:
    use = of(*EPISODES)
    assert (use.num_answers, use.answer_s, use.turn_s) == (1, 3.0, 2.0 + 3.0 + 1.0)
    assert (use.observed_tokens, use.sampled_tokens, use.num_waiting) == (4, 20, 1)


def test_a_trajectory_that_begins_again_has_written_its_new_tokens() -> None:
    again = event("restarted", 8.0, trajectory_id=1, discarded_tokens=18, reason="")
    use = of(*EPISODES, again, event("finished", 9.0, trajectory_id=1, tokens=5))
    assert use.sampled_tokens == 25


def test_without_an_environment_nothing_is_told() -> None:
    one_turn = [one for one in EPISODES if one.kind != "observed"]
    status = Status()
    for one in (*one_turn, step(9.0, 1)):
        status(one)
    assert of(*one_turn).take_scalars() == {}
    assert "answers" not in plain_line(status)


SCALARS = {
    "environment/answers": 1.0,
    "environment/answer_s": 3.0,
    "environment/observed_share": pytest.approx(4 / 24),
    "environment/waiting": 1.0,
    "environment/waiting_s": 2.0,
    "environment/model_waiting": 0.0,
    "environment/model_waiting_s": 0.0,
    "environment/reused_tokens": 0.0,
    "environment/evicted_tokens": 0.0,
}


def test_a_step_has_the_answers_since_the_last_one(tmp_path: Path) -> None:
    use = EnvironmentUse()
    log = MetricsLog(tmp_path / "metrics.jsonl", use)
    for one in (*EPISODES, step(9.0, 1), step(10.0, 2)):
        use(one)
        log(one)
    log.close()
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert {name: value for name, value in first.items() if name in SCALARS} == SCALARS
    assert not SCALARS.keys() & second.keys()


def test_services_get_the_same_scalars() -> None:
    class ScalarTracker:
        def log_scalars(self, event: Event, scalars) -> None:
            found.update(scalars)

        def close(self) -> None: ...

    found: dict[str, float] = {}
    use = EnvironmentUse()
    tracked = Tracked(Events(lambda: 0.0, lambda: 0.0), "a tracker", ScalarTracker, use)
    for one in (*EPISODES, step(9.0, 1)):
        use(one)
        tracked(one)
    assert use.scalars(one) == SCALARS  # once more: the step was not over when the first sink asked
    tracked.end()
    tracked.done.result(timeout=60)
    assert {name: found[name] for name in SCALARS} == SCALARS


def test_each_episode_waits_for_the_model_or_for_its_environment() -> None:
    waits = of(*EPISODES[:6]).waits  # both are leased, 1 has an answer, 2 has none
    assert waits.oldest(9) == [
        EpisodeWait(1003.0, 2, "environment"),
        EpisodeWait(1005.0, 1, "model"),  # since the answer, not since the lease
    ]
    assert waits.oldest(1) == waits.oldest(9)[:1]
    assert (waits.longest_s("environment"), waits.longest_s("model")) == (3.0, 1.0)
    assert waits.longest_s("model", 1010.0) == 5.0


@pytest.mark.parametrize("kind", ["run_started", "run_ended", "restarted", "ended", "scored"])
def test_what_has_ended_or_begins_again_waits_no_more(kind: str) -> None:
    use = of(*EPISODES)
    assert use.waits.count("environment") == 1
    use(event(kind, 9.0, trajectory_id=1))
    assert use.waits.oldest(9) == [] and use.waits.longest_s("environment") == 0.0


def test_the_live_line_tells_who_episodes_wait_for_before_the_first_answer_and_not_after_the_end() -> None:
    status = Status()
    for one in (
        *EPISODES[:2],
        event("finished", 2.0, trajectory_id=1, tokens=10, finish="turn"),
        step(9.0, 1),
    ):
        status(one)
    said = "episodes wait: 1 for the model (longest 0:09), 1 for the environment (longest 0:07)"
    assert said in plain_line(status)
    status(run_ended(10.0))
    assert "episodes wait" not in plain_line(status)


def test_completions_of_one_turn_are_no_episodes() -> None:
    status = Status()
    for one in (
        *EPISODES[:2],
        event("finished", 2.0, trajectory_id=1, tokens=10, finish="stop"),
        step(9.0, 1),
    ):
        status(one)
    assert "episodes wait" not in plain_line(status)


def test_the_live_line_tells_answers_and_who_waits() -> None:
    status = Status()
    for one in (*EPISODES, step(9.0, 1)):
        status(one)
    assert "answers 1, 3 s each, 17% observed" in plain_line(status)
    assert status.scoring == 1


def test_a_monitoring_system_gets_sums() -> None:
    sums: dict[str, float] = {}
    exported = Exported(
        lambda name, value, *labels: sums.update({name: value}),
        lambda name, value, *labels: sums.update({name: sums.get(name, 0.0) + value}),
    )
    for one in EPISODES:
        exported(one)
    assert sums["millrace_answers_total"] == 1 and sums["millrace_observed_tokens_total"] == 4
    assert sums["millrace_answer_seconds_total"] == 3.0 and sums["millrace_scores_waiting"] == 1


def test_an_old_log_leaves_out_observations_which_the_ledger_has(tmp_path: Path) -> None:
    part = tmp_path / "events.000001.jsonl"
    part.write_text('{"kind":"observed","tokens":4}\n{"kind":"step"}\n')
    condense(part)
    assert part.read_text() == '{"kind":"step"}\n'


def test_tokens_that_were_reused_or_evicted_are_counted_over_replicas_that_begin_again() -> None:
    def report(replica: str, reused: int, evicted: int) -> Event:
        return event("report", 4.0, replica=replica, reused_tokens=reused, evicted_tokens=evicted)

    use = of(*EPISODES, report("a", 5, 0), report("b", 7, 2), report("a", 9, 1), report("a", 4, 0))
    scalars = use.take_scalars()
    assert (scalars["environment/reused_tokens"], scalars["environment/evicted_tokens"]) == (9 + 7 + 4, 1 + 2)
    use(event("report", 5.0, replica="b", reused_tokens=10, evicted_tokens=2))
    assert (use.reused_tokens, use.evicted_tokens) == (3, 0)
