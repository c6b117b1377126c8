"""Compiled programs: how many, and for how long."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """The programs that this process has compiled or read from a cache since the object was made."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_s: float, **_: Any) -> None:
        if event == _EVENT:
            self.count, self.seconds = self.count + 1, self.seconds + duration_s

    def since(self, count: int, seconds: float) -> dict[str, float]:
        """Metrics of the time since `count` and `seconds` were read."""
        return {"compilations": float(self.count - count), "compile_s": self.seconds - seconds}


@cache
def compilations() -> Compilations:
    """Those of this process. JAX keeps every listener, so there is one."""
    return Compilations()
