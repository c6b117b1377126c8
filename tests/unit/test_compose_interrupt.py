"""Signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from tests.long import covering, few

from millrace.run.interrupt import INTERRUPTED, run_stoppable
from millrace.runtime.process import DUMP_STACKS, ENDING


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
        "from millrace.run.interrupt import run_stoppable\n"
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


def sends(*numbers: int) -> str:
    """A program that sends itself these signals, one after another, and says when it has saved."""
    return (
        "import asyncio, os, signal, sys\n"
        "from millrace.run.interrupt import run_stoppable\n"
        "async def body(stop):\n"
        f"    for number in {[int(number) for number in numbers]}:\n"
        "        os.kill(os.getpid(), number)\n"
        "        await asyncio.sleep(0.01)\n"
        "    await stop.wait()\n"
        "    print('saved', flush=True)\n"
        "sys.exit(9 if run_stoppable(body, lambda text: None, grace_s=60) else 3)\n"
    )


def ended(program: str, **how: Any) -> tuple[int, bytes]:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=60, check=False, **how
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "number",
    few(
        [
            *(signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2, signal.SIGXCPU, signal.SIGRTMAX, signal.SIGALRM),
            *(signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO, signal.SIGPWR, signal.SIGSTKFLT),
            signal.SIGRTMIN,
        ],
        5,
    ),
)
def test_every_signal_that_ends_a_process_asks_first(number: int) -> None:
    assert number in ENDING
    assert ended(sends(number)) == (3, b"saved\n")


def test_no_signal_that_could_end_a_run_is_forgotten() -> None:
    """What the kernel ends a process by: every other signal is ignored, stops a process, or says that the
    process itself is broken."""
    harmless = {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH}
    stops = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
    broken = {signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV}
    ignored = {signal.SIGPIPE, signal.SIGXFSZ}
    assert all(signal.getsignal(number) == signal.SIG_IGN for number in ignored)
    left = signal.valid_signals() - harmless - stops - broken - ignored - {*ENDING}
    assert left == {signal.SIGKILL, signal.SIGSYS, DUMP_STACKS}


@pytest.mark.parametrize(
    ("first", "second"),
    covering([signal.SIGTERM, signal.SIGHUP, signal.SIGINT], [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2]),
)
def test_a_program_that_sends_two_signals_means_one_end(first: int, second: int) -> None:
    assert ended(sends(first, second, second)) == (3, b"saved\n")


def test_ctrl_c_after_another_signal_ends_the_process_at_once() -> None:
    assert ended(sends(signal.SIGTERM, signal.SIGINT)) == (INTERRUPTED, b"")


def test_nohup_is_obeyed() -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    program = sends(signal.SIGHUP).replace("await stop.wait()", "assert not stop.is_set()")
    assert ended(program, preexec_fn=ignore) == (9, b"saved\n")


def test_a_signal_after_the_caller_has_asked_is_the_first_signal() -> None:
    program = sends(signal.SIGINT).replace(
        "async def body(stop):\n", "async def body(stop):\n    stop.set()\n"
    )
    assert ended(program) == (3, b"saved\n")


def test_handlers_are_as_before_when_the_body_has_ended() -> None:
    def own(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:

        async def body(stop: asyncio.Event) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            await stop.wait()

        assert run_stoppable(body, lambda text: None, grace_s=60) is False
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGINT])
def test_a_command_is_interrupted_once_by_programs_and_again_by_a_person(number: int) -> None:
    program = (
        "import os, signal\n"
        "from millrace.runtime.process import interrupt_on_signals\n"
        "interrupt_on_signals()\n"
        "for _ in range(3):\n"
        "    try:\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted')\n"
    )
    times = 3 if number == signal.SIGINT else 1
    assert ended(program) == (0, b"interrupted\n" * times)
