"""A head that is gone or frozen is told of, once, and nobody waits for calls that do not return."""

from __future__ import annotations

import asyncio
import gc
import queue
import socket
import threading
from types import SimpleNamespace

import pytest

from millrace.runtime.blocking_calls import in_thread
from millrace_ray import ray_runtime

WAIT_S = 30.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    for name, value in ("LOOK_S", 0.01), ("SILENT_S_MAX", 0.05), ("FROZEN_S_MAX", 0.2):
        monkeypatch.setattr(ray_runtime, name, value)


def test_a_head_that_is_gone_is_told_with_its_address(monkeypatch) -> None:
    # The thread that asks may get no core for a while.
    monkeypatch.setattr(ray_runtime, "FROZEN_S_MAX", 600.0)
    messages = queue.Queue[str]()
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    watch = ray_runtime.HeadWatch(address, lambda: None, messages.put)
    connection, _ = listener.accept()
    assert messages.empty(), "it answers"
    connection.close()
    listener.close()
    assert messages.get(timeout=WAIT_S).startswith(
        f"the head of the Ray cluster, {address}, takes no connection"
    )
    watch.close()


def test_a_head_that_takes_connections_and_answers_nothing_is_told() -> None:
    messages = queue.Queue[str]()
    frozen = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        watch = ray_runtime.HeadWatch(address, frozen.wait, messages.put)
        assert messages.get(timeout=WAIT_S).endswith(
            f"{address}, takes connections, but has answered nothing for 0 s"
        )
        frozen.set()
        watch.close()
    assert messages.empty(), "once"


def test_a_controller_that_was_stopped_for_a_while_does_not_take_its_head_for_frozen(monkeypatch) -> None:
    messages, looks = queue.Queue[str](), queue.Queue[float]()
    answers, stopped_s = threading.Event(), 0.0

    def now() -> float:
        looks.put(stopped_s)
        return monotonic() + stopped_s

    monotonic = ray_runtime.time.monotonic
    monkeypatch.setattr(ray_runtime, "FROZEN_S_MAX", 600.0)
    monkeypatch.setattr(ray_runtime, "time", SimpleNamespace(monotonic=now))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        watch = ray_runtime.HeadWatch(f"127.0.0.1:{listener.getsockname()[1]}", answers.wait, messages.put)
        stopped_s = 1000.0
        after = 0
        while after < 3 and messages.empty():
            after += looks.get(timeout=WAIT_S) == stopped_s
        answers.set()
        watch.close()
    assert messages.empty()


def test_a_call_that_returns_or_raises_does_so_and_one_that_hangs_holds_nobody_up() -> None:
    async def use() -> None:
        assert await in_thread(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await in_thread(divmod, 7, 0)
        hanging = in_thread(threading.Event().wait)
        await asyncio.sleep(0)
        assert not hanging.done()

    asyncio.run(use())


def test_what_a_call_raises_when_nobody_waits_any_more_is_not_reported_as_never_retrieved() -> None:
    threads: list[threading.Thread] = []

    def fail() -> None:
        threads.append(threading.current_thread())
        raise ConnectionError("the head is gone")

    async def use() -> None:
        contexts: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))
        await asyncio.wait([in_thread(fail)], timeout=WAIT_S)
        threads[0].join(WAIT_S)
        gc.collect()
        assert not contexts

    asyncio.run(use())
