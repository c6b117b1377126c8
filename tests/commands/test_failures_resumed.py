"""What resuming meets: changed keys, damaged files, an older format. A clear outcome each."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from failure_rows import seen
from tests.long import long
from tests.runs import events, summary, weights

from millrace.cli.app import run
from millrace.core import model_version
from millrace.ledger.checksums import register
from millrace.ledger.opening import Log
from millrace.ledger.sqlite import SqliteLedger
from millrace.run_directory.run_directory import RunDirectory
from millrace.runtime import process

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture
def copy(undisturbed, tmp_path):
    return RunDirectory(shutil.copytree(undisturbed.path, tmp_path / "run"))


def resume(
    start: Path, directory: RunDirectory, *sets: str, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    arguments = [word for override in sets for word in ("--set", override)]
    code = run(["train", str(start), "--run-dir", str(directory.path), "--resume", *arguments])
    return code, capsys.readouterr().err


def test_a_key_that_decides_what_is_learned_cannot_change(start, copy, capsys):
    code, message = resume(start, copy, "optimizer.lr=0.1", "seed=4", capsys=capsys)
    assert code == 2 and "`seed`: 3 -> 4" in message
    seen("resume-changed", message)


def test_a_run_whose_workers_had_another_hash_seed_does_not_go_on(start, copy, monkeypatch, capsys):
    ledger = SqliteLedger(copy.ledger, run={})
    assert ledger.run["hash_seed"] == process.ONE_HASH_SEED["PYTHONHASHSEED"]
    ledger.close()
    monkeypatch.setitem(process.ONE_HASH_SEED, "PYTHONHASHSEED", "7")
    code, message = resume(start, copy, "steps=5", capsys=capsys)
    assert code == 1 and "PYTHONHASHSEED=0" in message and "PYTHONHASHSEED=7" in message


def test_a_run_that_another_process_holds_is_left_alone(start, copy, capsys):
    ledger = SqliteLedger(copy.ledger, run={})
    try:
        code, message = resume(start, copy, "steps=5", capsys=capsys)
    finally:
        ledger.close()
    assert code == 1
    seen("resume-twice", message)


def test_a_link_that_leads_out_of_a_run_is_not_followed(start, copy, tmp_path, capsys):
    copy.checkpoints.rename(tmp_path / "outside")
    copy.checkpoints.symlink_to(tmp_path / "outside")
    before = sorted((tmp_path / "outside").rglob("*"))
    code, message = resume(start, copy, "steps=9", capsys=capsys)
    assert code == 2 and sorted((tmp_path / "outside").rglob("*")) == before
    seen("resume-link", message)


def test_a_copy_made_of_hard_links_is_not_resumed(start, undisturbed, tmp_path, capsys):
    linked = RunDirectory(shutil.copytree(undisturbed.path, tmp_path / "run", copy_function=os.link))
    code, message = resume(start, linked, "steps=9", capsys=capsys)
    assert code == 2
    seen("resume-hard-link", message)


def _truncate(directory: RunDirectory) -> None:
    directory.ledger.write_bytes(directory.ledger.read_bytes()[: directory.ledger.stat().st_size // 2])


def _another_format(directory: RunDirectory) -> None:
    with sqlite3.connect(directory.ledger) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()


def _break_an_event(directory: RunDirectory) -> None:
    lines = directory.events.read_text().splitlines(keepends=True)
    directory.events.write_text("".join([lines[0], "half a li\n", *lines[2:]]))


def _damage_the_checkpoint(directory: RunDirectory) -> None:
    file = directory.checkpoints / "v00000004" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _change_a_row(directory: RunDirectory) -> None:
    data = bytearray(directory.ledger.read_bytes())
    data[data.index(b"replica-")] ^= 1
    directory.ledger.write_bytes(data)


def _forget_steps(directory: RunDirectory) -> None:
    Log(str(directory.ledger)).committed(9)


def _save_a_later_version(directory: RunDirectory) -> None:
    shutil.copytree(directory.checkpoints / "v00000004", directory.checkpoints / "v00000009")


DAMAGES: dict[str, Callable[[RunDirectory], object]] = {
    "ledger-truncated": _truncate,
    "ledger-row-damaged": _change_a_row,
    "ledger-rolled-back": _forget_steps,
    "ledger-older-copy": _save_a_later_version,
    "ledger-other-format": _another_format,
    "ledger-foreign": lambda directory: directory.ledger.write_text("a letter to the editor\n" * 100),
    "events-broken": _break_an_event,
    "config-json-broken": lambda directory: directory.config.write_text('{"steps": 4,'),
    "checkpoint-damaged": _damage_the_checkpoint,
}


@pytest.mark.parametrize("row", DAMAGES)
def test_a_damaged_file_of_the_run_is_told(row, start, copy, capsys):
    DAMAGES[row](copy)
    code, message = resume(start, copy, "steps=5", capsys=capsys)
    assert code == 1, message
    seen(row, message)


def test_other_start_weights_are_refused(start, copy, capsys):
    weights = start.parent / "start" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        code, message = resume(start, copy, "steps=5", capsys=capsys)
    finally:
        weights.write_bytes(whole)
    assert code == 1
    seen("resume-other-content", message)


def test_without_its_newest_checkpoint_a_run_repeats_its_steps_and_ends_with_the_same_weights(
    start, copy, undisturbed, capsys
):
    shutil.rmtree(copy.checkpoints / "v00000004")
    shutil.rmtree(copy.model)  # where it is whole, the run is finished
    code, message = resume(start, copy, "rollout.replicas=1", capsys=capsys)
    assert code == 0, message
    seen("resume-changed-freely", message)
    replayed = [
        json.dumps(e.fields, separators=(",", ":")) for e in events(copy, "step") if e.fields["replayed"]
    ]
    seen("checkpoint-gone", "\n".join(replayed))
    assert len(replayed) == 2
    assert weights(copy) == weights(undisturbed)


@long
@pytest.mark.parametrize("arithmetic", ["the same", "another CPU"])
def test_steps_done_again_are_held_to_the_weights_that_they_made(start, copy, arithmetic, capsys):
    shutil.rmtree(copy.checkpoints / "v00000004")
    shutil.rmtree(copy.model)
    with sqlite3.connect(copy.ledger) as db:
        register(db)
        db.execute("UPDATE published SET digest = 'other' WHERE version = 4")
        if arithmetic != "the same":
            db.execute("UPDATE published SET arithmetic = ? WHERE version = 4", (arithmetic,))
    db.close()
    code, message = resume(start, copy, capsys=capsys)
    if arithmetic == "the same":
        assert code == 1
        seen("resume-replay-differs", message)
    else:
        assert code == 0, message
        (event,) = events(copy, "replay_differs")
        seen("resume-replay-rounded", json.dumps(event.fields))


def test_a_healthy_run_gets_a_clean_bill_from_the_doctor_until_a_replica_served_something_else(copy, capsys):
    assert run(["doctor", str(copy.path)]) == 0
    assert re.search(r"None of \d+ known faults\.", capsys.readouterr().out)
    assert run(["doctor", str(copy.path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["healthy"], report["steps"], report["findings"]) == (True, 4, [])
    with copy.events.open("a") as events:
        events.write(
            '{"kind":"pulled","time_s":1,"wall_s":1,"replica":"replica-0","version":2,"digest":"of nobody",'
            '"pull_s":0.1,"swap_s":0.1}\n'
        )
    assert run(["doctor", str(copy.path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["fault"] == "wrong-weights"


def test_a_run_goes_back_to_an_earlier_version_and_on_from_it(start, copy, capsys):
    """From between two checkpoints, to a model of the same number of steps on another way."""
    before = weights(copy)
    copy.evaluations.write_text('{"version": 4, "reward_mean": 0.5}\n')
    arguments = ["train", str(start), "--run-dir", str(copy.path), "--resume", "--from-version", "1"]
    assert run(arguments) == 0, capsys.readouterr().err
    assert (copy.evaluations.read_text(), model_version.read(copy.model)) == ("", 4)
    (rewound,) = events(copy, "rewound")
    assert rewound.fields == {"version": 1, "trajectories": 48}
    steps = [(event.fields["version"], event.fields["replayed"]) for event in events(copy, "step")]
    assert steps[4:] == [(1, True), (2, False), (3, False), (4, False)]
    result = summary(copy)
    assert (result["steps"], result["ok"]) == (4, True)
    accounting = result["accounting"]
    assert (accounting["trained"], accounting["rejected"], accounting["in_flight"]) == (64, 48, 0)
    assert weights(copy) != before


def test_a_version_that_never_was_is_refused(start, copy, capsys):
    code = run(["train", str(start), "--run-dir", str(copy.path), "--resume", "--from-version", "9"])
    assert code == 1
    assert "it has versions 0 to 4" in capsys.readouterr().err
    assert run(["train", str(start), "--from-version", "1"]) == 2
