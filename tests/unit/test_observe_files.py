"""What a run writes about itself can be read again."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from observe_events import event, report, run_started, sample, step

from millrace.config.tables.operation import Observe
from millrace.core.errors import ConfigError, DataError
from millrace.core.events import Events
from millrace.core.types import Finish
from millrace.observe.sinks.jsonl import EventLog, MetricsLog, read_events, step_scalars
from millrace.observe.sinks.open_sinks import open_sinks, refuse_unusable
from millrace.observe.sinks.trackers import TensorBoardTracker
from millrace.observe.summary import Summary


def test_events_come_back_from_their_file(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    events = [run_started(), report(1.0, "replica-0", 5, 1.0, 0.5)]
    for item in events:
        log(item)
    log.close()
    assert list(read_events(tmp_path / "events.jsonl")) == events


def test_a_sink_gets_the_kinds_that_it_names_and_any_other_sink_gets_all() -> None:
    class OfSteps(list):
        kinds = ("step",)
        __call__ = list.append

    events, steps, everything = Events(lambda: 0.0, lambda: 0.0), OfSteps(), []
    events.subscribe(steps)
    events.emit("step", version=1)
    events.subscribe(everything.append)
    events.emit("step", version=2)
    events.emit("scored", value=1.0)
    assert [one.fields["version"] for one in steps] == [1, 2]
    assert [one.kind for one in everything] == ["step", "scored"]


def test_a_summary_of_read_events_is_the_summary_of_the_run(tmp_path: Path) -> None:
    log, live = EventLog(tmp_path / "events.jsonl"), Summary()
    for item in (run_started(), step(1.0, 1), step(2.0, 2), report(3.0, "replica-0", 5, 1.0, 0.5)):
        log(item)
        live(item)
    read = Summary()
    for item in read_events(tmp_path / "events.jsonl"):
        read(item)
    assert read.result() == live.result()


def test_odd_fields_are_shown_and_never_raised(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log(event("finished", 1.0, finish=Finish.STOP, gap=math.nan, thing=object, keys={(1, 2): 3}))
    log(event("warned", 1.0, source="notify", reason="half \ud800"))
    log.close()
    fields, half = (item.fields for item in read_events(tmp_path / "events.jsonl"))
    assert (fields["finish"], fields["gap"]) == ("stop", None)
    assert "object" in fields["thing"] and half["reason"] == r"half \ud800"


@pytest.mark.parametrize("cut", [1, 7, 100_000])
def test_a_line_cut_short_by_a_crash_is_dropped_on_resuming(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log(run_started())
    log(event("admitted", 1.0, group_ids=list(range(40_000))))
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert [e.kind for e in read_events(path)] == ["run_started"]
    resumed = EventLog(path)
    resumed(run_started(5.0))
    resumed.close()
    assert [e.kind for e in read_events(path)] == ["run_started", "run_started"]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "x", "time_s": 1.0, "wall_s": 2.0}\nnonsense\n')
    with pytest.raises(DataError, match=r"events.jsonl:2: not an event"):
        list(read_events(path))


def test_metrics_have_one_flat_line_a_step(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for item in (run_started(), step(1.0, 1), report(2.0, "replica-0", 5, 1.0, 0.5), step(3.0, 2)):
        log(item)
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines] == [1, 2]
    assert lines[0]["reward/mean"] == 0.1 and lines[0]["trainer/loss"] == 0.25
    assert not any(isinstance(value, dict | list) for value in lines[0].values())


def test_a_step_has_one_name_for_each_scalar() -> None:
    scalars = step_scalars(step(1.0, 1).fields)
    assert scalars["logprob_gap/0/mean"] == 0.001 and scalars["logprob_gap/1/max"] == 1.0
    assert scalars["accounting/in_flight"] == 2 and scalars["time/wait_s"] == 0.5
    assert scalars["window/staleness"] == 0.25 and scalars["groups/ready"] == 3
    assert scalars["window/fairness"] == 0.75 and scalars["window/next"] == -0.5


def test_figures_that_are_not_known_yet_are_no_scalars() -> None:
    window = {"batches": 3, "staleness_mean": None, "fairness": None, "next": None}
    assert not any(name.startswith("window/") for name in step_scalars(step(1.0, 1, window=window).fields))


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = Events(lambda: 0.0, lambda: 50.0)

    async def run() -> None:
        async with open_sinks(events, Observe(), tmp_path, {}):
            events.emit("step", **step(1.0, 1).fields)
            events.emit("step", **step(2.0, 2).fields)
            events.emit("step", **step(3.0, 2, replayed=True).fields)

    asyncio.run(run())
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    points = read.Scalars("reward/mean")
    assert [(point.step, point.wall_time) for point in points] == [(1, 50.0), (2, 50.0)]


def test_tensorboard_shows_samples_as_texts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path)
    tracker.log_sample(sample(1.0, 3, prompt="1+1=", completion="<b>2\n```"))
    tracker.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    (point,) = read.Tensors("samples/best")
    (text,) = point.tensor_proto.string_val
    assert point.step == 3
    assert b"trajectory 7, reward 1, trained in step 3" in text and b"\n    <b>2\n    ```" in text


def test_every_run_has_events_and_metrics(tmp_path: Path) -> None:
    events = Events(lambda: 0.0, lambda: 0.0)

    async def run() -> None:
        async with open_sinks(events, Observe(tensorboard=False), tmp_path, {}):
            events.emit("run_started", **run_started().fields)

    asyncio.run(run())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["events.jsonl", "metrics.jsonl"]


@pytest.mark.parametrize("service", ["wandb", "mlflow", "trackio"])
def test_a_service_that_is_not_installed_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: str
) -> None:
    monkeypatch.setitem(sys.modules, service, None)
    observe = Observe(tensorboard=False, **{service: "project"})
    message = rf"`observe.{service}` .*\n.*pip install 'millrace\[{service}\]', or leave the key out"
    with pytest.raises(ConfigError, match=message):
        refuse_unusable(observe)
    with pytest.raises(ConfigError, match=message):
        asyncio.run(open_sinks(Events(lambda: 0.0, lambda: 0.0), observe, tmp_path, {}).__aenter__())


def test_a_folder_of_w_and_b_in_the_working_directory_is_not_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match="the package wandb, which is not installed"):
        refuse_unusable(Observe(wandb="project"))


def test_no_sink_imports_torch(tmp_path: Path) -> None:
    modules = ["sinks.open_sinks", "sinks.jsonl", "sinks.trackers", "summary", "timeline", "live.live_view"]
    code = "import sys\nfrom pathlib import Path\n"
    code += "".join(f"import millrace.observe.{name}\n" for name in modules)
    code += f"millrace.observe.sinks.trackers.TensorBoardTracker(Path({str(tmp_path)!r})).close()\n"
    code += "assert not {'torch', 'tensorflow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
