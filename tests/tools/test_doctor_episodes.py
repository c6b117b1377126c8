"""Faults of episodes, planted and absent, as the doctor sees them."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest

from millrace.config.tables.schedules import Synchronous
from millrace.core.fairness import LengthMoments
from millrace.diagnose.evidence import BatchFigures, Evidence, ScoredText, Step
from millrace.diagnose.finding import Finding
from millrace.diagnose.rules import diagnose
from millrace.observe.conversation_times import CAUSES
from millrace_sim.costs.workload import LogNormal
from millrace_sim.explore.worlds import small_config, with_turns
from millrace_sim.simulation import Observer, Scenario, simulate


def steps(num: int = 10, **metrics: float) -> dict[int, Step]:
    """Steps with a healthy gap; the reward rises."""
    batch = BatchFigures(LengthMoments(8, 20.0, 0.0), 0.0, 0, 1.0, 1.0, False)
    return {
        version: Step(version, version / num, {0: (1e-6, 1e-6, 10)}, {"entropy": 1.0}, batch, metrics)
        for version in range(1, num + 1)
    }


def budgets(turns: float = 0.0, tokens: float = 0.0, context: float = 0.0) -> dict[str, float]:
    return {"ended_by_turns": turns, "ended_by_tokens": tokens, "ended_by_context": context}


def texts(num: int, reward: float, **metrics: float) -> list[ScoredText]:
    return [ScoredText(f"row-{i}", reward, "say", f"text {i}", {"turns": 4.0, **metrics}) for i in range(num)]


def found(evidence: Evidence) -> dict[str, Finding]:
    return {finding.fault: finding for finding in diagnose(evidence)}


# ---------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    ("shares", "key"),
    [
        (budgets(turns=0.9, tokens=0.1), "`reward.turns`"),
        (budgets(tokens=1.0), "`sampling.max_tokens`"),
        (budgets(context=0.96), "`rollout.max_sequence_tokens`"),
        (budgets() | {"ended_by_tool_calls": 1.0}, "`reward.tool_calls`"),
        (budgets() | {"ended_by_sampled": 1.0}, "`reward.episode_tokens`"),
        (budgets() | {"ended_by_seconds": 1.0}, "`reward.episode_s`"),
    ],
)
def test_episodes_that_only_budgets_end_name_the_budget(shares: dict[str, float], key: str) -> None:
    finding = found(Evidence(by_version=steps(**shares)))["episodes-cut"]
    assert key in finding.advice[0]
    assert "of the episodes of the last 5 steps were ended by a budget" in finding.evidence[0]


@pytest.mark.parametrize(
    "evidence",
    [
        Evidence(by_version=steps(**budgets(turns=0.8))),
        Evidence(by_version=steps(turns=4.0)),  # a reward of another kind
        Evidence(by_version=steps(3, **budgets(turns=1.0))),
    ],
)
def test_episodes_that_end_in_other_ways_are_no_fault(evidence: Evidence) -> None:
    assert not found(evidence)


# ---------------------------------------------------------------- rewards


def test_a_reward_that_only_cut_episodes_get_is_a_fault() -> None:
    seen = Evidence(by_version=steps(**budgets(turns=0.5)))
    seen.late_texts = texts(20, 1.0, **budgets(turns=1.0))
    seen.unpaid_texts = texts(5, 0.0, **budgets())
    finding = found(seen)["rewarded-cut"]
    assert finding.evidence[0].startswith("each of 20 rewarded episodes was ended by a budget, and 5 that")
    seen.late_texts += texts(1, 1.0, **budgets())
    assert not found(seen)


def test_where_budgets_end_every_episode_that_alone_is_the_answer() -> None:
    seen = Evidence(by_version=steps(**budgets(turns=1.0)))
    seen.late_texts = texts(20, 1.0, **budgets(turns=1.0))
    seen.unpaid_texts = texts(5, 0.0, **budgets())
    assert list(found(seen)) == ["episodes-cut"]


# ---------------------------------------------------------------- turns of no use


@pytest.mark.parametrize("name", ["malformed", "tool_errors"])
def test_turns_that_the_environment_cannot_use_are_a_fault_and_explain_equal_rewards(name: str) -> None:
    seen = Evidence(by_version=steps(**budgets(turns=0.1)))
    for step in seen.by_version.values():
        step.metrics["groups_without_signal"] = 1.0
    seen.unpaid_texts = texts(20, 0.0, **{name: 3.0})
    assert list(found(seen)) == ["broken-turns"]
    assert found(seen)["broken-turns"].evidence == (f"`{name}` counts 75% of the turns of 20 episodes",)


def test_some_broken_turns_are_no_fault() -> None:
    seen = Evidence(by_version=steps(**budgets(turns=0.1)))
    seen.late_texts = texts(20, 1.0, malformed=1.0)
    seen.unpaid_texts = texts(10, 0.0, malformed=4.0)
    assert not found(seen)


# ---------------------------------------------------------------- agents


def of_agents(num: int = 10, **metrics: float) -> Evidence:
    """Episodes of 4 turns, whose agents fork, repeat and are refused as often as `metrics` tell."""
    names = *(f"forks_{cause}" for cause in CAUSES), "retries", "calls_refused"
    return Evidence(by_version=steps(num, turns=4.0, **dict.fromkeys(names, 0.0) | metrics))


@pytest.mark.parametrize(
    ("cause", "advice"),
    [("template", "chat template"), ("history", "messages unchanged"), ("tools", "the same tools")],
)
def test_turns_that_begin_sequences_name_the_cause(cause: str, advice: str) -> None:
    finding = found(of_agents(**{f"forks_{cause}": 1.0}))["forked-turns"]
    line = f"25% of the turns of the last 5 steps begin a sequence: {CAUSES[cause]}"
    assert finding.evidence == (line,) and advice in finding.advice[0]


def test_each_frequent_cause_has_its_advice() -> None:
    finding = found(of_agents(forks_template=1.0, forks_tools=1.0, forks_history=0.5))["forked-turns"]
    assert len(finding.evidence) == len(finding.advice) == 2


@pytest.mark.parametrize(
    "evidence",
    [
        of_agents(forks_template=0.8, forks_history=0.8, forks_tools=0.8),
        of_agents(forks_other=3.0),  # a second agent
        of_agents(3, forks_template=3.0),
        of_agents(retries=0.8, calls_refused=0.5),
        of_agents(3, retries=4.0, calls_refused=4.0),
    ],
)
def test_agents_that_seldom_fork_repeat_or_are_refused_are_no_fault(evidence: Evidence) -> None:
    assert not found(evidence)


def test_an_agent_whose_client_gives_up_too_early_is_told() -> None:
    finding = found(of_agents(retries=2.0))["repeated-calls"]
    assert finding.evidence == ("agents sent 0.5 retries a turn, over the last 5 steps",)
    assert "timeout" in finding.advice[0]


def test_an_agent_that_asks_for_what_the_run_cannot_do_is_told() -> None:
    finding = found(of_agents(calls_refused=1.5))["refused-calls"]
    assert "1.5 requests of each episode of the last 5 steps were refused" in finding.evidence[0]
    assert "`response_format`" in finding.advice[1]


# ---------------------------------------------------------------- time


class Watched(Observer):
    def __init__(self) -> None:
        self.evidence = Evidence(schedule="synchronous")
        self.on_event = self.evidence


@cache
def simulated(tool_s: float) -> Evidence:
    """A synchronous run whose turns take some seconds to write, and `tool_s` to answer."""
    scenario = with_turns(Scenario(small_config(Synchronous(), steps=12)))
    workload = replace(scenario.workload, turns=(3, 4), tool_s=LogNormal(tool_s, 0.1))
    watched = Watched()
    simulate(replace(scenario, workload=workload), watched)
    return watched.evidence


def test_a_run_that_waits_for_its_environment_is_told_so() -> None:
    finding = found(simulated(30.0))["slow-environment"]
    assert "turns waited 30 s each for an answer" in finding.evidence[0]
    assert "`batch.prompts`" in finding.advice[0] and "schedule." not in finding.advice[0]


def test_answers_that_take_as_long_as_turns_are_no_fault() -> None:
    assert "slow-environment" not in found(simulated(0.01))


def test_answers_that_nobody_waits_for_are_no_fault() -> None:
    seen = deepcopy(simulated(30.0))
    for version, step in seen.by_version.items():
        assert step.batch is not None
        busy = replace(step.batch, step_s=1.0, wait_s=0.1)
        seen.by_version[version] = replace(step, batch=busy)
    assert "slow-environment" not in found(seen)
