"""Processes that share simulations."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import pytest

from millrace_sim.pool import process_pool


def test_an_interrupt_leaves_the_pool_only_between_two_submissions(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[Future[Any]]()

    def submit(self: ProcessPoolExecutor, *_: object) -> Future[Any]:
        os.kill(os.getpid(), signal.SIGINT)
        ended.append(Future())
        return ended[-1]

    monkeypatch.setattr(ProcessPoolExecutor, "submit", submit)
    with pytest.raises(KeyboardInterrupt), process_pool(1) as pool:
        pool.submit(abs, 1)
    assert len(ended) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_pool_goes_on_after_its_ten_thousandth_task() -> None:
    with process_pool(1) as pool:
        assert sum(pool.map(abs, range(10_002), timeout=60)) == 10_001 * 10_002 // 2
