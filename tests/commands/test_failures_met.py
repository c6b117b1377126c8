"""What goes wrong while a run goes on: each is counted, skipped, or one message; the run never hangs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from failure_rows import seen
from tests.long import long
from tests.runs import summary

from millrace.cli.app import run
from millrace.config.load import load
from millrace.controller.supervisor import WorkerSpec
from millrace.core.errors import LedgerError, WorkerError
from millrace.core.placement import Host
from millrace.ledger.reading import LedgerReader
from millrace.observe.sinks.jsonl import read_events
from millrace.run import compose
from millrace.run_directory import run_directory
from millrace.runtime import process

SECRET = "correct-horse-battery-staple"

REWARD = """
import os, re, time
from pathlib import Path


def once(name):
    mark = Path(__file__).with_name(name)
    first = not mark.exists()
    mark.touch()
    return first


def reward(completion, answer):
    if answer == "raise":
        raise ValueError("bad luck")
    if answer == "hang" and once("hung"):
        time.sleep(60)
    if answer == "hold" and once("held"):
        re.match("(a+)+$", "a" * 60 + "b")
    if answer == "exit":
        os._exit(3)
    if answer == "allocate":
        bytearray(100 << 30)
    if answer == "fork" and os.fork() == 0:
        time.sleep(1000)
    if answer == "print":
        print("printed by the reward:", dict(os.environ), flush=True)
    returned = {"nan": float("nan"), "infinite": float("inf"), "text": "0.5", "many": [1.0, 0.0]}
    return returned.get(answer, float(len(completion)))
