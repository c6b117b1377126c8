"""One call of a reward, and its deadline."""

import asyncio
import threading

import pytest

from millrace.core.errors import DeadlineExceeded
from millrace.core.types import Failed, Scored
from millrace.environments.calls import Calls


class Reward:
    """Takes `takes_s` of the loop's clock, which it moves on itself."""

    name, file, is_async = "own", None, False

    def __init__(self, takes_s: float, *, needs_thread: bool) -> None:
        self.needs_thread, self.takes_s, self.passed_s = needs_thread, takes_s, 0.0

    def __call__(self, *_: object) -> float:
        self.passed_s += self.takes_s
        return 1.0


def score(reward: Reward, timeout_s: float) -> object:
    async def run() -> object:
        loop = asyncio.get_running_loop()
        now = loop.time
        loop.time = lambda: now() + reward.passed_s  # type: ignore[method-assign]
        return await Calls(reward, timeout_s).score("", None, {})

    return asyncio.run(run())


def test_a_plain_function_that_takes_longer_than_its_deadline_has_no_score() -> None:
    assert score(Reward(1990.0, needs_thread=True), 2000.0) == Scored(1.0)
    with pytest.raises(DeadlineExceeded, match=r"own took longer than `reward.timeout_s` \(2000 s\)"):
        score(Reward(2010.0, needs_thread=True), 2000.0)


def test_a_call_on_the_loop_that_takes_longer_than_its_deadline_fails() -> None:
    assert score(Reward(1990.0, needs_thread=False), 2000.0) == Scored(1.0)
    failed = score(Reward(2010.0, needs_thread=False), 2000.0)
    assert failed == Failed("own took longer than `reward.timeout_s` (2000 s)")


def test_the_end_of_a_call_is_not_waited_for_beyond_its_deadline() -> None:
    ended = threading.Event()
    reward = Reward(0.0, needs_thread=True)
    reward.__class__ = type("Waiting", (Reward,), {"__call__": lambda *_: ended.wait()})

    async def run() -> None:
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(Calls(reward, 0.05).score("", None, {}), timeout=60)
        assert not ended.is_set()
        ended.set()

    asyncio.run(run())
