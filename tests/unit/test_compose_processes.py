"""Every process of a run counts before it starts."""

from __future__ import annotations

import pytest

from millrace.checks import preflight
from millrace.config.schema import Config
from millrace.core.errors import ConfigError


@pytest.mark.parametrize(
    ("tensor", "stepwise", "each"), [(1, True, 1), (1, False, 2), (2, True, 3), (2, False, 4)]
)
def test_preflight_counts_every_process_of_a_replica_with_vllm(
    tensor: int, stepwise: bool, each: int
) -> None:
    rollout = {"engine": "vllm", "replicas": 100, "tensor": tensor, "stepwise": stepwise}
    task, reward = {"kind": "gym", "name": "chain_sum"}, {"kind": "gym"}
    config = Config.model_validate(
        {"model": {"path": "m"}, "task": task, "reward": reward, "rollout": rollout}
    )
    count = 100 * each + config.reward.workers
    with pytest.raises(ConfigError, match=rf"make {count} processes, and this host has 1 cores"):
        preflight._check_processes(config, cores=1)
