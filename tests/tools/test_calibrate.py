"""A calibration reads back, from events alone, the costs that a simulated run had."""

from collections.abc import Sequence
from functools import cache
from statistics import fmean

import pytest
from benchmarks.fidelity import largest_error

from millrace.config.schema import Config
from millrace.config.tables.generation import Rollout, SamplingConfig
from millrace.config.tables.operation import Checkpoints
from millrace.config.tables.schedules import AReaL, Synchronous
from millrace.config.tables.task import GymRewardSection, GymTaskSection
from millrace.config.tables.training import BatchShape, Model
from millrace.core.errors import DataError
from millrace.core.events import Event
from millrace_sim import Costs, Workload
from millrace_sim.calibrate.achieved import Achieved
from millrace_sim.calibrate.learn import Calibration, calibrate, learn
from millrace_sim.costs.workload import LogNormal
from millrace_sim.simulation import Scale, Scenario, simulate

TRUE = Costs(
    decode_base_s=0.004,
    decode_per_sequence_s=0.0004,
    handover_s=0.005,
    contention=1.5,
    prefill_per_token_s=0.0005,
    step_base_s=0.1,
    train_per_token_s=0.0002,
    publish_s=0.05,
    score_s=0.004,
)


def config(schedule=AReaL(eta=2)):
    return Config(
        steps=14,
        model=Model(path="simulated"),
        task=GymTaskSection(name="chain_sum"),
        reward=GymRewardSection(),
        batch=BatchShape(prompts=4, group_size=4),
        sampling=SamplingConfig(max_tokens=96),
        schedule=schedule,
        rollout=Rollout(replicas=2, slots=8, max_sequence_tokens=160),
        checkpoints=Checkpoints(every=5),
    )


@cache
def true_events(seed: int = 0) -> tuple[Event, ...]:
    workload = Workload(prompt_tokens=(8, 24), completion=LogNormal(30, 0.6))
    scale = Scale(slice_s=0.02)
    return tuple(simulate(Scenario(config(), seed=seed, costs=TRUE, workload=workload, scale=scale)).events)


@cache
def calibration(seed: int = 0) -> Calibration:
    events = true_events(seed)
    lengths = {e.fields["trajectory_id"]: e.fields["tokens"] for e in events if e.kind == "finished"}
    ordered = [lengths.get(i, 0) for i in range(max(lengths) + 1)]
    return learn(events, config(), lengths=ordered, prompts=list(range(8, 25)))


@pytest.mark.parametrize(
    ("name", "within"),
    [
        ("decode_base_s", 0.1),
        ("decode_per_sequence_s", 0.1),
        ("handover_s", 0.1),
        ("contention", 0.1),
        ("prefill_per_token_s", 0.2),
        ("publish_s", 0.1),
        ("digest_s", 0.1),
        ("pull_s", 0.1),
    ],
)
def test_costs_come_back_as_they_were(name, within):
    assert getattr(calibration().costs, name) == pytest.approx(getattr(TRUE, name), rel=within)


def test_a_score_costs_what_it_did():
    """In the mean of runs: each has some twenty to learn from."""
    learned = fmean(calibration(seed).costs.score_s for seed in range(4))
    assert learned == pytest.approx(TRUE.score_s, rel=0.2)


def test_a_step_of_the_trainer_costs_what_it_did():
    lengths = [46] * 16
    assert calibration().costs.train_s(lengths) == pytest.approx(TRUE.train_s(lengths), rel=0.1)


def test_the_calibrated_simulation_does_what_the_run_did():
    simulated = Achieved.of(simulate(calibration().scenario()).events).as_dict()
    real = calibration().achieved.as_dict()
    assert largest_error({name: (real[name], simulated[name]) for name in real}) < 0.15


def test_a_calibration_predicts_another_schedule():
    events = simulate(calibration().scenario(config(Synchronous()))).events
    assert Achieved.of(events).staleness_mean == 0.0


def test_errors_of_fractions_are_differences_and_of_other_numbers_relative():
    rows = {"step_s": (2.0, 1.8), "trainer_idle": (0.01, 0.02), "staleness_mean": (0.0, 0.0)}
    assert largest_error(rows) == pytest.approx(0.1)


def later(events: Sequence[Event]) -> list[Event]:
    """The same steps as versions 15 to 28, as a resumed session counts them."""
    return [
        Event(e.kind, e.time_s, e.wall_s, e.fields | {"version": e.fields["version"] + 14})
        if e.kind == "step"
        else e
        for e in events
    ]


def test_a_resumed_run_is_learned_from_its_newest_session_alone():
    """Two sessions have two clocks: the pause between them is no part of a step, and may be negative."""
    lengths, prompts = [30] * 64, list(range(8, 25))
    newest = later(true_events(1))
    alone = learn(true_events(1), config(), lengths=lengths, prompts=prompts)
    for pause_s in (-5.0, 8 * 3600.0):
        before = [Event(e.kind, e.time_s - pause_s, e.wall_s, e.fields) for e in true_events()]
        assert learn([*before, *newest], config(), lengths=lengths, prompts=prompts) == alone
        assert Achieved.of([*before, *newest]) == alone.achieved


def test_the_first_steps_of_a_resumed_session_warm_up_too():
    slow = later(true_events())
    learned = learn(slow, config(), lengths=[30] * 64, prompts=list(range(8, 25))).costs
    assert learned.train_per_token_s == calibration().costs.train_per_token_s
    few = [*true_events(), *(e for e in slow if e.kind != "step" or e.fields["version"] <= 20)]
    with pytest.raises(DataError, match="1 steps after the first 5"):
        learn(few, config(), lengths=[30] * 64, prompts=[8])
    with pytest.raises(DataError, match="newest session has 6 steps"):
        Achieved.of(few)


def test_a_run_too_short_to_measure_says_so():
    with pytest.raises(DataError, match="7 are the least"):
        Achieved.of([e for e in true_events() if e.kind != "step"])
    short = [e for e in true_events() if e.kind != "report"]
    with pytest.raises(DataError, match="reports tell of decode steps"):
        learn(short, config(), lengths=[3] * 4, prompts=[8])


def test_whoever_has_no_time_left_ends_a_calibration():
    asked: list[int] = []

    def check() -> None:
        asked.append(1)
        if len(asked) > 2:
            raise DataError("no time was left")

    with pytest.raises(DataError, match="no time was left"):
        learn(true_events(), config(), lengths=[30] * 64, prompts=[8], check=check)


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="is not a run directory"):
        calibrate(tmp_path)
