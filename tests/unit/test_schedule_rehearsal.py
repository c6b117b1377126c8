"""Every preset played against random completions, pulls, crashes and failures."""

import runpy
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
from tests.long import few

from millrace.checks.rehearsal import BrokenPromise, Scene, rehearse
from millrace.config.tables.schedules import Heddle, Millrace, RollFlash, RollPacker, StaleFlow, StreamRL
from millrace.schedule import Schedule, presets
from millrace.schedule.presets import build_tail, rollpacker
from millrace.schedule.refresh import AtOnce
from millrace.schedule.repack import BestFit

REPACK = BestFit(interval_s=5, kv_fraction_max=0.9)
TAIL = {"streamrl": StreamRL, "staleflow": StaleFlow, "heddle": Heddle}


def scene(rng, **faults):
    return Scene(
        steps=6,
        batch_groups=rng.randint(1, 4),
        group_size=rng.randint(2, 3),
        replicas=rng.randint(1, 4),
        slots=rng.randint(1, 6),
        relay_versions=rng.randint(1, 5),
        step_probability=rng.choice([0.1, 0.3, 1.0]),
        pull_probability=rng.choice([0.2, 0.5, 1.0]),
        group_duration_batches=rng.choice([0.1, 1.0, 10.0]),
        **faults,
    )


def schedule(kind, bound, rng):
    match kind:
        case "synchronous":
            return presets.synchronous()
        case "llamarl":
            return presets.llamarl(lag=bound, iteration_tokens=rng.randint(1, 8))
        case "areal":
            return presets.areal(eta=bound)
        case "rlax":
            return presets.rlax(reload_staleness=rng.randint(0, bound), acceptance_staleness=bound)
        case "rlboost":
            return presets.rlboost(staleness_max=bound)
        case "roll_flash":
            mix = rng.choice(["within", "between", "never"])
            keys = RollFlash(alpha=bound, redundant_samples=0, redundant_groups=rng.randint(1, 3), mix=mix)
            return build_tail(keys)
        case "streamrl" | "staleflow" | "heddle":
            return build_tail(TAIL[kind](staleness_max=bound))
        case "laminar":
            rounds = rng.randint(1, 3)
            return presets.laminar(staleness_max=bound, round_groups=rounds, batch_max=None, repack=REPACK)
        case "millrace" | "millrace, unbounded" | "millrace, redundant":
            return presets.millrace(millrace_keys(kind, bound, rng))
        case "unbounded":
            rounds = rng.randint(1, 3)
            return presets.laminar(staleness_max=None, round_groups=rounds, batch_max=None, repack=REPACK)


def millrace_keys(kind, bound, rng):
    if kind == "millrace":
        ahead, batch_max = rng.choice([None, 1.0, 2.5]), rng.choice([None, 4, 8])
        return Millrace(staleness_max=bound, ahead=ahead, batch_max=batch_max)
    if kind == "millrace, unbounded":
        return Millrace(staleness_max=None)
    return Millrace(staleness_max=bound, redundant_groups=rng.randint(1, 3))


KINDS = [
    "synchronous", "llamarl", "areal", "rlax", "laminar", "unbounded", "millrace", "millrace, unbounded",
    "rlboost", "streamrl", "staleflow", "heddle",
]  # fmt: skip


@pytest.mark.parametrize("seeds", few([range(6), range(6, 16)]))
@pytest.mark.parametrize("kind", KINDS)
def test_without_faults_the_bound_holds_and_nothing_is_wasted(kind, seeds):
    for seed in seeds:
        rng = Random(seed)
        stage, played = scene(rng), schedule(kind, seed % 4, rng)
        outcome = rehearse(played, stage, seed=seed)
        assert outcome.stale == 0
        assert len(outcome.batches) == stage.steps
        assert sorted(outcome.staleness) == list(range(stage.steps * stage.batch_groups)), "useless groups"


@pytest.mark.parametrize("seeds", few([range(8), range(8, 24)]))
@pytest.mark.parametrize("kind", KINDS)
def test_with_crashes_and_failures_the_bound_holds_and_the_run_ends(kind, seeds):
    crashes = failed = 0
    for seed in seeds:
        rng = Random(1000 + seed)
        stage = scene(rng, crash_probability=rng.choice([0.01, 0.03]), fail_probability=0.1)
        outcome = rehearse(schedule(kind, seed % 4, rng), stage, seed=seed)
        assert len(outcome.staleness) == stage.steps * stage.batch_groups
        assert outcome.stale == 0, "crashes alone never make a group too old"
        crashes, failed = crashes + outcome.crashes, failed + outcome.failed
    assert crashes > len(seeds) and failed > len(seeds) / 2


@pytest.mark.parametrize("kind", ["roll_flash", "millrace, redundant"])
@pytest.mark.parametrize("seeds", few([range(16), range(16, 64)]))
def test_with_redundant_groups_the_bound_holds_and_only_stragglers_end(kind, seeds):
    redundant = 0
    for seed in seeds:
        rng = Random(seed)
        faults = {"crash_probability": 0.02, "fail_probability": 0.1} if seed % 2 else {}
        stage = scene(rng, **faults)
        outcome = rehearse(schedule(kind, seed % 4, rng), stage, seed=seed)
        assert len(outcome.batches) == stage.steps
        assert outcome.stale == 0
        redundant += outcome.redundant
    assert redundant > len(seeds)


