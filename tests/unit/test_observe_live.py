"""The live view says how the run is doing."""

from __future__ import annotations

import io

import pytest
from observe_events import (
    event,
    report,
    run_ended,
    run_started,
    step,
    worker_died,
    worker_recovered,
    worker_started,
)
from rich.console import Console

from millrace.controller.controller import INTERRUPTED
from millrace.core.events import Event
from millrace.observe.live.live_view import LiveView, plain_line, render, sample_line
from millrace.observe.live.status import Status
from millrace.observe.sinks.notify import message_text
from millrace.observe.summary import Summary
from millrace.observe.terminal import sparkline


def status_of(*events: Event) -> Status:
    status = Status()
    for item in events:
        status(item)
    return status


RUN = (
    run_started(0.0),
    worker_started(0.0, "replica-0"),
    report(1.0, "replica-0", 100, 1.0, 0.0),
    step(2.0, 1),
    report(3.0, "replica-0", 300, 2.0, 1.0),
    step(6.0, 2, wait_s=1.0),
)


def text_of(status: Status) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(render(status))
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_rates_idling_and_time_left_come_from_the_recent_past() -> None:
    status = status_of(*RUN)
    assert status.speeds.generated.per_s == pytest.approx(100.0)
    assert status.speeds.trained.per_s == pytest.approx(40.0)
    assert status.trainer_idle_fraction == pytest.approx(0.25)
    assert status.remaining_s == pytest.approx(8.0)


def test_finished_trajectories_without_a_score_are_being_scored() -> None:
    message_text = {"tokens": 5, "versions_min": 0, "versions_max": 0, "finish": "stop"}
    finished = [event("finished", 1.0, trajectory_id=number, **message_text) for number in range(3)]
    scored = event("scored", 2.0, trajectory_id=1, value=1.0, outcome="scored", reason="")
    ended = event("ended", 2.0, trajectory_id=2, state="failed", reason="its group's reward failed")
    assert status_of(*finished, scored).scoring == 2
    assert status_of(*finished, scored, ended).scoring == 1


def test_the_panel_shows_the_run_and_each_replica() -> None:
    text = text_of(status_of(*RUN))
    for part in ("laminar", "step 2/4", "reward", "staleness 0.50 mean", "40 trained", "trainer idle 25%"):
        assert part in text
    row = next(line for line in text.splitlines() if "replica-0" in line)
    assert all(cell in row for cell in ("v1", "25%", "33%", "300"))


def test_fairness_is_shown_as_soon_as_it_is_known() -> None:
    assert "trainer idle 25%, fairness 0.75" in text_of(status_of(*RUN))
    assert "| fairness 0.75 |" in plain_line(status_of(*RUN))
    unknown = {"batches": 3, "staleness_mean": None, "fairness": None, "next": None}
    assert "fairness" not in text_of(status_of(*RUN, step(7.0, 3, window=unknown)))


def test_the_panel_says_what_workers_compute_in() -> None:
    message_text = [
        event("computes", 2.0, name=f"replica-{i}", computes="float32; not exact") for i in range(2)
    ]
    assert "replica-0, replica-1: float32; not exact" in text_of(status_of(*RUN, *message_text))


def test_a_dead_replica_is_shown_as_dead_until_it_is_back() -> None:
    dead = status_of(*RUN, worker_died(7.0, "replica-0"))
    assert "dead" in text_of(dead) and "killed by signal 9" in text_of(dead)
    back = status_of(
        *RUN,
        worker_died(7.0, "replica-0"),
        worker_started(8.0, "replica-0", epoch=2),
        worker_recovered(8.0, "replica-0"),
    )
    assert "starting" in text_of(back) and "restarts 1" in text_of(back)


def test_the_panel_can_be_drawn_before_anything_has_happened() -> None:
    assert "starting" in text_of(Status())


def test_off_a_terminal_a_plain_line_comes_every_few_seconds() -> None:
    output = io.StringIO()
    with LiveView(Console(file=output, width=40)) as view:
        for item in (*RUN, *(report(6.0 + i / 10, "replica-0", 400, 3.0, 1.0) for i in range(30))):
            view(item)
        view(worker_died(9.0, "replica-0"))
        view(run_ended(9.5))
    lines = output.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("step 0/4") and "replica-0 died" in lines[2]
    assert lines[-1].endswith("ended: done")


