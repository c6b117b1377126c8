"""A trainer that takes the digest of one version long after its copy, to be named by dotted path."""

from __future__ import annotations

import time

from millrace.core.types import TrainerState
from millrace.trainer.role import TorchTrainer

LATE_VERSION, LATE_S = 3, 2.0


class LateDigest(TorchTrainer):
    async def load(self, checkpoint: str | None) -> TrainerState:
        state = await super().load(checkpoint)
        publisher = self._publisher
        assert publisher is not None
        honest = publisher._digest

        def late():
            if publisher._begun is not None and publisher._begun[1] == LATE_VERSION:
                time.sleep(LATE_S)
            return honest()

        publisher._digest = late  # type: ignore[method-assign]
        return state
