"""What a monitoring system gets of a run, and where it gets it."""

from __future__ import annotations

import json
import re
import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from observe_events import event, report, run_started, step, worker_died
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from millrace.config.tables.operation import Observe
from millrace.core.errors import ConfigError
from millrace.observe.sinks.prometheus import COUNTERS, GAUGES, PrometheusSink, refuse_unusable

DASHBOARD = Path(__file__).resolve().parents[2] / "examples" / "grafana.json"

METRICS = {"loss": 0.25, "entropy": 1.5, "groups_without_signal": 0.5}
RUN = (
    run_started(resumed_version=3),
    report(1.0, "replica-0", 100, 1.0, 3.0),
    report(2.0, "replica-0", 150, 2.0, 4.0),
    report(3.0, "replica-0", 20, 0.5, 0.5),  # it was restarted
    event("finished", 4.0, trajectory_id=1, tokens=5, versions_min=0, versions_max=0, finish="stop"),
    event("finished", 4.0, trajectory_id=2, tokens=5, versions_min=0, versions_max=0, finish="stop"),
    event("finished", 4.0, trajectory_id=3, tokens=5, versions_min=0, versions_max=0, finish="stop"),
    event("ended", 5.0, trajectory_id=3, state="failed", reason="its group's reward failed"),
    event("scored", 5.0, trajectory_id=1, value=None, outcome="failed", reason="timed out"),
    event("memory", 6.0, resident_bytes={"trainer": 1000}, available_bytes=5000),
    worker_died(7.0, "replica-0"),
    step(8.0, 4, metrics=METRICS),
    event("stalled", 9.0, quiet_s=20.0, waits=[]),
    event("finding", 9.0, fault="no-signal", evidence=["x"], advice=["y"]),
    event("warned", 9.0, source="notify", reason="no answer"),
)


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


@pytest.fixture
def address() -> Iterator[str]:
    address = f"127.0.0.1:{free_port()}"
    sink = PrometheusSink(address)
    for item in RUN:
        sink(item)
    yield address
    sink.close()


def scrape(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {f"{s.name}{sorted(s.labels.values()) or ''}": s.value for s in samples}


def test_a_scrape_tells_how_the_run_does(address: str) -> None:
    found = scrape(address)
    due = {
        "millrace_steps_wanted": 4,
        "millrace_version": 4,
        "millrace_reward_mean": 0.4,
        "millrace_loss": 0.25,
        "millrace_groups_without_signal_ratio": 0.5,
        "millrace_fairness": 0.75,
        "millrace_trajectories['in_flight']": 2,
        "millrace_trained_tokens_total": 100,
        "millrace_trainer_waiting_seconds_total": 0.5,
        "millrace_generated_tokens_total['replica-0']": 170,
        "millrace_replica_idle_seconds_total['replica-0']": 4.5,
        "millrace_replica_kv_used_ratio['replica-0']": 0.25,
        "millrace_scores_total['failed']": 1,
        "millrace_scores_waiting": 1,
        "millrace_worker_deaths_total['replica']": 1,
        "millrace_resident_bytes['trainer']": 1000,
        "millrace_available_bytes": 5000,
        "millrace_quiet_seconds": 20,
        "millrace_findings_total['no-signal']": 1,
        "millrace_warnings_total['notify']": 1,
    }
    assert {name: found.get(name) for name in due} == due


def test_every_metric_that_is_declared_gets_a_value(address: str) -> None:
    names = {name.partition("[")[0] for name in scrape(address)}
    assert {*GAUGES, *COUNTERS} <= names


def test_a_port_in_use_is_one_clear_error(address: str) -> None:
    for use in (refuse_unusable, PrometheusSink):
        with pytest.raises(ConfigError, match=rf"`observe.prometheus` \({address}\) cannot be listened on"):
            use(address)


def test_a_free_port_is_left_free() -> None:
    address = f"127.0.0.1:{free_port()}"
    refuse_unusable(address)
    PrometheusSink(address).close()
    refuse_unusable(address)


def test_without_the_library_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"-m pip install 'millrace\[prometheus\]'"):
        refuse_unusable("127.0.0.1:9400")


@pytest.mark.parametrize(
    ("given", "means"),
    [
        (9400, "127.0.0.1:9400"),
        (":9400", "127.0.0.1:9400"),
        ("0.0.0.0:9400", "0.0.0.0:9400"),
        ("[::1]:1", "[::1]:1"),
    ],
)
def test_a_port_alone_is_on_the_loopback_address(given: object, means: str) -> None:
    assert Observe(prometheus=given).prometheus == means


@pytest.mark.parametrize("given", ["70000", "host", "host:0", "", True])
def test_an_address_that_is_none_is_refused(given: object) -> None:
    with pytest.raises(ValidationError, match="HOST:PORT"):
        Observe(prometheus=given)


def test_the_dashboard_names_only_metrics_that_exist_and_all_that_matter() -> None:
    board = json.loads(DASHBOARD.read_text())
    targets = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    named = set(re.findall(r"millrace_\w+", " ".join(targets)))
    assert named <= {*GAUGES, *COUNTERS}
    assert {*GAUGES, *COUNTERS} - named <= {"millrace_steps_wanted", "millrace_replica_version"}
