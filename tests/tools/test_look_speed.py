"""Where a run is slow, on the page, in the report and on the terminal, from the run's directory alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.look_runs import write_run
from tests.unit.observe_events import event, published, pulled, report, run_started, step

from millrace.api.run import Run
from millrace.cli.app import run
from millrace.core.errors import DataError
from millrace.core.events import Event
from millrace.diagnose import newest_steps
from millrace.observe.sinks.jsonl import EventLog
from millrace.observe.sinks.log_files import rotate
from millrace.run_directory.run_directory import RunDirectory
from millrace_sim.calibrate import changes
from millrace_sim.calibrate.learn import calibrate
from millrace_ui import speed_answer
from millrace_ui.site import Site
from millrace_ui.speed_answer import KEPT_S, speed_of


def slow_rewards(steps: int = 12) -> list[Event]:
    """Each step of 2 s computes for 0.2 s. `replica-0` decodes for 0.2 s, then completions are scored."""
    events = [run_started(), report(0.0, "replica-0", 0, 0.0, 0.0)]
    for version in range(1, steps + 1):
        start_s = 2.0 * (version - 1)
        busy_s = 0.2 * version
        done = event("finished", start_s + 0.3, trajectory_id=version, tokens=3, finish="stop")
        scored = event("scored", start_s + 1.8, trajectory_id=version, value=1.0, outcome="scored", reason="")
        events += [
            report(start_s + 0.3, "replica-0", version, busy_s, start_s + 0.3 - busy_s),
            done,
            scored,
            report(start_s + 1.8, "replica-0", version, busy_s, start_s + 1.8 - busy_s),
            step(start_s + 2.0, version, step_s=0.2, wait_s=1.75),
            published(start_s + 2.0, version, 0.05),
            pulled(start_s + 2.0, "replica-0"),
        ]
    return events


def test_the_page_has_a_bar_for_each_role_and_names_the_bottleneck(tmp_path: Path) -> None:
    write_run(tmp_path / "a", log=slow_rewards())
    html = Site(tmp_path, "/").speed("a", {}).html
    assert "Bottleneck: rewards" in html
    assert all(f"<b>{role}</b>" in html for role in ("trainer", "replica-0", "reward workers"))
    assert 'title="waiting for a batch: 87.5%' in html
    assert "speed/a?outlook=1" in html


def test_a_run_that_is_too_short_to_simulate_says_so_on_the_page(tmp_path: Path) -> None:
    write_run(tmp_path / "a", log=slow_rewards(4))
    html = Site(tmp_path, "/").speed("a", {"outlook": ["1"]}).html
    assert "It cannot be said: 0 reports tell of decode steps: 20 are the least" in html


def test_the_report_has_the_same_bars_and_no_link(tmp_path: Path) -> None:
    made = write_run(tmp_path / "a", log=slow_rewards())
    out = Run(made.path).report(tmp_path / "a.html").read_text()
    assert "Bottleneck: rewards" in out and "outlook=1" not in out


def test_a_run_that_was_copied_without_its_events_has_a_report(tmp_path: Path) -> None:
    made = write_run(tmp_path / "a", log=slow_rewards())
    made.events.unlink()
    out = Run(made.path).report(tmp_path / "a.html").read_text()
    assert "Configuration" in out and "Bottleneck" not in out
    with pytest.raises(DataError, match="no events that a run wrote"):
        speed_of(made)


def test_doctor_and_plan_say_the_same_bottleneck(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "a", log=slow_rewards()).path
    assert Run(path).doctor().bottleneck.name == "rewards"
    assert run(["doctor", str(path)]) == 0
    assert "\nbottleneck rewards: the trainer waited" in capsys.readouterr().out
    assert run(["plan", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["bottleneck"]["name"] == "rewards"
    assert run(["plan", str(path)]) == 0
    assert "What a change would give cannot be said" in capsys.readouterr().out
    assert run(["plan", str(path), "--set", "seed=1"]) == 2
    assert "simulate --from RUN" in capsys.readouterr().err


def test_a_forecast_is_computed_once_for_reloads_and_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, asked = 0.0, list[Path]()
    monkeypatch.setattr("millrace_ui.speed_answer.time.monotonic", lambda: now_s)
    monkeypatch.setattr(speed_answer, "calibrate", lambda path, check: asked.append(path) or calibrate(path))
    write_run(tmp_path / "a", log=slow_rewards(4))
    site = Site(tmp_path, "/")
    first = site.speed("a", {"outlook": ["1"]}).html
    assert site.speed("a", {"outlook": ["1"]}).html == first and len(asked) == 1
    assert "It cannot be said" not in site.speed("a", {}).html
    now_s = KEPT_S + 1
    assert site.speed("a", {"outlook": ["1"]}).html == first and len(asked) == 2


def test_the_time_of_a_forecast_on_a_page_has_its_calibration_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write_run(tmp_path / "a", log=slow_rewards())
    monkeypatch.setattr(speed_answer, "PAGE_S", -1.0)
    assert "no time was left" in speed_of(made, with_outlook=True, on_page=True).why
    assert "0 reports" in speed_of(made, with_outlook=True).why


def test_a_page_does_not_read_a_long_log_for_an_outlook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed_answer, "OUTLOOK_BYTES", 100)
    made = write_run(tmp_path / "a", log=slow_rewards())
    assert "`millrace plan RUN`" in speed_of(made, with_outlook=True, on_page=True).why
    assert "0 reports" in speed_of(made, with_outlook=True).why


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("generation", changes.GENERATION),
        ("generation, long tail", changes.BOUND),
        ("staleness bound", changes.BOUND),
        ("trainer, publishing", changes.TRAINER),
        ("environment", changes.REWARDS),
    ],
)
def test_the_forecast_begins_with_what_helps_the_bottleneck(name: str, first: str) -> None:
    assert speed_answer.helped(name) == first


def crowded(steps: int, num_bytes: int) -> list[Event]:
    """Before each step the log has `num_bytes` bytes of other events."""
    return [
        item
        for one in slow_rewards(steps)
        for item in ([event("sample", one.time_s, text="a" * num_bytes)] if one.kind == "step" else [])
        + [one]
    ]


def test_steps_with_megabytes_of_events_are_found_too(tmp_path: Path) -> None:
    made = write_run(tmp_path / "a", log=crowded(6, 4 << 20))
    assert speed_of(made, on_page=True).use.steps == 5
    assert speed_of(made).bottleneck == Run(made.path).doctor().bottleneck


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newest_steps, "CHUNK_BYTES", 1000)
    made = write_run(tmp_path / "a", log=slow_rewards(150))
    whole = speed_of(made).use
    assert whole.steps == 64 and len(list(newest_steps.newest_lines(made.events))) < 7 * 75
    monkeypatch.setattr(newest_steps, "PAGE_BYTES", made.events.stat().st_size // 15)
    end = speed_of(made, on_page=True).use
    assert 7 <= end.steps <= 10  # they are all of the end of the log: none of them warms up
    assert end.steps_per_s == pytest.approx(whole.steps_per_s)
    rotate(made.events)
    assert speed_of(made, on_page=True).use == end
    assert speed_of(made).use == whole


def test_a_page_that_read_too_little_for_a_step_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newest_steps, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(newest_steps, "PAGE_BYTES", 3000)
    made = write_run(tmp_path / "a", log=crowded(3, 10_000))
    answer = speed_of(made, on_page=True)
    assert answer.bottleneck.name == "unknown"
    assert "the newest 3,000 bytes of events" in answer.bottleneck.reason
    assert "`millrace plan RUN`" in answer.bottleneck.advice
    assert speed_of(made).use.steps == 2


def test_a_condensed_part_is_left_out_where_newer_ones_have_some_steps(tmp_path: Path) -> None:
    """A condensed part has no events of single trajectories, so nobody seems to wait for a reward."""
    events = slow_rewards(36)
    path = write_run(tmp_path / "a", log=[]).events
    for third in (
        events[: len(events) // 3],
        events[len(events) // 3 : -len(events) // 3],
        events[-len(events) // 3 :],
    ):
        log = EventLog(path)
        for one in third:
            log(one)
        log.close()
        if third[-1] is not events[-1]:
            rotate(path)
    use = speed_of(RunDirectory(path.parent)).use
    assert 20 <= use.steps <= 24
    assert (
        "without work" not in use.waits or use.waits["without work"] < 0.1 * use.waits["waiting for rewards"]
    )


def test_a_run_without_steps_has_no_bottleneck_yet(tmp_path: Path) -> None:
    made = write_run(tmp_path / "a", steps=1, log=[run_started()])
    assert speed_of(made).bottleneck.name == "unknown"
    assert "Bottleneck: unknown" in Site(tmp_path, "/").speed("a", {}).html
