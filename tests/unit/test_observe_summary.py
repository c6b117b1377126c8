"""A summary adds up what the events of a run say."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from observe_events import (
    BALANCE,
    event,
    moved,
    published,
    pulled,
    report,
    run_ended,
    run_started,
    step,
    worker_died,
    worker_recovered,
    worker_started,
)

from millrace.core.events import Event
from millrace.observe.summary import Summary

PROMISED = {
    "steps", "wall_s", "reward_first", "reward_last", "trained_tokens_per_s", "generated_tokens_per_s",
    "staleness", "logprob_gap_staleness0", "trainer_idle_fraction", "replica_idle_fraction",
    "publish_stall_s", "repacks", "accounting", "restarts",
}  # fmt: skip


def summary_of(*events: Event) -> dict[str, Any]:
    summary = Summary()
    for item in events:
        summary(item)
    return summary.result()


def test_every_promised_key_is_there_before_anything_has_happened() -> None:
    result = summary_of()
    assert result.keys() >= PROMISED
    assert result["staleness"].keys() == {"mean", "p99", "max"}
    assert result["logprob_gap_staleness0"].keys() == {"mean", "max"}
    assert result["publish_stall_s"].keys() == {"median", "max"}
    assert result["accounting"].keys() == BALANCE.keys()


def test_what_of_the_algorithm_changes_nothing_is_told_as_the_last_session_has_it() -> None:
    starts = [event("run_started", float(i), **run_started().fields, inert=[f"clip {i}"]) for i in (0, 1)]
    assert summary_of(*starts)["inert"] == ["clip 1"]


def test_speeds_are_over_the_time_in_which_tokens_were_trained_or_generated() -> None:
    result = summary_of(
        run_started(5.0),
        worker_started(5.0, "replica-0"),
        step(7.0, 1),
        report(9.0, "replica-0", 400, 3.0, 1.0),
        step(10.0, 2),
        run_ended(15.0),
    )
    assert (result["steps"], result["wall_s"], result["ok"]) == (2, 10.0, True)
    assert result["trained_tokens_per_s"] == pytest.approx(200 / 4.0)  # the first step began at 6 s
    assert result["generated_tokens_per_s"] == pytest.approx(100.0)  # the replica started at 5 s
    assert result["accounting"] == BALANCE


def test_rewards_are_means_of_the_first_and_last_tenth() -> None:
    steps = [step(float(i), i, reward_mean=float(i)) for i in range(1, 31)]
    result = summary_of(run_started(), *steps)
    assert (result["reward_first"], result["reward_last"]) == (2.0, 29.0)


def test_one_step_is_its_own_first_and_last_tenth() -> None:
    result = summary_of(run_started(), step(1.0, 1))
    assert result["reward_first"] == result["reward_last"] == 0.1


def test_staleness_is_weighted_by_tokens() -> None:
    result = summary_of(
        run_started(),
        step(1.0, 1, staleness_histogram={0: 900}),
        step(2.0, 2, staleness_histogram={1: 90, 2: 5, 7: 5}),
    )
    assert result["staleness"] == {"mean": pytest.approx(0.135), "p99": 1, "max": 7}


def test_the_gap_at_staleness_0_is_weighted_by_tokens() -> None:
    result = summary_of(
        run_started(),
        step(1.0, 1, logprob_gap={0: [0.1, 0.2, 300]}),
        step(2.0, 2, logprob_gap={0: [0.3, 0.9, 100], 1: [5.0, 9.0, 100]}),
    )
    assert result["logprob_gap_staleness0"] == {"mean": pytest.approx(0.15), "max": 0.9}


def test_the_trainer_idles_only_after_its_first_batch_was_complete() -> None:
    result = summary_of(
        run_started(0.0),
        step(10.0, 1, wait_s=9.0, step_s=1.0),  # the pipeline fills
        step(14.0, 2, wait_s=3.0, step_s=1.0),
        run_ended(15.0),
    )
    assert result["trainer_idle_fraction"] == pytest.approx(3.0 / 6.0)


def test_counters_of_a_replica_that_was_restarted_are_added_up() -> None:
    result = summary_of(
        run_started(),
        worker_started(0.0, "replica-0"),
        report(1.0, "replica-0", 100, 8.0, 2.0),
        report(2.0, "replica-0", 150, 9.0, 3.0),
        worker_died(2.1, "replica-0"),
        worker_started(3.0, "replica-0", epoch=2),
        worker_recovered(3.0, "replica-0"),
        report(4.0, "replica-0", 10, 1.0, 7.0),
        run_ended(10.0),
    )
    replica = result["replicas"]["replica-0"]
    assert (replica["generated_tokens"], replica["incarnations"]) == (160, 2)
    assert result["replica_idle_fraction"] == pytest.approx(0.5)
    assert (result["restarts"], result["recovery_s"]) == (1, {"median": 0.75, "max": 0.75})
    assert result["deaths"][0]["cause"] == "killed by signal 9"


def test_publishes_moves_and_pulls_are_told() -> None:
    result = summary_of(
        run_started(),
        published(1.0, 1, 0.1),
        published(2.0, 2, 0.2),
        published(3.0, 3, 0.9),
        moved(4.0),
        pulled(5.0, "replica-0"),
    )
    assert result["publish_stall_s"] == {"median": 0.2, "max": 0.9}
    assert result["repacks"] == 1
    assert result["replicas"]["replica-0"]["trajectories_moved_away"] == 3
    assert result["replicas"]["replica-0"]["pull_s_mean"] == 0.5


def test_a_resumed_run_counts_a_replayed_step_once() -> None:
    result = summary_of(
        run_started(100.0),
        worker_started(100.0, "replica-0"),
        step(102.0, 1),
        step(104.0, 2),
        run_started(3.0, resumed_version=2),  # another process, another clock
        worker_started(3.0, "replica-0"),
        step(4.0, 2, replayed=True),
        step(8.0, 3, wait_s=9.0),
        run_ended(9.0),
    )
    assert (result["steps"], result["sessions"], result["restarts"]) == (3, 2, 0)
    assert result["wall_s"] == pytest.approx(4.0 + 6.0)
    assert result["trained_tokens_per_s"] == pytest.approx(300 / (3.0 + 1.0))
    assert result["trainer_idle_fraction"] == pytest.approx(0.5 / (3.0 + 2.0))


def test_trajectory_restarts_and_skipped_prompts_are_counted() -> None:
    result = summary_of(
        run_started(),
        event("restarted", 1.0, trajectory_id=1, discarded_tokens=30, reason="refresh"),
        event("restarted", 1.0, trajectory_id=2, discarded_tokens=12, reason="refresh"),
        event("skipped", 1.0, group_id=1, row_id="r", reason="too long"),
    )
    assert (result["trajectory_restarts"], result["discarded_tokens"], result["skipped"]) == (2, 42, 1)


def test_a_summary_of_a_long_run_holds_a_few_numbers_of_every_step() -> None:
    def tell(versions: range) -> None:
        for version in versions:
            summary(step(float(version), version))
            summary(published(float(version), version, 0.25))
            summary(pulled(float(version), "replica-0"))

    summary = Summary()
    tell(range(1, 101))
    tracemalloc.start()
    try:
        tell(range(101, 2101))
        traced_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert traced_bytes / 2000 < 50
    assert summary.result()["steps"] == 2100


def test_a_replayed_step_counts_once() -> None:
    steps = [step(1.0, 1), step(2.0, 2), step(3.0, 1, replayed=True), step(4.0, 3)]
    result = summary_of(run_started(0.0), *steps, run_ended(10.0))
    assert (result["steps"], result["trained_tokens_per_s"]) == (3, pytest.approx(300 / 4.0))
