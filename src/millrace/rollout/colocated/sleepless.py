"""An engine that cannot sleep."""

from __future__ import annotations

from millrace.core.errors import WorkerError


class Sleepless:
    """Of an engine without `rollout.colocated` in its settings."""

    def sleep(self) -> None:
        raise WorkerError(f"{type(self).__name__} cannot sleep: `rollout.colocated` needs another engine")

    def wake(self) -> None:
        """It is awake."""
