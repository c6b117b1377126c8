"""What one change of a real run would give: short simulations with the costs of the run itself.

The first simulation has the run's own configuration, so its speed against the measured one says how good the
others are. All draw the same lengths: a trajectory has its length by its id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from millrace.config.schema import Config
from millrace.config.tables.schedules import Millrace, RollPacker, Synchronous
from millrace.config.tables.task import EnvironmentRewardSection
from millrace.core.errors import MillraceError
from millrace.core.events import Event
from millrace_sim.calibrate.learn import SLICE_S, Calibration
from millrace_sim.measure import Measure, window
from millrace_sim.simulation import Scenario, simulate

STEPS_MIN, STEPS_MAX, TRAJECTORIES = 4, 14, 2_000
"""Of a simulation, without the steps in which the pipeline fills and empties: as many steps as have about so
many trajectories."""
SLICES = 50
"""A step of the run has about so many slices of decoding, if they are not shorter than `SLICE_S`."""
SHARED = 1.1
"""Replicas that are so many times slower beside a computing trainer share cores with it."""
CLOSE = 0.15
"""A simulated speed that differs from the measured one by more than this share is no good prediction."""

EVENTS_ASKED = 25
"""After so many simulated events it is asked whether time is left."""

GENERATION, TRAINER, REWARDS, BOUND = "generation", "trainer", "rewards", "staleness bound"
"""Roles that a change helps, by the names of `diagnose.bottleneck`."""


@dataclass(frozen=True, slots=True)
class ChangedSpeed:
    """`change` in words, with its key. `ratio` of the speed with the change to the speed without; None:
    unknown, for the reason `why`."""

    change: str
    ratio: float | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Outlook:
    """Speeds are in versions per second. `simulated_per_s` is that of the run as it is; None: it is not
    known. `notes` say what the prediction leaves out."""

    measured_per_s: float
    simulated_per_s: float | None
    gains: tuple[ChangedSpeed, ...]
    notes: tuple[str, ...]

    @property
    def error(self) -> float | None:
        """Of the simulated speed, as a share of the measured one."""
        return None if self.simulated_per_s is None else self.simulated_per_s / self.measured_per_s - 1


class _OutOfTime(MillraceError):
    """No time is left to simulate further."""


class _TimedMeasure(Measure):
    """Ends the simulation as soon as `is_over`: a step of a large run has very many events."""

    is_over: Callable[[], bool]
    _num_seen = 0

    def ask(self) -> None:
        """Raises: _OutOfTime."""
        if self.is_over():
            raise _OutOfTime("no time was left")

    def on_event(self, event: Event) -> None:
        self._num_seen += 1
        if self._num_seen % EVENTS_ASKED == 0:
            self.ask()
        super().on_event(event)


def outlook(
    calibration: Calibration, is_over: Callable[[], bool] = lambda: False, *, first: str = ""
) -> Outlook:
    """Simulate the run, then each change, those that help the role `first` before the others. `is_over` is
    asked often: no time is left, so the rest stays unknown."""
    config = calibration.config
    measured = 1 / calibration.achieved.step_s
    if config.rollout.colocated:
        return Outlook(measured, None, (), (_COLOCATED,))
    now, why = _speed(_short(calibration, config), is_over)
    if now is None:
        return Outlook(measured, None, (), (f"the run as it is could not be simulated: {why}",))
    gains = []
    for _, change, scenario in sorted(_changes(calibration), key=lambda each: each[0] != first):
        speed, why = _speed(scenario, is_over)
        gains.append(ChangedSpeed(change, None if speed is None else speed / now, why))
    return Outlook(measured, now, tuple(gains), tuple(_notes(calibration, now / measured - 1)))


def _speed(scenario: Scenario, is_over: Callable[[], bool]) -> tuple[float | None, str]:
    """Versions per second; or None, and why not."""

    watch = _TimedMeasure(scenario, *window(scenario))
    watch.is_over = is_over
    try:
        watch.ask()
        result = watch.result(simulate(scenario, watch).wall_s)
    except MillraceError as error:
        return None, str(error).splitlines()[0]
    return 1 / result.step_s, ""


def _short(calibration: Calibration, config: Config) -> Scenario:
    """Fewer steps, and no evaluations. The slices of a slow run are longer."""
    bound = config.staleness_bound
    steps = min(STEPS_MAX, max(STEPS_MIN, TRAJECTORIES // config.trajectories_per_step))
    steps += 2 * max(1, 2 if bound is None else bound)
    slice_s = max(SLICE_S, calibration.achieved.step_s / SLICES)
    short = calibration.scenario(config.model_copy(update={"steps": steps, "evaluations": ()}))
    report_s = max(config.rollout.report_interval_s, slice_s)
    scale = replace(
        short.scale, slice_s=slice_s, report_interval_s=report_s, isolate=False, keep_events=frozenset()
    )
    return replace(short, scale=scale)


# ---------------------------------------------------------------- changes


def _changes(calibration: Calibration) -> Iterator[tuple[str, str, Scenario]]:
    """Each with the role that it helps, and in words."""
    config = calibration.config
    replicas, slots, workers = config.rollout.replicas, config.rollout.slots, config.reward.workers
    yield (
        GENERATION,
        f"one more replica (`rollout.replicas` {replicas} -> {replicas + 1})",
        _short(calibration, _with(config, "rollout", replicas=replicas + 1)),
    )
    more = slots + max(1, slots // 4)
    yield (
        GENERATION,
        f"more slots of each replica (`rollout.slots` {slots} -> {more})",
        _short(calibration, _with(config, "rollout", slots=more)),
    )
    ranks = config.trainer.ranks
    costs = replace(
        calibration.costs, train_per_token_s=calibration.costs.train_per_token_s * ranks / (ranks + 1)
    )
    yield (
        TRAINER,
        f"one more rank of the trainer ({ranks} -> {ranks + 1})",
        _short(replace(calibration, costs=costs), config),
    )
    if (staler := _staler(config)) is not None:
        yield BOUND, f"a larger staleness bound ({staler[0]})", _short(calibration, staler[1])
    yield (
        REWARDS,
        f"one more reward worker (`reward.workers` {workers} -> {workers + 1})",
        _short(calibration, _with(config, "reward", workers=workers + 1)),
    )


def _with(config: Config, table: str, **values: object) -> Config:
    return config.model_copy(update={table: getattr(config, table).model_copy(update=values)})


def _staler(config: Config) -> tuple[str, Config] | None:
    """The key with its values, and the configuration. None: the schedule has no bound."""
    schedule, bound = config.schedule, config.staleness_bound
    if isinstance(schedule, Synchronous | RollPacker):
        asynchronous = config.model_copy(update={"schedule": Millrace(staleness_max=1)})
        return f"`schedule.kind` {schedule.kind} -> millrace, `staleness_max` 1", asynchronous
    if bound is None:
        return None
    key = _BOUNDS.get(schedule.kind, "staleness_max")
    return f"`schedule.{key}` {bound} -> {bound + 1}", _with(config, "schedule", **{key: bound + 1})


_BOUNDS = {"llamarl": "lag", "areal": "eta", "rlax": "acceptance_staleness", "roll_flash": "alpha"}


def _notes(calibration: Calibration, error: float) -> Iterator[str]:
    config, slower = calibration.config, calibration.costs.contention
    if abs(error) > CLOSE:
        yield (
            f"the simulated speed is {error:+.0%} off the measured one: read the gains as an order, not as "
            "figures"
        )
    yield "a gain supposes that the change gets cores or devices of its own, and costs the others nothing"
    if slower > SHARED:
        yield (
            f"this run shares its cores: replicas are {slower:.1f} times slower while the trainer computes. "
            "On the same cores one more replica or rank, or work at the same time, gives little or nothing"
        )
    yield "the gain of a rank is the most that is possible: it supposes that tokens divide evenly among ranks"
    if config.trainer.hosts > 1:
        yield "transfers between hosts are not simulated"
    if isinstance(config.reward, EnvironmentRewardSection):
        yield "answers keep their measured times, in which waits for a worker count"


_COLOCATED = (
    "trainer and replicas use one device in turns, so one more replica or rank changes what both have. "
    "`millrace plan` from data sheets compares such layouts"
)
