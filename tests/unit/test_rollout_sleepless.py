"""An engine that cannot sleep says so, and is awake."""

from __future__ import annotations

import pytest

from millrace.core.errors import WorkerError
from millrace.rollout.replica import Sleepless


def test_an_engine_that_cannot_sleep_names_itself_and_the_key() -> None:
    class Restless(Sleepless):
        pass

    Restless().wake()
    with pytest.raises(WorkerError, match=r"Restless cannot sleep: `rollout\.colocated`"):
        Restless().sleep()