@pytest.mark.parametrize("seeds", few([range(16), range(16, 64)]))
def test_what_short_rounds_leave_behind_is_trained_in_long_ones_and_on_policy(seeds):
    parked = ended = 0
    for seed in seeds:
        rng = Random(seed)
        faults = {"crash_probability": 0.02, "fail_probability": 0.1} if seed % 2 else {}
        stage = replace(scene(rng, **faults), steps=8)
        keys = RollPacker(redundant_samples=0, redundant_groups=rng.randint(1, 3))
        outcome = rehearse(rollpacker(keys, 4), stage, seed=seed)
        assert set(outcome.staleness.values()) == {0}
        assert len(outcome.batches) == stage.steps
        parked, ended = parked + outcome.parked, ended + outcome.redundant
    assert parked > 3 * ended > 0, "few are left when the run ends"


def test_asynchronous_schedules_use_the_staleness_that_they_are_given():
    for kind in ("llamarl", "areal", "rlax", "laminar", "millrace"):
        worst = set()
        for seed in range(12):
            stage = replace(scene(Random(seed)), steps=8, replicas=3)
            worst |= set(rehearse(schedule(kind, 2, Random(seed)), stage, seed=seed).staleness.values())
        assert worst == {0, 1, 2}, kind


def test_synchronous_areal_with_eta_0_and_rlax_with_0_0_train_identical_batches():
    for seed in range(12):
        rng = Random(seed)
        stage = scene(rng)
        kinds = [presets.synchronous(), presets.areal(eta=0)]
        kinds.append(presets.rlax(reload_staleness=0, acceptance_staleness=0))
        batches = [rehearse(kind, stage, seed=other).batches for other, kind in enumerate(kinds)]
        assert batches[0] == batches[1] == batches[2]


@pytest.mark.parametrize("kind", ["laminar", "millrace"])
def test_repack_moves_trajectories(kind):
    stage = Scene(replicas=4, slots=6, batch_groups=4, tokens_max=24)
    played = schedule(kind, 3, Random(0))
    assert sum(rehearse(played, stage, seed=seed).moves for seed in range(40)) > 5


def test_without_a_bound_the_live_groups_are_still_limited():
    stage = Scene(steps=12, replicas=2, slots=6, batch_groups=2, group_size=2, step_probability=0.02)
    outcome = rehearse(schedule("unbounded", 0, Random(0)), stage, seed=0)
    assert outcome.live_max == 2 * (2 * 6 // 2)


def test_a_seed_gives_the_same_outcome_again():
    stage = Scene(crash_probability=0.02)
    first, second = (rehearse(presets.areal(eta=2), stage, seed=7) for _ in range(2))
    assert first == second


@dataclass(frozen=True)
class TakesFirstReady(Schedule):
    """Forgets that others may have to go first."""

    def take(self, view):
        ready = sorted((g for g in view.groups if g.ready), key=lambda g: g.ready_rank)
        if len(ready) < view.batch_groups or not view.steps_left:
            return None
        return sorted(group.group_id for group in ready[: view.batch_groups])


@dataclass(frozen=True)
class AdmitsByCount(Schedule):
    """Limits how many groups are live and not what they were born at."""

    def admit(self, view):
        allowed = view.batch_groups * (self.staleness_max + 1)
        left = min(allowed, view.steps_left * view.batch_groups) - len(view.groups)
        serving = [replica.replica_id for replica in view.replicas if replica.serving]
        return serving[:1] * left


@pytest.mark.parametrize("broken", [TakesFirstReady, AdmitsByCount])
def test_a_rehearsal_finds_a_schedule_that_does_not_keep_its_bound(broken):
    sound = presets.laminar(staleness_max=1, round_groups=2, batch_max=None, repack=None)
    fields = {name: getattr(sound, name) for name in Schedule.__dataclass_fields__}
    with pytest.raises(BrokenPromise, match=r"staleness|trained in time"):
        for seed in range(40):
            rehearse(broken(**fields), Scene(batch_groups=2, replicas=3, step_probability=1.0), seed=seed)


def test_a_rehearsal_finds_a_schedule_that_mixes_versions_without_saying_so():
    mixed = replace(presets.areal(eta=2), mixes_versions=False)
    with pytest.raises(BrokenPromise, match="one trajectory with versions"):
        for seed in range(20):
            rehearse(mixed, Scene(), seed=seed)


@dataclass(frozen=True)
class Never:
    """Admits nothing."""

    def room(self, view, replica):
        return 0

    def describe(self):
        return "never"


def test_a_rehearsal_finds_a_schedule_that_gets_stuck():
    with pytest.raises(BrokenPromise, match="stuck before step 0"):
        rehearse(replace(presets.synchronous(), admit_rule=Never()), Scene(), seed=0)


def test_an_own_composition_of_rules_is_rehearsed_like_a_preset():
    own = replace(presets.laminar(staleness_max=3, round_groups=2, batch_max=None, repack=None), kind="own")
    mixing = replace(own, refresh_rule=AtOnce(), mixes_versions=True)
    for seed in range(5):
        assert len(rehearse(mixing, Scene(), seed=seed).batches) == Scene().steps


def test_the_schedule_of_the_example_keeps_its_bound():
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "schedule.py"))
    for seed in range(10):
        stage = Scene(replicas=3, crash_probability=0.02, fail_probability=0.1)
        outcome = rehearse(example["newest_only"](staleness_max=1), stage, seed=seed)
        assert max(outcome.staleness.values()) <= 1
