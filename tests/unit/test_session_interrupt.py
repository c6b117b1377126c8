"""Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from millrace.compose.interrupt import INTERRUPTED, run_stoppable


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_body_ends_in_its_own_time(number: signal.Signals) -> None:
    said: list[str] = []
    ended: list[str] = []

    async def body(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), number)
        await stop.wait()
        ended.append("saved")

    assert run_stoppable(body, said.append, grace_s=60) is False
    assert ended == ["saved"]
    assert len(said) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_loop_is_made_ends_the_body(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_event_loop = asyncio.events.new_event_loop

    def slow_event_loop() -> asyncio.AbstractEventLoop:
        signal.raise_signal(number)
        return new_event_loop()

    async def body(stop: asyncio.Event) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(asyncio.events, "new_event_loop", slow_event_loop)
    assert run_stoppable(body, print, has_work=lambda: False, grace_s=60) is False


def test_a_body_that_ends_by_itself_is_told_apart() -> None:
    async def body(stop: asyncio.Event) -> None:
        await asyncio.sleep(0)

    assert run_stoppable(body, print, grace_s=60) is True


def test_a_body_that_does_not_end_is_cancelled_after_the_grace() -> None:
    cleaned: list[bool] = []

    async def body(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)

    assert run_stoppable(body, lambda text: None, grace_s=0.01) is False
    assert cleaned == [True]


@pytest.mark.parametrize("has_work", [True, False])
def test_a_body_is_cancelled_though_nothing_can_be_said(has_work: bool) -> None:
    def full(text: str) -> None:
        raise OSError("No space left on device")

    async def body(stop: asyncio.Event) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(5)
        went_on.append(True)

    went_on: list[bool] = []
    assert run_stoppable(body, full, has_work=lambda: has_work, grace_s=0.01) is False
    assert not went_on


def test_a_body_without_work_to_finish_is_cancelled_at_once() -> None:
    said: list[str] = []

    async def body(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    assert run_stoppable(body, said.append, has_work=lambda: False, grace_s=60) is False
    assert said == ["Stopping: no step was done yet."]


def test_an_error_of_the_body_is_raised() -> None:
    async def body(stop: asyncio.Event) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_stoppable(body, print, grace_s=60)


def test_the_second_signal_ends_the_process_at_once() -> None:
    program = (
        "import asyncio, os, signal\n"
        "from millrace.compose.interrupt import run_stoppable\n"
        "async def body(stop):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    await stop.wait()\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    await asyncio.sleep(60)\n"
        "run_stoppable(body, lambda text: None, at_once=lambda: print('cursor shown', flush=True),\n"
        "    grace_s=60)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (INTERRUPTED, b"cursor shown\n")
