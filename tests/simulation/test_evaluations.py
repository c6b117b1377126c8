"""Evaluations beside training, in virtual time: pinned, recorded once, never trained, and in nobody's way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millrace.config.tables.evaluations import EvaluationSection
from millrace.config.tables.operation import Supervision
from millrace.config.tables.schedules import Laminar, Schedule, Synchronous
from millrace.controller.evaluation.evaluation_state import Evaluations
from millrace.controller.evaluation.evaluator_session import EvaluatorSession
from millrace.controller.reward_pool import RewardPool
from millrace.core.completion.marked import unmarked
from millrace.core.errors import ConfigError, MillraceError, RemoteError, WorkerDied
from millrace.core.events import Event
from millrace.core.types import EvaluationAttempt, EvaluationRecord
from millrace.ledger.evaluation_records import load_attempts
from millrace.ledger.sqlite import SqliteLedger
from millrace.runtime.seam import crossing
from millrace_sim.costs.interface import Costs
from millrace_sim.costs.workload import LogNormal, Workload
from millrace_sim.explore.invariants import Invariants
from millrace_sim.explore.worlds import random_world, small_config, with_turns
from millrace_sim.roles.world import World
from millrace_sim.simulation import Outcome, Scenario, simulate
from millrace_sim.virtual.faults import Corruption, Crash, Failures, Faults
from millrace_sim.virtual.workers import SimulatedWorker
from tests.long import long


class Watched(Invariants):
    """All that must hold, and what the ledger has of evaluations at the end."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.records: list[EvaluationRecord] = []
        self.attempts: dict[tuple[str, int], list[EvaluationAttempt]] = {}

    def on_end(self, ledger: SqliteLedger, world: World) -> None:
        if ledger.version == self._config.steps:
            super().on_end(ledger, world)
        self.records = ledger.evaluations()
        for one in self.records:
            self.attempts[one.name, one.version] = load_attempts(ledger._db, one.name, one.version)

    def of(self, name: str) -> dict[int, str]:
        """Version -> why it was skipped; empty: it was done."""
        return {one.version: one.reason for one in self.records if one.name == name}


def evaluation(**keys: Any) -> EvaluationSection:
    return EvaluationSection(**{"name": "held-out", "every": 2, "prompts": 3, "samples": 2} | keys)


def run(
    *sections: EvaluationSection,
    schedule: Schedule | None = None,
    faults: Faults = Faults(),
    costs: Costs = Costs(),
    workload: Workload = Workload(),
    steps: int = 8,
    **changes: Any,
) -> tuple[Watched, Outcome]:
    config = small_config(schedule or Laminar(), steps=steps, **changes)
    config = config.model_copy(update={"evaluations": sections})
    scenario = Scenario(config, faults=faults, costs=costs, workload=workload)
    watched = Watched(scenario)
    return watched, simulate(scenario, watched)


@pytest.mark.parametrize("schedule", [Synchronous(), Laminar()], ids=repr)
def test_every_due_version_is_evaluated_once_or_told_as_skipped(schedule: Schedule) -> None:
    watched, outcome = run(evaluation(), schedule=schedule)
    assert list(watched.of("held-out")) == [0, 2, 4, 6, 8]
    assert watched.of("held-out")[8] == ""  # the last one is waited for
    versions = [
        (one["name"], one["version"])
        for kind in ("evaluated", "evaluation_skipped")
        for one in outcome.of(kind)
    ]
    assert sorted(versions) == sorted((one.name, one.version) for one in watched.records)


def test_nothing_that_is_evaluated_is_trained_or_in_the_accounts() -> None:
    plain, without = run(evaluation(), steps=6)[1], run(steps=6)[1]
    assert plain.accounting.admitted == without.accounting.admitted
    assert plain.accounting.trained == plain.accounting.admitted


