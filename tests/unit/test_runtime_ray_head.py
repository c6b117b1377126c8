"""A head that takes no connection is told of, once, and nobody waits for calls that do not return."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading

import pytest

from millrace.runtime import ray_head
from millrace.runtime.ray_aside import aside

WAIT_S = 30.0


def test_a_head_that_is_gone_is_told_with_its_address(monkeypatch) -> None:
    monkeypatch.setattr(ray_head, "LOOK_S", 0.01)
    told = queue.Queue[str]()
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    watch = ray_head.HeadWatch(address, told.put, silent_s_max=0.05)
    connection, _ = listener.accept()
    assert told.empty(), "it answers"
    connection.close()
    listener.close()
    assert told.get(timeout=WAIT_S).startswith(f"the head of the Ray cluster, {address}, takes no connection")
    watch.close()


def test_a_call_that_returns_or_raises_does_so_and_one_that_hangs_holds_nobody_up() -> None:
    async def use() -> None:
        assert await aside(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await aside(divmod, 7, 0)
        hanging = aside(threading.Event().wait)
        await asyncio.sleep(0)
        assert not hanging.done()

    asyncio.run(use())