"""
KINDS = ("raise", "hang", "hold", "exit", "allocate", "fork", "print", "nan", "infinite", "text", "many")
GOOD = [{"prompt": f"{letter}>", "answer": letter} for letter in "abcdef"]
BROKEN = [
    "{",
    '{"prompt": "", "answer": "x"}',
    *(json.dumps({"prompt": text, "answer": "x"}) for text in ("long " * 20, "long " * 2**19)),
]


pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def hostile(start, warm, tmp_path_factory):
    """One run over every kind of bad row and bad reward, and the sockets it was seen listening on."""
    project = tmp_path_factory.mktemp("hostile")
    (project / "score.py").write_text(REWARD)
    rows = [json.dumps({"prompt": f"{kind}>", "answer": kind}) for kind in KINDS]
    rows += [json.dumps(row) for row in [*GOOD, GOOD[0]]] + BROKEN
    (project / "rows.jsonl").write_text("\n".join(rows) + "\n")
    config = load(
        start,
        [
            "task={kind='file', path='%s'}" % (project / "rows.jsonl"),
            "reward={kind='function', path='%s:reward', timeout_s=1.0, memory_mb=256}"
            % (project / "score.py"),
            "steps=5",
            "checkpoints.every=100",
            "supervision.restarts=100",
            "supervision.backoff_s=0.01",
        ],
    )
    directory = run_directory.create("hostile", project / "run")
    pids: list[int] = [os.getpid()]
    listening: set[str] = set()

    def watch(event):
        if event.kind == "worker_started":
            pids.append(event.fields["pid"])
        if event.kind == "step":
            listening.update(process.listening(pids))

    os.environ["MILLRACE_TEST_TOKEN"] = SECRET
    try:
        asyncio.run(compose.train(config, directory, asyncio.Event(), watch))
    finally:
        del os.environ["MILLRACE_TEST_TOKEN"]
    return directory, listening


def test_a_run_directory_that_moves_ends_the_run(start, tmp_path):
    directory = run_directory.create("moved", tmp_path / "run")

    def move(event):
        if event.kind == "step" and event.fields["version"] == 1:
            directory.path.rename(tmp_path / "elsewhere")

    with pytest.raises(LedgerError) as raised:
        asyncio.run(compose.train(load(start, ["steps=50"]), directory, asyncio.Event(), move))
    seen("dir-moved", str(raised.value))


def open_files(pid: int) -> list[str]:
    links = []
    for entry in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed meanwhile
            links.append(os.readlink(entry))
    return links


BROKEN_REWARDS = (
    "raises",
    "nan",
    "infinite",
    "text",
    "many",
    "hangs",
    "holds",
    "exits",
    "allocates",
)


@long
@pytest.mark.parametrize("row", [f"reward-{how}" for how in BROKEN_REWARDS])
def test_a_reward_that_breaks_its_contract_fails_its_trajectory_and_says_why(hostile, row):
    with LedgerReader(hostile[0].ledger) as reader:
        seen(row, "\n".join(reason for state, reason in reader.reasons() if state == "failed"))


BROKEN_ROWS = ("data-broken-row", "data-empty-prompt", "data-prompt-of-megabytes", "data-prompt-too-long")


@pytest.mark.parametrize("row", BROKEN_ROWS)
def test_a_row_that_cannot_be_a_prompt_is_skipped_with_its_line(hostile, row):
    seen(row, "\n".join(line for line in hostile[0].events.read_text().splitlines() if "skipped" in line))
    assert summary(hostile[0])["skipped"] >= len(BROKEN)


def test_rows_that_are_there_twice_are_both_used(hostile):
    with LedgerReader(hostile[0].ledger) as reader:
        groups = [reader.group(i) for i in range(20) if i not in {s.group_id for s in reader.skipped()}]
    twice = sorted(group.row_id for group in groups if group.text == "a>")
    seen("data-duplicates", " ".join(twice))


def test_processes_that_a_reward_starts_end_with_the_run(hostile):
    seen("reward-forks", "\n".join(e for e in hostile[0].events.read_text().splitlines() if "run_ended" in e))
    accounting = summary(hostile[0])["accounting"]
    ended = sum(accounting[name] for name in ("trained", "failed", "rejected", "stale", "abandoned"))
    assert accounting["admitted"] == ended + accounting["in_flight"]
    others = [int(pid.name) for pid in Path("/proc").glob("[0-9]*") if int(pid.name) != os.getpid()]
    assert not [pid for pid in others if any(str(hostile[0].path) in link for link in open_files(pid))]


def test_what_a_reward_prints_is_in_its_workers_log_alone_which_is_private(hostile):
    directory = hostile[0]
    logs = list(directory.logs.glob("reward-worker-0.*.log"))
    seen("reward-prints", "\n".join(log.read_text() for log in logs))
    paths = [
        path for path in directory.path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
    assert paths and set(paths) <= set(logs)


def test_a_run_directory_is_its_owners_alone(hostile):
    for path in [hostile[0].path, *hostile[0].path.rglob("*")]:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_a_live_run_has_no_socket_that_listens(hostile):
    assert hostile[1] == set()


def test_a_socket_that_listens_would_have_been_found(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        port = server.getsockname()[1]
        local.bind(str(tmp_path / "socket"))
        local.listen()
        assert process.listening([os.getpid()]) == {f"tcp port {port}", f"unix {tmp_path / 'socket'}"}


# ---------------------------------------------------------------- runs that end with a message


def trained(start: Path, directory: Path, *sets: str, capsys) -> str:
    """What a run that must fail tells."""
    arguments = [word for override in sets for word in ("--set", override)]
    assert run(["train", str(start), "--run-dir", str(directory), *arguments]) == 1
    return str(capsys.readouterr().err)


def test_a_host_whose_memory_is_too_small_is_told(start, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compose, "read_host", lambda: Host("small", 2, 100_000, 100_000))
    assert run(["train", str(start), "--run-dir", str(tmp_path / "run")]) == 2
    seen("memory-too-small", capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


STARVED = {
    "memory-trainer": ("trainer", "starved_roles:StarvedTrainer"),
    "memory-replica": ("replicas", "starved_roles:StarvedReplica"),
}


@long
@pytest.mark.parametrize("row", STARVED)
def test_a_role_that_runs_out_of_memory_says_so_and_loses_nothing(row, start, tmp_path, monkeypatch, capsys):
    role, target = STARVED[row]
    honest = compose.fleet

    def starved(*run):
        fleet = honest(*run)
        specs = getattr(fleet, role)
        one = isinstance(specs, WorkerSpec)
        swapped = replace(specs, target=target) if one else tuple(replace(s, target=target) for s in specs)
        return replace(fleet, **{role: swapped})

    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    directory = run_directory.RunDirectory(tmp_path / "run")
    budget = ("supervision.restarts=1", "supervision.backoff_s=0.0")
    sets = (*budget, "checkpoints.every=1", "rollout.replicas=1")
    with monkeypatch.context() as patch:
        patch.setattr(compose, "fleet", starved)
        seen(row, trained(start, directory.path, *sets, capsys=capsys))
    died = [event.fields["role"] for event in read_events(directory.events) if event.kind == "worker_died"]
    assert died == 2 * [role.removesuffix("s")], "the budget is one restart"
    assert run(["train", str(start), "--run-dir", str(directory.path), "--resume"]) == 0
    accounting = summary(directory)["accounting"]
    assert accounting["trained"] == accounting["admitted"] == 64


def test_a_reward_that_always_fails_ends_the_run(start, tmp_path, capsys):
    later = "n = []\ndef reward(completion):\n    n.append(1)\n    assert len(n) < 2\n    return 0\n"
    (tmp_path / "score.py").write_text(later)  # one that fails from the first call on is found before the run
    sets = ("reward.kind=function", f"reward.path={tmp_path / 'score.py'}:reward")
    seen("reward-always-fails", trained(start, tmp_path / "run", *sets, capsys=capsys))


def test_a_worker_that_dies_again_and_again_ends_the_run(start, tmp_path):
    def kill(event):
        if event.kind == "worker_started" and event.fields["role"] == "trainer":
            os.kill(event.fields["pid"], 9)

    directory = run_directory.create("run", tmp_path / "run")
    config = load(start, ["supervision.restarts=1", "supervision.backoff_s=0.0"])
    with pytest.raises(WorkerError) as raised:
        asyncio.run(compose.train(config, directory, asyncio.Event(), kill))
    seen("worker-dies-again", str(raised.value))


# ---------------------------------------------------------------- disks


def on_a_disk(tmp_path: Path, options: str, script: str) -> str:
    """Run a shell script in a mount namespace of its own, with a small disk at $DISK."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o {options} tmpfs {disk} || exit 77\n"
    environment = os.environ | {"DISK": str(disk), "MILLRACE": f"{sys.executable} -m millrace"}
    try:
        done = subprocess.run(
            ["unshare", "-rm", "sh", "-c", mount + script],
            env=environment, capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("mounting is not allowed here")
    return done.stdout + done.stderr


@long
def test_a_read_only_disk_is_told(start, tmp_path):
    seen("dir-read-only", on_a_disk(tmp_path, "ro,size=8m", f"$MILLRACE train {start} --run-dir $DISK/run"))


FILLED = """
go() { $MILLRACE train $CONFIG --run-dir $DISK/run --set checkpoints.every=10 "$@" >/dev/null 2>$DISK.log; }
steps() { cat $DISK/run/metrics.jsonl 2>/dev/null | wc -l; }
go --set steps=500 &
while [ $(steps) -lt 3 ]; do sleep 0.1; done
dd if=/dev/zero of=$DISK/filler bs=64k 2>/dev/null
wait $!
echo "code $?"; tail -n 12 $DISK.log
rm $DISK/filler
go --set steps=$(($(steps) + 6)) --resume
echo "resumed $?"
"""


@long
def test_a_disk_that_fills_up_ends_the_run_and_after_freeing_some_it_goes_on(start, tmp_path):
    text = on_a_disk(tmp_path, "size=8m", f"CONFIG={start}\n{FILLED}")
    assert "code 1" in text and "resumed 0" in text, text
    seen("disk-fills-up", text.lower())
