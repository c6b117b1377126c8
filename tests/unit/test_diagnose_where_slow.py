"""Where a run is slow: the time of each role by cause, and the one bottleneck that follows from it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.unit.observe_events import event, report, run_started, step

from millrace.core.events import Event
from millrace.diagnose.bottleneck import bottleneck
from millrace.diagnose.time_use import (
    BATCH,
    BOUND,
    CHECKPOINT,
    COMPUTING,
    DECODING,
    IDLE,
    NO_WORK,
    OTHER,
    PUBLISHING,
    REWARDS,
    SCORING,
    TAIL,
    WEIGHTS,
    Moment,
    Moments,
    TimeUse,
    TimeUseLog,
)

STEP_S = 10.0


def run(
    steps: int,
    *,
    step_s: float,
    busy: float,
    during: Callable[[float], list[Event]] = lambda start_s: [],
) -> list[Event]:
    """Steps of 10 s: the trainer waits, then computes. `replica-0` decodes for the share `busy` of the wait,
    and for nothing of the rest. `during` has further events of the step that begins at `start_s`."""
    events, busy_s = [run_started(), report(0.0, "replica-0", 0, 0.0, 0.0)], 0.0
    for version in range(1, steps + 1):
        start_s = STEP_S * (version - 1)
        wait_s = STEP_S - step_s
        busy_s += busy * wait_s
        waited_s = start_s + wait_s
        events += [
            *during(start_s),
            report(waited_s, "replica-0", version, busy_s, waited_s - busy_s),
            report(start_s + STEP_S, "replica-0", version, busy_s, start_s + STEP_S - busy_s),
            step(start_s + STEP_S, version, step_s=step_s, wait_s=wait_s),
        ]
    return sorted(events, key=lambda event: event.time_s)


def used(events: list[Event], workers: int = 1) -> TimeUse:
    log = TimeUseLog(workers)
    for one in events:
        log(one)
    return log.use()


def scored_late(start_s: float) -> list[Event]:
    """A completion of second 1 has its reward at second 7."""
    tid = round(start_s)
    done = event("finished", start_s + 1, trajectory_id=tid, tokens=5)
    return [done, event("scored", start_s + 7, trajectory_id=tid, value=1.0, outcome="scored", reason="")]


def use_of(trainer: dict[str, float], waits: dict[str, float], busy: float = 0.5, **more: float) -> TimeUse:
    """Shares as seconds. Replicas decode for `busy` of the time."""
    replica = {DECODING: busy, BOUND: 1 - busy}
    return TimeUse(20, 1.0, trainer, {"replica-0": replica}, {}, waits, **more)


# ---------------------------------------------------------------- time by cause


def test_moments_cut_a_period_where_something_changes():
    moments = Moments((0.0, 10.0), [(2.0, 4.0)], [(3.0, 2), (6.0, -2)])
    assert list(moments) == [
        Moment(0.0, 2.0, False, 0),
        Moment(2.0, 3.0, True, 0),
        Moment(3.0, 4.0, True, 2),
        Moment(4.0, 6.0, False, 2),
        Moment(6.0, 10.0, False, 0),
    ]
    assert [(m.start_s, s) for m, s in moments.within((2.5, 4.5))] == [(2.0, 0.5), (3.0, 1.0), (4.0, 0.5)]


def test_the_time_of_every_role_adds_up_and_has_its_cause():
    def during(start_s: float) -> list[Event]:
        copied = event("published", start_s + 1, version=1, stall_s=0.5, digest="a", digest_s=0.0)
        return [copied, event("checkpoint", start_s + 2, version=1, path="c", save_s=1.0, stall_s=0.25)]

    use = used(run(9, step_s=4.0, busy=0.5, during=during))
    assert use.steps == 4  # of 9; the first five warm up
    assert use.took_s == pytest.approx(40.0)
    assert use.steps_per_s == pytest.approx(0.1)
    assert use.trainer == pytest.approx({COMPUTING: 16, BATCH: 24, PUBLISHING: 2, CHECKPOINT: 1})
    replica = use.replicas["replica-0"]
    assert sum(replica.values()) == pytest.approx(40.0)
    assert replica == pytest.approx({DECODING: 12, BOUND: 16, NO_WORK: 12, WEIGHTS: 0})


def test_a_replica_that_idles_while_completions_are_scored_waits_for_rewards():
    use = used(run(9, step_s=2.0, busy=0.25, during=scored_late), workers=2)
    assert use.replicas["replica-0"][REWARDS] == pytest.approx(4 * 6.0 * 0.75)
    assert use.replicas["replica-0"][BOUND] == pytest.approx(4 * 2.0)
    assert use.rewards == pytest.approx({SCORING: 4 * 6.0, IDLE: 4 * 14.0})
    assert use.scoring == pytest.approx(0.6)


def test_a_swap_is_its_own_cause_of_idle_time():
    def swap(start_s: float) -> list[Event]:
        return [event("pulled", start_s + 3, replica="replica-0", version=1, digest="a", pull_s=1, swap_s=2)]

    use = used(run(9, step_s=5.0, busy=0.2, during=swap))
    assert use.replicas["replica-0"][WEIGHTS] == pytest.approx(4 * 2.0)
    assert use.waits[WEIGHTS] == pytest.approx(4 * 2.0)


def test_a_resumed_run_is_judged_by_its_newest_session_and_a_new_incarnation_counts_from_zero():
    again = run(3, step_s=8.0, busy=1.0)
    use = used([*run(9, step_s=1.0, busy=0.0), *again])
    assert use.steps == 2
    assert use.trainer[COMPUTING] == pytest.approx(16.0)
    fresh = report(19.0, "replica-0", 0, 0.0, 0.5)
    assert used([*again, fresh]).replicas["replica-0"][DECODING] == pytest.approx(4.0)


def test_a_report_in_the_middle_of_work_counts_no_idle_time_that_a_later_one_takes_back():
    events = [run_started(), *(step(10.0 * v, v, step_s=1.0, wait_s=9.0) for v in range(3))]
    events += [
        report(at_s, "replica-0", 1, busy, idle) for at_s, busy, idle in ((0, 0, 0), (5, 0, 5), (20, 16, 4))
    ]
    use = used(events)
    assert use.replicas["replica-0"][DECODING] == pytest.approx(16.0)
    assert sum(use.replicas["replica-0"].values()) == pytest.approx(20.0)
    assert min(use.replicas["replica-0"].values()) >= 0


def test_only_the_newest_steps_count_and_what_nobody_recorded_is_other():
    events = [e for e in run(80, step_s=1.0, busy=1.0) if e.kind != "report"]
    for e in events:
        if e.kind == "step":
            e.fields["wait_s"] = 8.0
    use = used(events)
    assert use.steps == 64
    assert use.trainer[OTHER] == pytest.approx(64.0)
    assert use.replicas == {} and use.rewards == {} and use.scoring is None and use.controller is None


def test_the_controllers_share_of_a_core_is_between_two_records():
    def cpu(start_s: float) -> list[Event]:
        return [event("memory", start_s + 5, resident_bytes={}, controller_cpu_s=0.3 * start_s)]

    assert used(run(9, step_s=1.0, busy=1.0, during=cpu)).controller == pytest.approx(0.3)


def of_four(decode_s: tuple[float, ...], steps: int = 9) -> list[Event]:
    """Steps of 10 s, with a wait of 8 s from their beginning. Each replica first decodes for its own time."""
    events = [run_started()]
    for number, own_s in enumerate(decode_s):
        events.append(report(0.0, f"replica-{number}", 0, 0.0, 0.0))
        for version in range(1, steps + 1):
            start_s, busy_s = STEP_S * (version - 1), own_s * version
            ends = (start_s + own_s, start_s + 8.0, start_s + STEP_S)
            events += [report(at_s, f"replica-{number}", version, busy_s, at_s - busy_s) for at_s in ends]
    events += [step(STEP_S * version, version, step_s=2.0, wait_s=8.0) for version in range(1, steps + 1)]
    return sorted(events, key=lambda event: event.time_s)


def test_replicas_that_are_done_wait_for_the_longest_completion_of_another():
    use = used(of_four((2.0, 2.0, 2.0, 8.0)))
    assert use.waits == pytest.approx({DECODING: 4 * 14.0, TAIL: 4 * 18.0, NO_WORK: 0, WEIGHTS: 0}, abs=1e-6)
    assert use.replicas["replica-0"][TAIL] == pytest.approx(4 * 6.0)
    assert TAIL not in use.replicas["replica-3"]
    slow = bottleneck(use, slots=8)
    assert slow.name == "generation, long tail"
    assert "replicas waited 56% of that time for the longest completions of others" in slow.reason
    assert "staleness bound" in slow.advice


def test_replicas_have_no_work_only_while_none_decodes():
    use = used(of_four((2.0, 2.0, 2.0, 2.0)))
    assert use.waits == pytest.approx({DECODING: 4 * 8.0, NO_WORK: 4 * 24.0, WEIGHTS: 0})
    assert bottleneck(use, slots=8).name == "supply of work"
    both = used(of_four((1.0, 1.0, 1.0, 4.0)))
    assert both.waits[TAIL] == pytest.approx(4 * 9.0) and both.waits[NO_WORK] == pytest.approx(4 * 16.0)


# ---------------------------------------------------------------- the bottleneck


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("trainer", use_of({COMPUTING: 0.9, BATCH: 0.1}, {})),
        ("trainer", use_of({COMPUTING: 0.78, BATCH: 0.09, OTHER: 0.13}, {}, busy=0.25)),
        ("trainer, publishing", use_of({COMPUTING: 0.3, PUBLISHING: 0.6, BATCH: 0.1}, {})),
        ("trainer, checkpoint", use_of({COMPUTING: 0.3, CHECKPOINT: 0.6, BATCH: 0.1}, {})),
        ("generation", use_of({COMPUTING: 0.3, BATCH: 0.7}, {DECODING: 0.9, REWARDS: 0.1}, busy=0.9)),
        ("rewards", use_of({COMPUTING: 0.1, BATCH: 0.9}, {DECODING: 0.2, REWARDS: 0.8}, busy=0.2)),
        ("weights", use_of({COMPUTING: 0.1, BATCH: 0.9}, {DECODING: 0.2, WEIGHTS: 0.8}, busy=0.2)),
        ("supply of work", use_of({COMPUTING: 0.1, BATCH: 0.9}, {DECODING: 0.2, NO_WORK: 0.8}, busy=0.2)),
        ("staleness bound", use_of({COMPUTING: 0.5, BATCH: 0.5}, {DECODING: 0.9}, busy=0.5)),
        ("staleness bound", use_of({COMPUTING: 0.5, BATCH: 0.5}, {DECODING: 0.4, TAIL: 0.6}, busy=0.2)),
        ("generation, long tail", use_of({COMPUTING: 0.1, BATCH: 0.9}, {DECODING: 0.3, TAIL: 0.7}, busy=0.8)),
        ("generation", use_of({BATCH: 0.9}, {DECODING: 0.32, TAIL: 0.3, REWARDS: 0.38}, busy=0.8)),
        ("controller", use_of({COMPUTING: 0.1, BATCH: 0.9}, {DECODING: 0.9}, controller=0.97)),
        ("none", use_of({COMPUTING: 0.95, BATCH: 0.05}, {DECODING: 1.0}, busy=0.95)),
        ("unknown", TimeUse(steps=1)),
        ("generation", use_of({COMPUTING: 0.2, BATCH: 0.8}, {})),
    ],
)
def test_each_cause_has_its_bottleneck(name, use):
    assert bottleneck(use, slots=8).name == name


@pytest.mark.parametrize(("steps", "timed"), [(0, 0), (1, 0), (2, 1)])
def test_too_few_steps_are_said_to_be_timed_ones(steps, timed):
    slow = bottleneck(used(run(steps, step_s=3.0, busy=1.0)), slots=8)
    assert slow.name == "unknown"
    assert slow.reason == f"timed steps: {timed}, of at least 2. A session does not time its first"


def test_the_reason_has_the_shares_and_the_advice_a_key():
    use = use_of({COMPUTING: 0.38, BATCH: 0.62}, {DECODING: 0.97, NO_WORK: 0.03}, busy=0.97)
    slow = bottleneck(use, slots=8)
    assert slow.reason == (
        "the trainer waited 62% of the time for batches, and replicas were busy 97% of that time"
    )
    assert "`rollout.replicas`" in slow.advice


def test_a_trainer_whose_time_is_in_no_step_is_not_said_to_work_little():
    slow = bottleneck(use_of({COMPUTING: 0.3, BATCH: 0.05, OTHER: 0.65}, {}, busy=0.25), slots=8)
    assert slow.name == "trainer, other"
    assert slow.reason == (
        "it waited 5% of the time for batches (computing 30%, other 65%), and replicas were idle 75%"
    )
    assert "`step_rejected`" in slow.advice


def test_replicas_with_empty_slots_need_no_more_devices():
    use = use_of({COMPUTING: 0.2, BATCH: 0.8}, {DECODING: 1.0}, busy=0.9, running=2.0)
    assert "2.0 of 8 slots" in bottleneck(use, slots=8).reason
    assert "slots" not in bottleneck(use, slots=3).reason


def test_an_environment_is_named_and_a_device_in_turns_has_two_sides():
    waiting = use_of({COMPUTING: 0.1, BATCH: 0.9}, {DECODING: 0.2, REWARDS: 0.8}, busy=0.2)
    assert bottleneck(waiting, slots=8, episodes=True).name == "environment"
    assert bottleneck(waiting, slots=8, colocated=True).name == "generation"
    training = use_of({COMPUTING: 0.7, BATCH: 0.3}, {})
    assert bottleneck(training, slots=8, colocated=True).name == "trainer"


@pytest.mark.parametrize(
    ("step_s", "busy", "during", "name"),
    [
        (9.0, 1.0, lambda start_s: [], "trainer"),
        (1.0, 1.0, lambda start_s: [], "generation"),
        (1.0, 0.1, scored_late, "rewards"),
        (5.0, 1.0, lambda start_s: [], "staleness bound"),
    ],
)
def test_events_lead_to_the_bottleneck(step_s, busy, during, name):
    assert bottleneck(used(run(9, step_s=step_s, busy=busy, during=during)), slots=8).name == name
