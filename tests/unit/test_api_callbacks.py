"""Which records reach a script's functions, and when no more do."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from ledger_records import evaluation_of
from tests.look_runs import write_run

import millrace
from millrace.api.callbacks import Callbacks
from millrace.ledger.sqlite import SqliteLedger


def test_each_step_comes_once_and_in_order_however_slow_the_function_is(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    steps = list[dict[str, Any]]()
    callbacks = Callbacks(run, steps.append, None, 0)
    assert not callbacks.call()  # four steps have come since the last call
    assert not callbacks.call()
    assert [step["version"] for step in steps] == [1, 2, 3, 4]
    assert steps == millrace.Run(run.path).metrics()


def test_steps_of_an_earlier_session_do_not_come_again(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    steps = list[dict[str, Any]]()
    Callbacks(run, steps.append, None, run.metrics.stat().st_size).call()
    assert steps == []


@pytest.mark.parametrize("raises", [False, True])
def test_after_a_stop_or_an_exception_no_further_step_comes(tmp_path: Path, raises: bool) -> None:
    versions = list[int]()

    def on_step(step: dict[str, Any]) -> Any:
        versions.append(step["version"])
        if raises:
            raise ArithmeticError("of the script")
        return millrace.STOP

    callbacks = Callbacks(write_run(tmp_path / "a"), on_step, None, 0)
    assert [callbacks.call(), callbacks.call()] == [True, False]
    assert versions == [1]
    if raises:
        with pytest.raises(ArithmeticError, match="of the script"):
            callbacks.conclude()
    else:
        callbacks.conclude()


def test_evaluations_that_a_rewind_undid_hold_up_no_later_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    with closing(SqliteLedger(run.ledger, run={})) as ledger:
        for version in (2, 3):
            ledger.evaluated(*evaluation_of(version))
        ledger.flush()
    name = evaluation_of(2)[0].name
    versions = list[int]()
    callbacks = Callbacks(run, None, lambda record: versions.append(record["version"]), 0)
    for version in (2, 4):  # 4 was undone, and is not in the ledger
        callbacks.note("evaluated", {"name": name, "version": version})
    callbacks.note("rewound", {"version": 2, "trajectories": 1})
    callbacks.note("evaluated", {"name": name, "version": 3})
    callbacks.call()
    assert versions == [2, 3]


def test_a_run_is_followed_in_an_event_loop(tmp_path: Path) -> None:
    run = millrace.Run(write_run(tmp_path / "a").path)

    async def follow() -> list[int]:
        assert await run is run
        return [step["version"] async for step in run]

    assert asyncio.run(follow()) == [step["version"] for step in run.steps()] == [1, 2, 3, 4]
