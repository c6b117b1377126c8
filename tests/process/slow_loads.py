"""A replica whose engine takes long for a load, on its thread, and uses no CPU time for it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

from millrace.core.progress import count
from millrace.core.protocols import WeightsReader
from millrace.core.types import Progress, ReplicaLoad, Work
from millrace.rollout import replica
from millrace.rollout.protocol import EngineOptions

COUNT_S = 0.5


class SlowEngine:
    """An engine without weights and without work. Its load counts its progress, unless it `hangs`."""

    has_work = has_finished = False
    computes = "nothing"

    def __init__(self, load_s: float, *, hangs: bool) -> None:
        self.version, self._load_s, self._hangs = -1, load_s, hangs

    def submit(self, works: Iterable[Work]) -> None: ...

    def release(self, trajectory_ids: Iterable[int]) -> list[Progress]:
        return []

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(self.version)

    def stage(self, version: int, reader: WeightsReader) -> tuple[str, str]:
        return f"digest-{version}", f"digest-{version}"

    def swap(self, version: int) -> None:
        for _ in range(int(self._load_s / COUNT_S)):
            time.sleep(COUNT_S)
            if not self._hangs:
                count()
        self.version = version

    def digest(self) -> str:
        return f"digest-{self.version}"


class SlowReplica(replica.EngineReplica):
    def __init__(self, name: str, load_s: float, hangs: bool) -> None:
        engine = SlowEngine(load_s, hangs=hangs)
        options: dict[str, Any] = {"report_interval_s": 0.1, "open_reader": "slow_loads:no_reader"}
        with patch.object(replica, "open_engine", lambda *_: engine):
            super().__init__(
                name, "slow", EngineOptions(model_path="", keep_kv=False, probe=False), **options
            )


def no_reader(endpoint: object) -> None:
    """Its engine reads nothing."""
