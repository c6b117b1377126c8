"""Ranks in processes of their own, for tests: forked out of one that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

DEADLINE_S = 900.0  # pytest's own is shorter


def together(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work(rank, rendezvous, *args)` returns in each of `world` processes, in order of ranks.

    Raises: AssertionError: a rank raised, died, or was not ready in time. None of them is left.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.ranks.work"])
    with tempfile.TemporaryDirectory() as directory:
        started = [_start(context, work, rank, f"file://{directory}/store", args) for rank in range(world)]
        until = time.monotonic() + DEADLINE_S
        try:
            return [_result(rank, mine, until) for rank, (_, mine) in enumerate(started)]
        finally:
            for process, mine in started:
                process.kill()
                process.join()
                mine.close()


def _start(context: Any, work: Any, rank: int, rendezvous: str, args: Any) -> tuple[Any, Connection]:
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, work, rank, rendezvous, *args))
    process.start()
    theirs.close()
    return process, mine


def _result(rank: int, mine: Connection, until: float) -> Any:
    assert mine.poll(max(0.0, until - time.monotonic())), f"rank {rank} is not ready in time"
    try:
        error, value = mine.recv()
    except EOFError:
        error, value = "it died", None
    assert error is None, f"rank {rank}: {error}"
    return value


def _run(theirs: Connection, work: Any, rank: int, rendezvous: str, *args: Any) -> None:
    import torch

    torch.set_num_threads(1)  # the ranks share the cores: more threads would wait for each other
    try:
        answer = None, work(rank, rendezvous, *args)
    except BaseException:
        answer = traceback.format_exc(), None
    theirs.send(answer)
    os._exit(0)  # gloo and FSDP2 abort at the interpreter's own exit, now and then
