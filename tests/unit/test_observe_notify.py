"""Whoever does not watch is told, and never in the way."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from observe_events import event, run_ended, step, worker_died

from millrace.core.errors import ConfigError
from millrace.core.events import Event, Events
from millrace.diagnose import rules as watch_module
from millrace.diagnose.evidence import Evidence
from millrace.diagnose.finding import Finding
from millrace.diagnose.rules import FIRST_STEPS, DoctorWatch, diagnose, gone
from millrace.observe.sinks import notify
from millrace.observe.sinks.notify import Notifier

STALLED = event("stalled", 1.0, quiet_s=20.0, waits=["trainer waits for replica-0"])
KEEP = (
    "import pathlib, sys; target = pathlib.Path(sys.argv[1]);"
    " target.open('a').write(sys.stdin.read() + chr(10))"
)


def command(tmp_path: Path, program: str = KEEP) -> str:
    script = tmp_path / "hook.py"
    script.write_text(program)
    return f"{sys.executable} {script} {tmp_path / 'told'}"


def tell(target: str, *run_events: Event) -> list[Event]:
    """Run a notifier over `run_events`; what it emitted itself."""
    events, heard = Events(lambda: 0.0, lambda: 0.0), []
    events.subscribe(heard.append)
    notifier = Notifier(events, target, Path("/runs/night"))
    for item in run_events:
        notifier(item)
    notifier.close()
    return heard


def messages(tmp_path: Path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]


def test_a_command_is_told_of_a_stall_a_death_a_finding_and_the_end(tmp_path: Path) -> None:
    finding = event("finding", 3.0, fault="no-signal", evidence=["all equal"], advice=[])
    assert not tell(
        command(tmp_path), step(0.5, 7), STALLED, worker_died(2.0, "relay"), finding, run_ended(4.0)
    )
    notices = messages(tmp_path)
    assert [message["kind"] for message in notices] == ["stalled", "worker_died", "finding", "run_ended"]
    assert notices[0]["text"] == "night at step 7: no progress for 20 s: trainer waits for replica-0"
    assert (notices[0]["run"], notices[0]["version"]) == ("/runs/night", 7)
    assert notices[3]["text"].endswith("ended: done")


def test_every_fault_that_the_doctor_finds_in_one_look_is_told(tmp_path: Path) -> None:
    faults = ["no-signal", "unfair-batches"]
    tell(command(tmp_path), *(event("finding", 3.0, fault=f, evidence=["so"], advice=[]) for f in faults))
    assert [message["fields"]["fault"] for message in messages(tmp_path)] == faults


def test_of_one_kind_there_is_one_message_a_minute_and_the_rest_are_counted(tmp_path: Path) -> None:
    deaths = [worker_died(at_s, "relay") for at_s in (0.0, 10.0, 59.0, 61.0, 70.0)]
    tell(command(tmp_path), *deaths, run_ended(71.0))
    assert [(m["kind"], m["left_out"]) for m in messages(tmp_path)] == [
        ("worker_died", 0), ("worker_died", 2), ("run_ended", 0),
    ]  # fmt: skip


def test_a_command_that_fails_is_one_warning(tmp_path: Path) -> None:
    target = command(tmp_path, "import sys; sys.exit('no such channel')")
    (warned,) = tell(target, STALLED, worker_died(2.0, "relay"), run_ended(3.0))
    assert warned.kind == "warned"
    assert warned.fields["reason"] == "RuntimeError: the command ended with 1: no such channel"


def test_a_command_that_never_ends_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "DEADLINE_S", 0.2)
    (warned,) = tell(command(tmp_path, "import time; time.sleep(1000)"), STALLED)
    assert "did not end within 0.2 s" in warned.fields["reason"]


def test_behind_a_full_queue_the_end_is_told_and_the_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    delivered, goes_on = list[str](), threading.Event()

    def deliver(message: str) -> None:
        assert goes_on.wait(60)
        delivered.append(json.loads(message)["kind"])

    monkeypatch.setattr(notify, "_QUEUED_MAX", 2)
    monkeypatch.setattr(notify, "deliverer", lambda target: deliver)
    events, heard = Events(lambda: 0.0, lambda: 0.0), list[Event]()
    events.subscribe(heard.append)
    notifier = Notifier(events, "hook", Path("/runs/night"))
    for _ in range(9):
        notifier(event("finding", 1.0, fault="stale", evidence=["so"], advice=[]))
    notifier(run_ended(2.0))
    goes_on.set()
    notifier.close()
    assert delivered[-1] == "run_ended" and not notifier._thread.is_alive()
    assert [one.fields["reason"] for one in heard] == ["2 messages wait already: one was left out"]


def test_what_still_waits_at_the_end_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "DEADLINE_S", 0.2)
    goes_on = threading.Event()
    monkeypatch.setattr(notify, "deliverer", lambda target: lambda message: goes_on.wait(60) and None)
    (warned,) = tell("hook", STALLED, worker_died(2.0, "relay"), run_ended(3.0))
    goes_on.set()
    assert "3 messages may be lost" in warned.fields["reason"]


class Hook(BaseHTTPRequestHandler):
    heard: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        self.heard.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        Hook.heard.clear()
        yield f"http://127.0.0.1:{server.server_port}/hook"
        server.shutdown()
        thread.join()


def test_a_url_gets_the_message_by_post(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHT_HOOK", url)
    assert not tell("$NIGHT_HOOK", run_ended(1.0))
    (message,) = map(json.loads, Hook.heard)
    assert message["kind"] == "run_ended"


def test_a_url_that_nobody_serves_is_one_warning() -> None:
    (warned,) = tell("http://127.0.0.1:9/hook", STALLED, run_ended(1.0))
    assert "URLError" in warned.fields["reason"]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("$NO_SUCH_VARIABLE", "no such variable"),
        ("no-such-program --now", "no such command"),
        ("'unclosed", "no command line"),
    ],
)
def test_whom_nobody_can_reach_is_an_error_before_the_run(target: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"`observe.notify` .*{said}"):
        notify.deliverer(target)


def test_the_doctor_tells_each_fault_once_while_the_run_goes_on() -> None:
    events, heard = Events(lambda: 0.0, lambda: 0.0), []
    events.subscribe(heard.append)
    watch = DoctorWatch(events, Evidence())
    events.subscribe(watch)
    for version in range(1, 3 * FIRST_STEPS):
        watch(step(float(version), version, metrics={"groups_without_signal": 1.0}))
        assert not heard or version >= FIRST_STEPS
    faults = [item.fields["fault"] for item in heard]
    assert faults.count("no-signal") == 1 and len(faults) == len(set(faults))


def test_a_finding_that_holds_no_more_is_withdrawn_and_told_again_once_it_is_back() -> None:
    events, heard = Events(lambda: 0.0, lambda: 0.0), []
    evidence = Evidence()
    watch = DoctorWatch(events, evidence)
    events.subscribe(heard.append)
    events.subscribe(watch)
    for version in range(1, 400):
        share = 1.0 if version <= 25 or version > 100 else 0.0
        watch(step(float(version), version, metrics={"groups_without_signal": share}))
        if version == 50:
            assert gone(evidence, diagnose(evidence)) == ["no-signal held for versions 20 to 25; gone since"]
    kinds = [item.kind for item in heard if item.fields["fault"] == "no-signal"]
    assert kinds == ["finding", "withdrawn", "finding"]
    assert "no-signal" not in str(gone(evidence, diagnose(evidence)))


def test_the_last_look_is_at_the_end_of_the_run() -> None:
    events, heard = Events(lambda: 0.0, lambda: 0.0), []
    watch = DoctorWatch(events, Evidence())
    events.subscribe(heard.append)
    events.subscribe(watch)
    for version in range(1, 25):
        share = 0.0 if version <= 20 else 1.0
        watch(step(float(version), version, metrics={"groups_without_signal": share}))
    watch(event("run_ended", 99.0, ok=False, reason="TrainingError: the loss is not finite"))
    assert [item.fields["fault"] for item in heard] == ["diverging-optimizer"]


def test_somebody_who_was_told_of_a_finding_is_told_that_it_is_gone(tmp_path: Path) -> None:
    tell(
        command(tmp_path),
        event("withdrawn", 3.0, fault="no-signal", reason="no-signal held for versions 20 to 38; gone since"),
    )
    assert messages(tmp_path)[0]["text"].endswith("no-signal held for versions 20 to 38; gone since")


def test_a_doctor_that_fails_ends_its_looks_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def diagnose(_: Evidence) -> list[Finding]:
        raise OverflowError("intermediate overflow in fsum")

    monkeypatch.setattr(watch_module, "diagnose", diagnose)
    events, heard = Events(lambda: 0.0, lambda: 0.0), []
    events.subscribe(heard.append)
    watch = DoctorWatch(events, Evidence())
    for version in range(1, 3 * FIRST_STEPS):
        watch(step(float(version), version))
    [warning] = heard
    assert warning.kind == "warned" and warning.fields["source"] == "doctor"
    assert "intermediate overflow" in warning.fields["reason"]


@pytest.mark.parametrize("rest", ["who:secret@localhost", "localhost/a secret"])
def test_a_url_of_the_environment_is_in_no_warning(monkeypatch: pytest.MonkeyPatch, rest: str) -> None:
    monkeypatch.setenv("NIGHT_HOOK", f"http://{rest}")
    [warned] = tell("$NIGHT_HOOK", STALLED)
    assert "InvalidURL" in warned.fields["reason"] and "secret" not in str(warned)
