"""Agents whose turns vLLM samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runs import events, make_model, summary, train
from tests.turn_runs import make_agent_start
from tests.vllm_runs.test_vllm_runs import VLLM, WITH_VLLM

pytestmark = WITH_VLLM


@pytest.mark.smoke
def test_an_agent_asks_a_replica_of_vllm(tmp_path: Path) -> None:
    config = make_agent_start(tmp_path)
    make_model(tmp_path / "start", 32)
    run = train(config, tmp_path / "run", *VLLM, "rollout.replicas=1", "reward.timeout_s=120")
    accounting = summary(run)["accounting"]
    assert accounting["trained"] == accounting["admitted"] == 64
    for step in events(run, "step"):
        assert all(gap[1] < 0.05 for gap in step.fields["logprob_gap"].values())
