from __future__ import annotations

import asyncio

from millrace.controller.patience import FLOOR_S, Patience


class Prompt:
    """A handle that answers at once, and remembers how long it might have taken."""

    name, epoch = "trainer", 1

    def __init__(self) -> None:
        self.given_s: list[float] = []

    async def call(self, method: str, *args: object, timeout_s: float) -> None:
        self.given_s.append(timeout_s)


def test_a_step_that_may_wait_for_a_checkpoint_has_all_of_the_limit_and_tells_nothing_of_others():
    handle, patience = Prompt(), Patience(600.0)

    async def main() -> None:
        for waits in (True, False, False, True):
            await patience.call(handle, "step", waits=waits)  # type: ignore[arg-type]

    asyncio.run(main())
    assert handle.given_s == [600.0, 600.0, FLOOR_S, 600.0]


def test_a_step_has_the_deadline_of_the_digest_that_it_waits_for_beside_its_own():
    handle, patience = Prompt(), Patience(600.0)

    async def main() -> None:
        for also_s in (0.0, 5.0, 700.0):
            await patience.call(handle, "step", also_s=also_s)  # type: ignore[arg-type]

    asyncio.run(main())
    assert handle.given_s == [600.0, FLOOR_S + 5.0, 600.0]
