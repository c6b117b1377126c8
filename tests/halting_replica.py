"""A replica whose engine stands still after some steps, so that what comes next finds it in mid-flight."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from millrace.rollout.replica import EngineReplica

STEPS = 20


def hold(replica: EngineReplica, steps: int = STEPS) -> Callable[[], None]:
    """Let its engine make `steps` steps, then none until the returned function is called. Commands are
    carried out between the steps that do nothing, as between others."""
    engine = replica._engine
    step, done, released = engine.step, 0, False

    def halting_step() -> None:
        nonlocal done
        if released or done < steps:
            done += 1
            step()
        else:
            time.sleep(0.001)

    def go_on() -> None:
        nonlocal released
        released = True

    engine.step = halting_step  # type: ignore[method-assign]
    return go_on


class HaltingReplica(EngineReplica):
    """Never comes further than `STEPS` steps."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        hold(self)