@pytest.mark.parametrize(("term", "encoding"), [("dumb", "utf-8"), ("xterm", "ascii")])
def test_a_terminal_that_cannot_draw_gets_lines(
    monkeypatch: pytest.MonkeyPatch, term: str, encoding: str
) -> None:
    monkeypatch.setenv("TERM", term)
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    with LiveView(Console(file=output, force_terminal=True)) as view:
        for item in RUN:
            view(item)
        output.seek(0)
        assert "no step yet; started: replica-0" in output.read()


def test_on_a_terminal_the_view_draws_itself() -> None:
    output = io.StringIO()
    with LiveView(Console(file=output, width=100, force_terminal=True)) as view:
        for item in RUN:
            view(item)
    assert "step 2/4" in output.getvalue()


def test_panel_and_summary_have_the_same_speeds_start_up_left_out() -> None:
    summary, slow = Summary(), [Event(e.kind, e.time_s + 60, e.wall_s + 60, e.fields) for e in RUN[1:]]
    for item in (RUN[0], *slow):
        summary(item)
    status, result = status_of(RUN[0], *slow), summary.result()
    assert result["trained_tokens_per_s"] == status.speeds.trained.per_s == pytest.approx(40.0)
    assert result["generated_tokens_per_s"] == status.speeds.generated.per_s == pytest.approx(100.0)


def test_a_dead_replica_that_counts_from_zero_again_loses_no_tokens() -> None:
    again = (worker_died(6.0, "replica-0"), report(8.0, "replica-0", 60, 0.5, 0.0))
    assert status_of(*RUN, *again).speeds.generated.per_s == pytest.approx(360 / 8.0)


def test_the_range_beside_the_bars_is_that_of_the_bars() -> None:
    rewards = [5.0] + [0.5 + version / 1000 for version in range(99)]
    text = text_of(status_of(*RUN, *(step(2.0 + i, 1 + i, reward_mean=r) for i, r in enumerate(rewards))))
    assert "0.598  (0.551 to 0.598)" in text


def test_time_that_is_left_is_never_nothing_and_a_slow_step_counts() -> None:
    quick = status_of(run_started(), step(2.0, 1), step(2.05, 2), step(2.1, 3))
    assert "left 0:01" in plain_line(quick)
    quick.wall_s += 30.0
    assert quick.remaining_s == pytest.approx(30.1 / 3)
    assert "left" not in plain_line(status_of(run_started(), step(2.0, 1), step(2.05, 2), run_ended(3.0)))


def test_a_plain_line_has_dashes_for_what_is_not_known() -> None:
    line = plain_line(status_of(run_started(), step(2.0, 1)))
    assert "tokens/s 100 trained, - generated" in line and "left -" in line


def test_until_the_first_step_the_view_says_who_is_up_and_what_is_under_way() -> None:
    starting = status_of(run_started())
    assert plain_line(starting) == "step 0/4 | starting the workers"
    begun = status_of(
        run_started(), worker_started(1.0, "replica-0"), event("admitted", 2.0, group_ids=[0, 1])
    )
    assert plain_line(begun) == "step 0/4 | no step yet; started: replica-0; in flight 4"
    assert "no step yet; started: replica-0; in flight 4" in text_of(begun)


def test_a_stall_is_not_shown_once_steps_are_made_again() -> None:
    stalled = event("stalled", 3.0, quiet_s=20.0, waits=["trainer waits"])
    assert "stalled: trainer waits" in plain_line(status_of(*RUN, stalled))
    assert "stalled" not in plain_line(status_of(*RUN, stalled, step(7.0, 3)))


def test_an_error_that_ends_the_run_is_left_to_the_one_who_reports_it() -> None:
    failed = event("run_ended", 7.0, ok=False, reason="DataError: long story", took_s=7.0, accounting={})
    assert plain_line(status_of(*RUN, failed)).endswith("ended: by an error")


@pytest.mark.parametrize("width", [60, 80, 100])
def test_on_a_narrow_terminal_the_panel_says_everything(width: int) -> None:
    many = [step(2.0 + i, 1 + i, reward_mean=i / 300) for i in range(200)]
    died = worker_died(300.0, "replica-0")
    console = Console(file=io.StringIO(), width=width)
    console.print(render(status_of(*RUN, *many, died), width))
    output = console.file
    assert isinstance(output, io.StringIO)
    text = output.getvalue()
    facts = (
        "elapsed",
        f"({(199 - min(48, max(4, width - 42)) + 1) / 300:.3f} to 0.663)",
        "staleness",
        "101 trained, 100 generated",
        "restarts 1",
    )
    for fact in (*facts, "replica ", "replica-0 ", "dead", "generated", "replica-0 died"):
        assert fact in text
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= width - len("^C")


