"""A head that takes no connection is told of, once."""

from __future__ import annotations

import queue
import socket

from millrace.runtime import ray_head

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
