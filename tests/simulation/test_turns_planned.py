"""Configurations with an environment: simulated, planned, and learned from a run."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from millrace.cli.app import run as millrace
from millrace.config.load import load_as
from millrace.config.tables.schedules import AReaL
from millrace.config.tables.task import EnvironmentRewardSection
from millrace.core.errors import ConfigError
from millrace_sim.calibrate.learn import learn
from millrace_sim.calibrate.observed import ObservedTurns
from millrace_sim.config import PlanConfig, SimulatedConfig
from millrace_sim.costs.interface import Costs
from millrace_sim.costs.workload import LogNormal, Workload
from millrace_sim.explore.worlds import small_config
from millrace_sim.plan.ranking import demand_of
from millrace_sim.setup import check_memory, run_config
from millrace_sim.simulation import Scenario, simulate
from tests.long import long

TINY = """
steps = 6
[batch]
prompts = 4
group_size = 2
[cluster]
model = "Qwen2.5-7B"
trainer_devices = 8
replicas = 2
slots = 8
[lengths]
median = 100
p99 = 400
[workload]
prompt_tokens = [64, 128]
max_tokens = 512
"""


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(TINY + "\n".join(lines))
    return path


@long
def test_a_simulation_with_turns_says_who_waits(tmp_path, capsys) -> None:
    path = written(tmp_path, "turns = [2, 4]", "tool_s = [5.0, 50.0]")
    page = tmp_path / "page.html"
    assert millrace(["simulate", str(path), "--html", str(page)]) == 0
    assert "Waiting: episodes" in " ".join(capsys.readouterr().out.split())
    assert "waiting for answers" in page.read_text()
    assert millrace(["simulate", str(path), "--json"]) == 0
    ((run,),) = (one["runs"] for one in json.loads(capsys.readouterr().out).values())
    assert 0.5 < run["episode_waits"] < 1.0 and run["answer_s"] > 5.0


def test_without_an_environment_no_answer_is_told(tmp_path, capsys) -> None:
    assert millrace(["simulate", str(written(tmp_path))]) == 0
    assert "environment" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("turns = [3, 2]", "fewest and most turns"),
        ("turns = [0, 2]", "fewest and most turns"),
        ("tool_s = [10.0, 1.0]", "a median above 0, and a larger p99"),
        ('turns = [2, 4]\n[lengths]\nkind = "turns"', "use one of the two"),
    ],
)
def test_a_wrong_number_is_one_clear_error(tmp_path, line: str, message: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(TINY.replace("[lengths]\nmedian = 100\np99 = 400\n", "") + line)
    with pytest.raises(ConfigError, match=message):
        load_as(SimulatedConfig, path, [])


def test_a_whole_episode_must_fit_into_a_replica(tmp_path) -> None:
    config = load_as(SimulatedConfig, written(tmp_path, "turns = [2, 4]", "observation_tokens = 100"), [])
    run = run_config(config, 1)
    assert run.rollout.max_sequence_tokens == 128 + 4 * 512 + 3 * 100
    assert isinstance(run.reward, EnvironmentRewardSection) and run.sampling.max_tokens == 512
    large = load_as(SimulatedConfig, written(tmp_path, "turns = [2, 4000]"), [])
    with pytest.raises(ConfigError, match="KV room"):
        check_memory(large)


def test_a_plan_counts_every_turn_and_every_answer() -> None:
    tree = {
        "model": "Qwen2.5-7B",
        "devices": {"H100": 8},
        "lengths": {"kind": "lognormal", "median": 100, "p99": 100},
    }
    workload = {"prompt_tokens": (50, 50), "max_tokens": 500, "turns": (2, 4), "observation_tokens": 10}
    demand = demand_of(PlanConfig.model_validate(tree | {"workload": workload}))
    assert demand.completion_tokens == pytest.approx(3 * 100 + 2 * 10)
    assert demand.longest == 50 + 4 * 500 + 3 * 10


def test_turns_come_back_as_they_were() -> None:
    reward = EnvironmentRewardSection(path="simulated:Environment", workers=2, timeout_s=600.0)
    config = small_config(AReaL(eta=2), steps=14, replicas=2).model_copy(update={"reward": reward})
    true = Workload(
        completion=LogNormal(20.0, 0.3), turns=(2, 4), observation_tokens=6, tool_s=LogNormal(3.0, 0.5)
    )
    costs = Costs(train_per_token_s=0.001)
    events = simulate(Scenario(config, costs=costs, workload=true)).events
    lengths = {e.fields["trajectory_id"]: e.fields["tokens"] for e in events if e.kind == "finished"}
    ordered = [lengths.get(i, 0) for i in range(max(lengths) + 1)]
    learned = learn(events, config, lengths=ordered, prompts=list(range(8, 25))).workload
    assert (learned.turns, learned.observation_tokens) == ((2, 4), 6)
    for name, mean in ("completion", 20.9), ("tool_s", 3.4):
        drawn = fmean(getattr(learned, name).draw(0, i) for i in range(2000))
        assert drawn == pytest.approx(mean, rel=0.15), name
    one_turn = [event for event in events if event.kind != "observed"]
    assert ObservedTurns.of(one_turn) is None
