"""How a run begins and ends around its controller."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from ledger_records import ready_group, step_of

from millrace.config.schema import Config
from millrace.core import clock
from millrace.core.errors import ConfigError, DataError, DeadlineExceeded, LedgerError, StorageError, after
from millrace.core.events import Events
from millrace.episodes.agents.agent_process import DIRECTORY
from millrace.ledger.sqlite import SqliteLedger
from millrace.run import compose
from millrace.run_directory.run_directory import RunDirectory, create

CONFIG = Config.model_validate(
    {"model": {"path": "m"}, "task": {"kind": "gym", "name": "gcd"}, "reward": {"kind": "gym"}}
)


def train(run: RunDirectory, config: Config = CONFIG) -> None:
    asyncio.run(compose.train(config, run, asyncio.Event()))


def test_a_run_that_another_process_holds_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    run = create("held", tmp_path / "run")
    holder = SqliteLedger(run.ledger, run={})
    before = sorted(run.path.iterdir())
    with pytest.raises(LedgerError, match="in use"):
        train(run)
    assert sorted(run.path.iterdir()) == before
    holder.close()


def test_a_way_back_that_was_interrupted_before_its_checkpoints_were_removed_is_told_and_finished(
    tmp_path: Path,
) -> None:
    run, events = create("back", tmp_path / "run"), Events(clock.wall, clock.wall)
    ledger = SqliteLedger(run.ledger, run={})
    for version in (1, 2, 3):
        (run.checkpoints / f"v{version:08d}").mkdir(parents=True)
        group = ready_group(version, version - 1)
        ledger.admit([group])
        ledger.commit_step(step_of(version, group))
    ledger.rewind(1)  # and then its process died
    with pytest.raises(LedgerError, match=r"v00000003 is of step 3.*--from-version` was interrupted"):
        compose._refuse_newer_checkpoints(run, ledger)
    compose._go_back(run, ledger, events, 1)
    compose._refuse_newer_checkpoints(run, ledger)
    assert [path.name for path in run.checkpoints.iterdir()] == ["v00000001"] and ledger.version == 1
    ledger.close()


def test_a_checkpoint_that_cannot_be_removed_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    run, events = create("back", tmp_path / "run"), Events(clock.wall, clock.wall)
    (run.checkpoints / "v00000002").mkdir(parents=True)
    ledger = SqliteLedger(run.ledger, run={})
    monkeypatch.setattr("shutil.rmtree", denied)
    with pytest.raises(
        StorageError, match=r"(?s)v00000002 cannot be written: Permission.*repeat the command"
    ):
        compose._go_back(run, ledger, events, 0)
    ledger.close()


def test_what_ended_a_run_is_told_and_not_what_failed_after_it(tmp_path: Path, monkeypatch) -> None:
    run = create("full", tmp_path / "run")
    run.summary.mkdir()

    def broken(*_: object) -> None:
        raise DataError("the first error")

    monkeypatch.setattr(compose, "_runtime", broken)
    with pytest.raises(DataError, match="the first error") as raised:
        train(run)
    assert any("summary.json cannot be written" in note for note in raised.value.__notes__)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(asyncio.CancelledError(), "interrupted by the user"), (DataError("no rows"), "DataError: no rows")],
)
def test_what_ended_a_run_before_its_controller_began_is_in_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, reason: str
) -> None:
    run = create("early", tmp_path / "run")

    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(compose, "_runtime", broken)
    with pytest.raises(type(error)):
        train(run)
    summary = json.loads(run.summary.read_text())
    assert (summary["ok"], summary["reason"]) == (False, reason)


def test_what_ended_a_run_whose_workers_were_up_is_raised_alone_and_before_what_failed_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stubborn:
        async def close(self) -> None:
            raise DeadlineExceeded("replica-0: alive 10 s after they were killed")

    def broken(*_: object) -> None:
        raise ConfigError("it does not fit")

    run = create("late", tmp_path / "run")
    monkeypatch.setattr(compose, "_local_runtime", lambda *_: Stubborn())
    monkeypatch.setattr(compose, "fleet", broken)
    with pytest.raises(ConfigError, match="it does not fit") as raised:
        train(run)
    assert any("alive 10 s" in note for note in raised.value.__notes__)
    assert json.loads(run.summary.read_text())["reason"] == "ConfigError: it does not fit"


@pytest.mark.parametrize("error", [None, ValueError("broken")])
def test_no_directory_of_an_agent_outlives_the_workers(
    error: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create("agents", tmp_path / "run")
    left = run.path / DIRECTORY / "agent-7"

    class Runtime:
        async def close(self) -> None:
            left.mkdir(parents=True)

    monkeypatch.setattr(compose, "_local_runtime", lambda *_: Runtime())

    async def runs() -> None:
        async with compose._runtime(CONFIG, run):
            if error is not None:
                raise error

    with nullcontext() if error is None else pytest.raises(ValueError, match="broken"):
        asyncio.run(runs())
    assert not left.parent.exists()


def test_a_directory_of_weights_is_one_run_s_for_ever_and_another_run_begins_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()

    def took(config: Config, run: RunDirectory, owner: str) -> None:
        (weights / "owner").write_text(owner)
        raise DataError("it has begun")

    monkeypatch.setattr(compose, "fleet", took)
    config = Config.model_validate(CONFIG.model_dump() | {"weights": {"directory": f"file://{weights}"}})
    run, other = (create(name, tmp_path / name) for name in ("run", "other"))
    with pytest.raises(DataError, match="begun"):
        train(run, config)
    with pytest.raises(ConfigError, match=r"belongs to the run `run-\w+`, and this is `other-\w+`"):
        train(other, config)
    moved = RunDirectory(run.path.rename(tmp_path / "moved"))
    with pytest.raises(DataError, match="begun"):
        train(moved, config)


def test_a_failure_after_nothing_is_raised() -> None:
    with pytest.raises(StorageError), after(None):
        raise StorageError("full")
