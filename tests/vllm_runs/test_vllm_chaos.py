"""A run in turns whose replica generates with vLLM is killed at its hand-overs: a short `millrace chaos`."""

from __future__ import annotations

from pathlib import Path

from tests.serving import PYTHON, WITH_VLLM

from millrace_chaos.attack import SUPERVISION
from millrace_chaos.trials import attack

pytestmark = WITH_VLLM

SETTINGS = (
    "rollout.engine=vllm",
    f"rollout.python={PYTHON}",
    "rollout.exact=false",
    "rollout.replicas=1",
    "rollout.colocated=true",
    "steps=8",
)
SEED = 3375
"""Of three attacks by SIGKILL, each just after a worker slept or woke."""


def test_vllms_process_a_trainer_and_a_replica_that_are_killed_at_hand_overs_lose_nothing(
    start: Path, tmp_path: Path
) -> None:
    checks, attacks = attack(start, tmp_path / "run", [*SETTINGS, *SUPERVISION], 3, SEED)
    assert [check for check in checks if not check.holds] == []
    assert [(each.role, each.act) for each in attacks] == [
        (role, "kill") for role in ("engine", "trainer", "replica")
    ]