def test_a_version_that_is_done_has_all_of_its_attempts() -> None:
    watched, _ = run(evaluation(samples=3), steps=2)
    attempts = watched.attempts["held-out", 2]
    assert [(one.prompt_index, one.attempt) for one in attempts] == [
        (i, j) for i in range(3) for j in range(4)
    ]
    assert all(one.reward in (0.0, 1.0) for one in attempts)


def test_figures_come_with_intervals() -> None:
    watched, _ = run(evaluation(), steps=2)
    metrics = watched.records[-1].metrics
    for name in ("greedy_accuracy", "sampled_accuracy"):
        low, high = metrics["intervals"][name]
        assert 0 <= low <= metrics[name] <= high <= 1
    assert set(metrics["pass_at_k"]) == set(metrics["majority_at_k"]) == {"1", "2"}


def test_a_reward_that_fails_is_counted_and_is_no_zero() -> None:
    watched, _ = run(evaluation(), steps=2, workload=Workload(failed_fraction=0.3))
    attempts = [one for each in watched.attempts.values() for one in each]
    assert any(one.reward is None and one.reason for one in attempts)
    assert watched.records[-1].metrics["num_unscored"] == sum(
        one.reward is None for one in watched.attempts["held-out", 2]
    )


def test_an_evaluator_that_dies_again_and_again_goes_on_from_its_tokens() -> None:
    faults = Faults(crashes=tuple(Crash("evaluator", 0.9 * i) for i in range(1, 12)))
    watched, outcome = run(evaluation(prompts=4), faults=faults)
    assert outcome.restarts >= 5
    assert list(watched.of("held-out")) == [0, 2, 4, 6, 8]
    assert watched.of("held-out")[8] == ""
    assert all(
        len(watched.attempts["held-out", v]) == 12 for v, why in watched.of("held-out").items() if not why
    )


def test_a_controller_that_dies_again_and_again_evaluates_no_version_twice() -> None:
    faults = Faults(controller_crashes=tuple(1.5 * i for i in range(1, 8)))
    watched, outcome = run(evaluation(), evaluation(name="other", every=3), faults=faults)
    assert outcome.resumes == 7
    for name, every in (("held-out", 2), ("other", 3)):
        all_dealt_with(watched, name, every, 8)


def test_relays_and_trainers_that_die_lose_no_evaluation_of_the_last_version() -> None:
    crashes = [Crash("relay", 1.1 * i) for i in range(1, 8)] + [
        Crash("trainer", 2.3 * i) for i in range(1, 4)
    ]
    watched, _ = run(evaluation(), faults=Faults(crashes=tuple(crashes)))
    all_dealt_with(watched, "held-out", 2, 8)


