"""Time. The only module of the control plane that may look at a clock.

`now()` is the running loop's own time: seconds on an arbitrary origin, virtual under simulation.
`wall()` is for labels that people read, never for decisions.
"""

from __future__ import annotations

import asyncio
import time


def now() -> float:
    """Seconds on the running loop's clock (virtual when the loop is simulated)."""
    return asyncio.get_running_loop().time()


def wall() -> float:
    """Seconds since the epoch; real time, or the simulated loop's time where it defines `wall`."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return time.time()
    return getattr(loop, "wall", time.time)()
