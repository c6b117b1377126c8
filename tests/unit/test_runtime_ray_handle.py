"""The controller's side of a worker on Ray keeps its deadlines."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.core.errors import DeadlineExceeded
from millrace_ray.actor import Answer, Inbox, packed
from millrace_ray.places import Node
from millrace_ray.remote_handle import RayHandle


class Ref:
    """A call that has its answer at once. The answer came after an item that is still on its way."""

    def future(self) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(Answer(True, packed(7), {1: 1}))
        return done


@pytest.mark.parametrize("method", ["number", "__ping__"])
def test_the_deadline_of_a_call_holds_while_an_earlier_item_is_on_its_way(method: str) -> None:
    async def run() -> None:
        cluster: Any = SimpleNamespace(actor_errors=(), unavailable=())
        handle = RayHandle("worker", 1, cluster, "namespace", Node("node", "node", "127.0.0.1", {}, {}))
        handle._actor = SimpleNamespace(
            **dict.fromkeys(("call", "ping"), SimpleNamespace(remote=lambda *_: Ref()))
        )
        inbox = handle._inboxes[1] = Inbox()
        async with asyncio.timeout(60):
            with pytest.raises(DeadlineExceeded):
                await handle.call(method, timeout_s=0.05)
            inbox.put("item")
            assert await handle.call(method, timeout_s=60.0) == 7

    asyncio.run(run())