def test_a_sparkline_spans_its_own_range() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""
    assert sparkline([0.5, 1.0], 0.0, 1.0) in ("▄█", "▅█")


SAMPLE = event(
    "sample",
    6.5,
    version=2,
    place="best",
    reward=1.0,
    prompt="What is\n12 + 7?",
    completion="<think>" + "so " * 60 + "</think> 19",
)
WATCHED = (
    step(6.0, 2, metrics={"loss": 0.25, "entropy": 1.5, "groups_without_signal": 0.25}),
    event("scored", 6.1, trajectory_id=1, value=None, outcome="failed", reason="timed out"),
    event("scored", 6.1, trajectory_id=2, value=1.0, outcome="scored", reason=""),
    event("memory", 6.2, resident_bytes={"trainer": 3 << 30, "relay": 1 << 30}, available_bytes=5 << 30),
    SAMPLE,
)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_panel_shows_learning_failures_memory_and_a_sample(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(status_of(*RUN, *WATCHED), width))
    text = console.file.getvalue()
    for fact in (
        "loss 0.25, entropy 1.5, no signal 25%",
        "failed rewards 1 (50.0%)",
        "memory trainer 3.0 GiB, 5.0 GiB free",
        "sample of step 2, reward 1: What is 12 + 7?",
        "</think> 19",
    ):
        assert fact in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width - len("^C")


def test_a_plain_line_has_the_same_and_only_ascii() -> None:
    status = status_of(*RUN, *WATCHED)
    assert "| loss 0.25, entropy 1.5, no signal 25% |" in plain_line(status)
    assert "| failed rewards 1 (50.0%) | memory trainer 3.0 GiB, 5.0 GiB free |" in plain_line(status)
    assert sample_line(status).startswith("sample of step 2, reward 1: What is 12 + 7? => <think>so")
    assert (plain_line(status) + sample_line(status)).isascii()


def test_of_a_step_the_best_sample_is_shown() -> None:
    worst = event("sample", 6.6, **(SAMPLE.fields | {"place": "worst", "prompt": "other"}))
    assert "What is 12" in sample_line(status_of(*RUN, SAMPLE, worst))


def test_off_a_terminal_a_sample_is_printed_once_a_minute() -> None:
    output = io.StringIO()
    with LiveView(Console(file=output)) as view:
        for seconds in range(0, 130, 10):
            view(event("sample", float(seconds), **(SAMPLE.fields | {"version": seconds})))
    assert output.getvalue().count("sample of step") == 3


def test_a_finding_and_a_warning_are_shown() -> None:
    finding = event("finding", 7.0, fault="no-signal", evidence=["all equal"], advice=["change it"])
    assert "doctor: no-signal: all equal" in plain_line(status_of(*RUN, finding))
    warned = event("warned", 7.0, source="notify", reason="no answer")
    assert "notify: no answer" in text_of(status_of(*RUN, warned))


def test_a_finding_is_shown_until_it_is_withdrawn() -> None:
    finding = event("finding", 7.0, fault="no-signal", evidence=["all equal"], advice=["change it"])
    died, back = worker_died(8.0, "replica-0"), worker_recovered(9.0, "replica-0")
    for show in plain_line, text_of:
        assert "no-signal: all equal" in show(status_of(*RUN, finding, died, back))
        withdrawn = event(
            "withdrawn", 10.0, fault="no-signal", reason="no-signal held for versions 20 to 38; gone since"
        )
        text = show(status_of(*RUN, finding, withdrawn))
        assert "all equal" not in text and "no-signal held for versions 20 to 38; gone since" in text


def test_a_slow_start_is_told_as_a_start_and_not_as_a_stall():
    slow = event("starting", 30.0, quiet_s=20.0, waits=["trainer waits for its weights to load"])
    line = plain_line(status_of(run_started(), slow))
    assert "still starting: trainer waits for its weights to load" in line and "stalled" not in line
    for over in event("admitted", 40.0, group_ids=[0]), step(40.0, 1):
        assert "still starting" not in plain_line(status_of(run_started(), slow, over))
    assert not message_text(slow)


def test_a_run_that_the_user_interrupted_did_not_end_by_an_error() -> None:
    ended = event("run_ended", 7.0, ok=False, reason=INTERRUPTED, took_s=7.0, accounting={})
    assert plain_line(status_of(*RUN, ended)).endswith("ended: interrupted by the user")