@pytest.mark.parametrize("agents", [False, True])
def test_episodes_are_evaluated_to_their_end_whatever_dies(agents: bool) -> None:
    scenario = with_turns(random_world(3), agents=agents)
    config = scenario.config.model_copy(update={"evaluations": (evaluation(), evaluation(name="b", every=3))})
    crashes = [Crash("evaluator", 2.9 * i) for i in range(1, 12)]
    crashes += [Crash("reward-worker-b", 2.3 * i) for i in range(1, 12)]
    faults = Faults(crashes=tuple(crashes), controller_crashes=(7.0, 19.0))
    scenario = replace(scenario, config=config, faults=faults)
    watched = Watched(scenario)
    assert simulate(scenario, watched).restarts >= 10
    for name in ("held-out", "b"):
        assert watched.of(name)[config.steps] == ""
    done = [one for each in watched.attempts.values() for one in each]
    episodes = [unmarked(one.tokens, 0).turns() for one in done]
    assert {(len(turns) + 1) // 2 for turns in episodes} - {0} == {1, 2, 3, 4}
    assert all(one.reward in (0.0, 1.0) or one.reason for one in done)


def test_an_evaluator_that_is_too_slow_skips_versions_and_delays_no_step() -> None:
    quick, slow = run(steps=8)[1], run(evaluation(every=1, prompts=20, share=0.05), steps=8)
    watched, outcome = slow
    skipped = [why for why in watched.of("held-out").values() if why]
    assert skipped
    assert all("was due" in why or "in its place" in why for why in skipped)
    assert last_step_s(outcome) <= 1.05 * last_step_s(quick)


def test_one_that_takes_too_long_is_given_up_and_told() -> None:
    watched, _ = run(evaluation(every=8, prompts=40, share=0.01, timeout_s=3.0))
    assert "took longer than 3 s" in watched.of("held-out")[0]


@pytest.mark.parametrize("timeout_s", [3.0, 3600.0], ids=["too slow", "in time"])
def test_an_evaluation_that_is_over_leaves_no_episode_and_no_request(
    timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scored or skipped, its episodes have no worker any more, and none of its requests waits."""
    pools, make, skip = list[RewardPool](), EvaluatorSession._pool, EvaluatorSession._skip
    at_skips = list[int]()

    def pool(session: EvaluatorSession, section: EvaluationSection) -> RewardPool:
        pools.append(made := make(session, section))
        return made

    def skipped(session: EvaluatorSession, record: EvaluationRecord) -> None:
        skip(session, record)
        at_skips.append(pools[-1].num_requests + len(pools[-1]._requests._homes))

    monkeypatch.setattr(EvaluatorSession, "_pool", pool)
    monkeypatch.setattr(EvaluatorSession, "_skip", skipped)
    section = evaluation(every=1, prompts=8, share=0.9, timeout_s=timeout_s)
    scenario = with_turns(Scenario(small_config(Laminar(), steps=6)))
    scenario = replace(
        scenario,
        config=scenario.config.model_copy(update={"evaluations": (section,)}),
        workload=replace(scenario.workload, turns=(4, 4), forked_fraction=0.0, tool_s=LogNormal(4.0, 0.3)),
    )
    watched = Watched(scenario)
    simulate(scenario, watched)
    reasons = [why for why in watched.of("held-out").values() if "took longer" in why]
    assert bool(reasons) is (timeout_s == 3.0) and at_skips and set(at_skips) == {0}
    assert not pools[-1]._requests._homes and not pools[-1].num_requests


def test_once_training_is_over_the_evaluator_rests_no_more() -> None:
    """Nobody is disturbed any more, and a long rest would count as a stall."""
    watched, outcome = run(evaluation(every=8, prompts=40, share=0.0005))
    assert watched.of("held-out")[8] == ""
    assert outcome.wall_s < last_step_s(outcome) + 100


def test_a_reward_that_takes_its_time_at_the_end_is_no_stall() -> None:
    limits = Supervision(stall_s=2.0)
    watched, _ = run(evaluation(every=8), costs=Costs(score_s=3.0), supervision=limits)
    assert watched.of("held-out")[8] == ""


def test_what_a_run_ends_without_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Evaluations, "longest_s", -1e9)
    watched, outcome = run(evaluation(every=8, prompts=40))
    [warned] = outcome.of("warned")
    assert warned["source"] == "evaluations" and "held-out of version" in warned["reason"]
    assert 8 not in watched.of("held-out")


def test_a_run_stops_when_it_has_not_improved_for_so_many_evaluations() -> None:
    section = evaluation(every=1, patience=3)
    watched, outcome = run(section, steps=60, workload=Workload(reward_mean=1.0))
    (ended,) = outcome.of("run_ended")
    assert "held-out has not improved for 3 evaluations" in ended["reason"]
    assert ended["ok"]
    assert outcome.of("step")[-1]["version"] < 60
    assert sum(not why for why in watched.of("held-out").values()) == 4


def all_dealt_with(watched: Watched, name: str, every: int, last: int) -> None:
    """Each version that is due is evaluated, or a newer one was due, or its weights were gone: then a newer
    version is evaluated in its place. The last one is evaluated."""
    told = watched.of(name)
    due, done = {*range(0, last + 1, every), last}, {one for one, why in told.items() if not why}
    assert due <= told.keys() and last in done
    gone = {one for one, why in told.items() if "in its place" in why}
    assert all(max(done) > one for one in gone)
    assert all(one in due or any(f"version {one} " in told[other] for other in gone) for one in told)
    assert all("was due" in told[one] for one in told.keys() - done - gone)


def last_step_s(outcome: Outcome) -> float:
    events: list[Event] = [event for event in outcome.events if event.kind == "step"]
    return events[-1].time_s


@long
@pytest.mark.parametrize("seed", range(8))
def test_whatever_dies_every_due_version_is_told_and_the_last_one_is_evaluated(seed: int) -> None:
    """The explorer's worlds, in which evaluators and their reward workers die too."""
    world = random_world(seed)
    config = world.config.model_copy(update={"evaluations": (evaluation(), evaluation(name="b", every=3))})
    deaths = (Failures("evaluator", 3.0), Failures("reward-worker-b", 3.0))
    faults = replace(world.faults, corruption=Corruption(), failures=(*world.faults.failures, *deaths))
    scenario = replace(world, config=config, faults=faults)
    watched = Watched(scenario)
    simulate(scenario, watched)
    for name, every in (("held-out", 2), ("b", 3)):
        all_dealt_with(watched, name, every, config.steps)


@pytest.mark.parametrize("name", ["evaluator", "reward-worker-held-out"])
@pytest.mark.parametrize("kind", [WorkerDied, ConfigError, RemoteError])
def test_training_goes_on_without_evaluations_that_cannot_be_made(
    name: str, kind: type[MillraceError], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = SimulatedWorker._call

    async def call(worker: SimulatedWorker, method: str, args: tuple[Any, ...]) -> Any:
        if worker.name == name and method in ("pull", "prompts"):
            raise kind("it is broken")
        return await honest(worker, method, args)

    monkeypatch.setattr(SimulatedWorker, "_call", call)
    limits = Supervision(restarts=5, backoff_s=0.05)
    watched, outcome = run(evaluation(), evaluation(name="other"), supervision=limits)
    assert outcome.accounting.trained == outcome.accounting.admitted and len(outcome.of("step")) == 8
    skipped = {"held-out", "other"} if name == "evaluator" else {"held-out"}
    [warned] = outcome.of("warned")
    assert all(each in warned["reason"] for each in skipped) and "it is broken" in warned["reason"]
    for each in skipped:
        assert watched.of(each).keys() == {0, 2, 4, 6, 8} and all(watched.of(each).values())
    if "other" not in skipped:
        assert not watched.of("other")[8]


@pytest.mark.parametrize(
    ("prompts", "faults"),
    [(9, Faults(crashes=(Crash("relay", 5.5),))), (6, Faults(controller_crashes=(5.5,)))],
    ids=["relay", "controller"],
)
def test_in_place_of_a_version_that_a_kill_took_the_next_one_is_evaluated(
    prompts: int, faults: Faults
) -> None:
    """The evaluator is busy with version 0 while version 4 waits, or with version 4."""
    watched, outcome = run(evaluation(every=4, prompts=prompts, share=1.0), faults=faults)
    told = watched.of("held-out")
    assert told.pop(4).endswith("version 6 is evaluated in its place") and told == {0: "", 6: "", 8: ""}
    assert [one["version"] for one in outcome.of("evaluation_skipped")] == [4]


def test_an_evaluator_that_cannot_be_started_at_all_ends_the_run_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = SimulatedWorker.start

    async def start(worker: SimulatedWorker, *given: Any) -> None:
        if worker.name == "evaluator":
            raise crossing(ConfigError("there is no vLLM"), "evaluator: start")
        await honest(worker, *given)

    monkeypatch.setattr(SimulatedWorker, "start", start)
    with pytest.raises(ConfigError, match="there is no vLLM"):
        run(evaluation())
