"""Decisions of a sweep: which trials, their names, which is stopped, which is best, how many at once."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from tests.unit.placement_needs import GB, ON_CPU, ON_GPU

from millrace.api.configure import Components
from millrace.api.helper_process import WorkProcess
from millrace.config.schema import Config
from millrace.core.errors import ConfigError, WorkerDied
from millrace.core.placement import Gpu, Host
from millrace.observe.terminal import Terminal
from millrace.placement.hosts import Layout, lay_out
from millrace.run_directory.run_directory import RunDirectory
from millrace_sweeps import trial_record as record
from millrace_sweeps.board import Board
from millrace_sweeps.checking import refuse_changed_base
from millrace_sweeps.decisions.capacity import at_once, slots
from millrace_sweeps.decisions.space import (
    Domain,
    Range,
    choices,
    domains,
    drawn,
    grid,
    holds,
    trial_name,
    with_seeds,
)
from millrace_sweeps.decisions.standings import halving_reason, median_reason, standings, value_at, value_of
from millrace_sweeps.driver import ORPHAN_S, Driver, Measured, _Live
from millrace_sweeps.loading import load_sweep
from millrace_sweeps.proposals import AllKnown, Optuna, proposals
from millrace_sweeps.run_sweep import checked
from millrace_sweeps.sweep_config import HalvingRule, MedianRule
from millrace_sweeps.trial_record import Trials, TrialState

LR = {"optimizer.lr": {"low": 1e-5, "high": 1e-3, "log": True}}
BASE = '[model]\npath = "start"\n[task]\nkind = "gym"\nname = "x"\n[reward]\nkind = "gym"\n'


def test_a_grid_has_every_combination_and_all_of_the_first_seed_come_first() -> None:
    keys = choices({"optimizer": {"lr": [1, 2]}, "batch.group_size": [4]})
    assert with_seeds(grid(keys), [7, 8]) == [
        {"optimizer.lr": 1, "batch.group_size": 4, "seed": 7},
        {"optimizer.lr": 2, "batch.group_size": 4, "seed": 7},
        {"optimizer.lr": 1, "batch.group_size": 4, "seed": 8},
        {"optimizer.lr": 2, "batch.group_size": 4, "seed": 8},
    ]
    assert with_seeds(grid({}), [7]) == [{"seed": 7}]


def test_more_draws_leave_the_first_as_they_are_and_none_comes_twice() -> None:
    keys = domains({**LR, "batch.group_size": [4, 8]}, "random.keys")
    assert drawn(keys, 3, seed=5) == drawn(keys, 9, seed=5)[:3] != drawn(keys, 3, seed=6)
    few = drawn(domains({"batch.group_size": [4, 8]}, "random.keys"), 10, seed=0)
    assert sorted(one["batch.group_size"] for one in few) == [4, 8]


@pytest.mark.parametrize(
    "domain", [Range(1e-5, 1e-3, log=True), Range(0.1, 0.3), Range(2, 9), Range(2, 9, True)]
)
def test_a_draw_is_within_its_range_and_has_few_digits(domain: Range) -> None:
    for seed in range(200):
        value = domain.draw(Random(seed))
        assert domain.low <= value <= domain.high
        assert float(f"{value:.4g}") == value and isinstance(value, int) == domain.of_integers


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ({"optimizer.lr": 1e-4, "seed": 1}, "lr=0.0001,seed=1"),
        ({"model.path": "a", "task.path": "b"}, "model.path=a,task.path=b"),
        ({"rollout.exact": True, "schedule": "areal"}, "exact=true,schedule=areal"),
    ],
)
def test_a_name_tells_the_keys(overrides: dict[str, object], name: str) -> None:
    assert trial_name(overrides) == name


def test_values_that_a_name_cannot_show_still_get_different_names() -> None:
    paths = [trial_name({"model.path": path}) for path in ("a/b", "a_b", "a:b")]
    tables = [trial_name({"schedule": {"kind": "areal", "eta": eta}}) for eta in (1, 2)]
    numbers = [trial_name({"optimizer.lr": lr}) for lr in (0.1, 0.10000001)]
    assert len({*paths, *tables, *numbers}) == 7
    assert all("/" not in name and len(trial_name({"x": "y" * 300})) < 120 for name in paths)


def test_the_value_is_the_mean_of_the_last_fifth_of_the_steps() -> None:
    series = [(step, float(step)) for step in range(1, 11)]
    assert value_of(series, 0.2) == 9.5
    assert value_at(series, 5, 0.2) == 5.0
    assert value_of([(1, 4.0), (2, math.nan)], 0.2) == 4.0
    assert value_of([], 0.2) is None


def test_the_median_rule_compares_the_best_value_so_far_with_the_means_of_finished_trials() -> None:
    rule = MedianRule(steps_min=2, trials_min=3)
    finished = [[(1, mean), (2, mean), (3, 100.0)] for mean in (1.0, 2.0, 3.0)]
    assert median_reason(rule, [(1, 2.0), (2, 0.0)], finished) == ""  # its best equals the median
    assert "1.9 is worse than 2, the median of 3" in median_reason(rule, [(1, 1.9), (2, 0.0)], finished)
    assert median_reason(rule, [(1, 0.0)], finished) == ""  # too few steps
    assert median_reason(rule, [(2, 0.0)], finished[:2]) == ""  # too few trials
    lower = [[(step, -value) for step, value in series] for series in finished]
    assert "2.1 is worse than 2" in median_reason(rule, [(2, -2.1)], lower, sign=-1)


def test_halving_ends_at_a_rung_what_is_not_among_the_best_third() -> None:
    rule = HalvingRule(steps_min=2, factor=3)
    others = [[(1, 0.0), (2, value)] for value in (1.0, 2.0)]

    def reason(value: float, looked: int = 0, step: int = 2) -> str:
        return halving_reason(rule, [(step, value)], others, looked=looked, last=0.2)

    assert reason(3.0) == reason(2.0) == ""
    assert "step 2: its value 1.5 is in place 2 of 3" in reason(1.5)
    assert reason(1.5, looked=2, step=3) == ""  # the rung was decided before, and the next is at 6
    assert reason(1.5, step=1) == ""
    assert halving_reason(rule, [(2, 0.0)], others[:1], looked=0, last=0.2) == ""  # fewer than three


def driving(tmp_path: Path, text: str) -> Driver:
    """Nothing runs yet."""
    (tmp_path / "run.toml").write_text(BASE)
    (tmp_path / "sweep.toml").write_text(f'base = "run.toml"\n{text}')
    sweep = load_sweep(tmp_path / "sweep.toml")
    source, trials = proposals(sweep.config), Trials(sweep.config.metric, sweep.config.goal, True)
    trials.add(source.first())
    board = Board(Terminal(quiet=True), trials, {})
    return Driver(sweep, tmp_path, trials, source, [{}], board, {})


def write_metrics(run: Path, *lines: dict[str, Any]) -> None:
    run.mkdir(exist_ok=True)
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"replayed": False, **line}) + "\n" for line in lines)


def test_halving_waits_for_the_value_of_a_rung_that_comes_after_its_step(tmp_path: Path) -> None:
    driver = driving(tmp_path, 'seeds = [1, 2]\nmetric = "late"\nstop = { kind = "halving", factor = 2 }\n')
    driver.trials.trials["seed=1"].state = TrialState.FINISHED
    write_metrics(tmp_path / "seed=1", {"version": 10, "late": 2.0})
    write_metrics(tmp_path / "seed=2", {"version": 5, "late": 1.0}, {"version": 10})
    driver._measure("seed=2")
    assert driver._reason("seed=2") == ""
    write_metrics(tmp_path / "seed=2", {"version": 11}, {"version": 10, "late": 1.0})
    driver._measure("seed=2")
    assert "step 10: its value 1 is in place 2 of 2" in driver._reason("seed=2")
    assert driver._reason("seed=2") == ""  # each rung is decided once


class KilledProcess:
    """A trial that did not end in time."""

    has_ended = True

    def __init__(self, *_: object) -> None:
        pass

    def result(self) -> Any:
        raise WorkerDied("exit code -9")


@pytest.mark.parametrize(
    ("before", "asked", "after"),
    [("running", 1.0, "interrupted"), ("stopped", 1.0, "stopped"), ("running", None, "failed")],
)
def test_a_trial_that_is_killed_since_its_step_is_long_goes_on_later_or_stays_stopped(
    tmp_path: Path, before: str, asked: float | None, after: str
) -> None:
    driver = driving(tmp_path, "seeds = [1]\n")
    trial = driver.trials.trials["seed=1"]
    trial.state, trial.reason = TrialState(before), "the rule"
    driver._live["seed=1"] = _Live(cast(WorkProcess, KilledProcess()), 0, 9, 1.0, kill_at=asked)
    driver._look("seed=1")
    assert trial.state == after and trial.reason == (
        "the rule" if after == "stopped" else "WorkerDied: exit code -9"
    )
    assert driver._fill() is False  # the same start of the sweep does not begin it again


def test_a_trial_that_another_process_holds_for_long_is_left_for_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace_sweeps.driver.is_in_use", lambda log: True)
    driver = driving(tmp_path, "seeds = [1]\n")
    driver.trials.trials["seed=1"].state = TrialState.INTERRUPTED
    assert driver._fill() is True
    driver._busy_since["seed=1"] -= ORPHAN_S
    assert driver._fill() is False
    assert driver.trials.trials["seed=1"].state is TrialState.INTERRUPTED


def test_a_new_start_measures_what_has_run_by_the_metric_of_the_file(tmp_path: Path) -> None:
    driver = driving(tmp_path, 'seeds = [1, 2, 3]\nmetric = "new"\nlast = 0.1\n')
    every = driver.trials.trials.values()
    for trial, state in zip(every, ("finished", "failed", "finished"), strict=True):
        trial.state, trial.value, trial.reason = TrialState(state), 9.0, "of before"
    write_metrics(tmp_path / "seed=1", {"version": 1, "new": 1.0}, {"version": 2, "new": 2.0})
    write_metrics(tmp_path / "seed=2", {"version": 1, "old": 9.0})
    driver.run()
    assert [trial.value for trial in every] == [2.0, None, 9.0]  # the third run was deleted
    assert [trial.reason for trial in every] == ["", "of before", "of before"]
    written = record.read(tmp_path)
    assert written is not None and written.trials["seed=1"].value == 2.0


def test_a_replayed_step_leaves_the_value_of_its_first_run(tmp_path: Path) -> None:
    replayed = [{"version": version, "x": 9.0, "replayed": True} for version in (1, 2)]
    write_metrics(tmp_path, {"version": 1, "x": 1.0}, *replayed, {"version": 3, "x": 3.0})
    write_metrics(tmp_path, {"version": 3, "x": 4.0})  # undone and made again
    measured = Measured(RunDirectory(tmp_path), "x")
    assert measured.update() and measured.series == [(1, 1.0), (2, 9.0), (3, 4.0)]


def scored_by(factor: float) -> Components:
    """A script's reward and rows. Another factor is another function."""

    def reward(completion: str) -> float:
        return factor

    return Components(reward=[{"name": "own", "reward": reward}], rows=[{"prompt": "a"}])


def test_a_trial_goes_on_with_the_keys_of_the_base_that_may_change_and_with_its_own_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace_sweeps.driver.WorkProcess", KilledProcess)
    driver, run = driving(tmp_path, "seeds = [1]\n"), RunDirectory(tmp_path / "seed=1")
    (tmp_path / "run.toml").write_text('[model]\npath = "start"\n')
    configs = []
    for every in (5, 7):
        sets = (f"checkpoints.every={every}",)
        components = scored_by(float(every))
        driver.sweep = load_sweep(tmp_path / "sweep.toml", components=components, overrides=sets)
        driver._begin("seed=1")
        assert driver.trials.trials["seed=1"].state is TrialState.RUNNING
        driver._live.clear()
        configs.append(run.read_config())
    assert [config.checkpoints.every for config in configs] == [5, 7]
    assert configs[0].reward == configs[1].reward and configs[0].task == configs[1].task
    assert len(list(run.carried.iterdir())) == 2  # the reward and the rows


def test_a_changed_base_is_refused_also_for_a_trial_that_the_lists_no_longer_have(tmp_path: Path) -> None:
    driver = driving(tmp_path, "seeds = [1]\n")
    run = RunDirectory(tmp_path / "seed=1")
    run.path.mkdir()
    run.write_config(driver.sweep.prepared({"seed": 1}).config)
    driver.trials.trials["seed=1"].state = TrialState.FINISHED
    record.write(tmp_path, driver.trials)
    (tmp_path / "sweep.toml").write_text('base = "run.toml"\nseeds = [3]\n')
    refuse_changed_base(load_sweep(tmp_path / "sweep.toml"), tmp_path)
    changed = load_sweep(tmp_path / "sweep.toml", overrides=["batch.group_size=2"])
    with pytest.raises(ConfigError, match=r"`batch\.group_size`: ") as raised:
        checked(changed, tmp_path, Terminal(quiet=True))
    assert raised.value.__notes__ == ["in the trial seed=1"]


def test_another_figure_of_the_evaluation_that_compares_is_refused_once_a_trial_has_begun(
    tmp_path: Path,
) -> None:
    table = '[[evaluations]]\nname = "held"\nevery = 2\n[evaluations.task]\nkind = "gym"\nname = "y"\n'
    driver = driving(tmp_path, 'seeds = [1]\nmetric = "evaluation/held"\n')
    (tmp_path / "run.toml").write_text(BASE + table)
    run = RunDirectory(tmp_path / "seed=1")
    run.path.mkdir()
    run.write_config(load_sweep(tmp_path / "sweep.toml").prepared({"seed": 1}).config)
    driver.trials.trials["seed=1"].state = TrialState.FINISHED
    record.write(tmp_path, driver.trials)
    refuse_changed_base(load_sweep(tmp_path / "sweep.toml"), tmp_path)
    (tmp_path / "run.toml").write_text(BASE + table.replace("every", 'by = "reward"\nevery'))
    with pytest.raises(ConfigError, match="was 'greedy' and is 'reward'"):
        refuse_changed_base(load_sweep(tmp_path / "sweep.toml"), tmp_path)
    named = (tmp_path / "sweep.toml").read_text().replace("evaluation/held", "evaluation/held/reward")
    (tmp_path / "sweep.toml").write_text(named)
    refuse_changed_base(load_sweep(tmp_path / "sweep.toml"), tmp_path)


def test_a_trial_that_waits_goes_with_its_values_in_the_lists() -> None:
    trials = Trials("reward/mean", "max", False)
    trials.add([{"x": value} for value in range(3)])
    trials.trials["x=0"].state = TrialState.FINISHED
    trials.drop_waiting([{"x": 2}, {"x": 3}])
    assert list(trials.trials) == ["x=0", "x=2"]


@pytest.mark.parametrize(
    ("domain", "inside", "outside"),
    [
        (Range(0.1, 0.3), [0.1, 0.3], [0.31, True, "0.2"]),
        (Range(2, 9), [2, 9], [1, 2.5]),
        ([1, {"kind": "areal"}], [1, {"kind": "areal"}], [True, {"kind": "areal", "eta": 2}]),
    ],
)
def test_a_value_is_in_its_domain_or_outside(domain: Domain, inside: list[Any], outside: list[Any]) -> None:
    assert all(holds(domain, value) for value in inside)
    assert not any(holds(domain, value) for value in outside)


def test_what_ran_when_the_sweep_was_killed_comes_first_and_failed_trials_only_when_asked(
    tmp_path: Path,
) -> None:
    trials = Trials("reward/mean", "max", False)
    assert trials.add([{"x": value} for value in range(4)]) == ["x=0", "x=1", "x=2", "x=3"]
    trials.trials["x=0"].state = TrialState.FINISHED
    trials.trials["x=2"].state = TrialState.RUNNING
    trials.trials["x=3"].state = TrialState.FAILED
    record.write(tmp_path, trials)
    for retry, due in ((False, ["x=2", "x=1"]), (True, ["x=2", "x=3", "x=1"])):
        again = record.read(tmp_path)
        assert again is not None
        again.recover(retry=retry)
        assert again.add([{"x": value} for value in range(4)]) == []
        assert again.due() == due


def test_a_directory_belongs_to_one_sweep_at_a_time(tmp_path: Path) -> None:
    with record.owning(tmp_path / "sweep"):
        with (
            pytest.raises(ConfigError, match="another process works on the sweep"),
            record.owning(tmp_path / "sweep"),
        ):
            pass
    with record.owning(tmp_path / "sweep"):
        pass
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ConfigError, match="holds files and no sweep"), record.owning(tmp_path / "other"):
        pass


def loaded(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.toml").write_text(BASE)
    (tmp_path / "sweep.toml").write_text(f'base = "run.toml"\n{text}')
    sweep = load_sweep(tmp_path / "sweep.toml")
    for overrides in proposals(sweep.config).examples():
        sweep.prepared(overrides)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"there is nothing to try.\n  Add \[grid\]"),
        ("[grids]\nx = [1]", r"unknown key `grids`.\n  Did you mean `grid`\?.*sweep.toml:2\]"),
        ("[grid]\noptimizer.lr = 0.1", r"`grid.optimizer.lr` \(0.1\) must be a list.*sweep.toml:3\]"),
        ("[grid]\noptimizer.lr = [1e-3, 1e-3]", "has a value twice"),
        ('[grid]\n"optimizer.lrr" = [1e-3]', r"unknown key `optimizer.lrr`.\n  Did you mean.*sweep.toml:3\]"),
        ('[grid]\n"optimizer.lr" = [1e-3, -1]', r"`optimizer.lr` \(-1\) must be .*sweep.toml:3\]"),
        ("seeds = [1, 1]", "has a seed twice"),
        ("seeds = [1]\n[grid]\nseed = [1, 2]", "both set the seed"),
        ("at_once = 0\nseeds = [1]", r"`at_once` \(0\) must be a number of runs.*sweep.toml:2\]"),
        ('seeds = [1]\nstop = "soon"', r"`stop.kind` \('soon'\) is not known"),
        ("[grid]\nseed = [1]\n[random]\ntrials = 2\nkeys = { seed = [2] }", "`grid` and `random` exclude"),
        ("[random]\ntrials = 2\nkeys = { x = { low = 2, high = 1 } }", "must have low < high"),
        ("[random]\ntrials = 2\nkeys = { x = { low = 0, high = 1, log = true } }", "must have 0 < low"),
        ("[random]\ntrials = 2\n[random.keys]\nx = { low = 1, hi = 2 }", "must have `low` and `high`"),
    ],
)
def test_a_mistake_in_the_file_is_told_with_its_key_and_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        loaded(tmp_path, text)


def test_the_base_may_stand_in_the_file_and_its_paths_are_relative_to_it(tmp_path: Path) -> None:
    tables = BASE.replace("[", "[base.")
    (tmp_path / "sweep.toml").write_text(f'seeds = [5]\n[grid]\n"model.path" = ["other"]\n{tables}')
    sweep = load_sweep(tmp_path / "sweep.toml", overrides=["steps=9"])
    config = sweep.prepared({"model.path": "other", "seed": 5}).config
    assert (config.model.path, config.seed, config.steps) == (str(tmp_path / "other"), 5, 9)
    assert sweep.base.tree["model"]["path"] == str(tmp_path / "start")


@pytest.mark.skipif(find_spec("optuna") is not None, reason="Optuna is installed here")
def test_optuna_is_refused_in_words_where_it_is_not_installed() -> None:
    sweep = load_sweep({"base": {"steps": 1}, "optuna": {"trials": 2, "keys": LR}})
    with pytest.raises(ConfigError, match=r"not installed.\n  Run .* -m pip install 'millrace\[optuna\]'"):
        proposals(sweep.config)


@pytest.mark.skipif(find_spec("optuna") is None, reason="Optuna is not installed here")
def test_optuna_learns_nothing_from_trials_outside_of_narrower_ranges() -> None:
    keys = {"optimizer.lr": {"low": 1e-4, "high": 1e-3}, "batch.group_size": [4, 8]}
    sweep = load_sweep({"base": {"steps": 1}, "optuna": {"trials": 4, "keys": keys}})
    trials = Trials("reward/mean", "max", False)
    for lr, size in ((1e-5, 4), (2e-4, 16), (2e-4, 8)):
        (name,) = trials.add([{"optimizer.lr": lr, "batch.group_size": size}])
        trials.trials[name].state, trials.trials[name].value = TrialState.FINISHED, 0.5
    assert sweep.config.optuna is not None
    optuna = Optuna(sweep.config, sweep.config.optuna)
    assert [trial.params["optimizer.lr"] for trial in optuna._study(trials).trials] == [2e-4]
    assert len(optuna.more(trials)) == 1


@pytest.mark.skipif(find_spec("optuna") is None, reason="Optuna is not installed here")
def test_optuna_proposes_each_combination_once_and_goes_on_from_the_trials_alone() -> None:
    keys = {**LR, "schedule": ["areal", {"kind": "synchronous"}]}
    sweep = load_sweep({"base": {"steps": 1}, "seeds": [1, 2], "optuna": {"trials": 4, "keys": keys}})
    trials = Trials("reward/mean", "max", True)
    assert sweep.config.optuna is not None
    for count in (1, 2, 3, 4):
        names = trials.add(Optuna(sweep.config, sweep.config.optuna).more(trials))
        assert len(names) == 2 and len(standings(trials)) == count
        if count > 1:  # the first goes on running
            for name in names:
                trials.trials[name].state, trials.trials[name].value = TrialState.FINISHED, 0.5
    assert Optuna(sweep.config, sweep.config.optuna).more(trials) == []


def test_seeds_alone_are_a_sweep_too() -> None:
    sweep = load_sweep({"base": {"steps": 1}, "seeds": [3, 4]})
    assert AllKnown(sweep.config).first() == [{"seed": 3}, {"seed": 4}]


def layout_of(config: Config, cores: int, gpus: int, free_gb: int = 1000) -> Layout:
    listed = tuple(Gpu(index, "H100", 80 * GB, 80 * GB) for index in range(gpus))
    host = Host("localhost", cores, 1000 * GB, free_gb * GB, listed)
    return lay_out(config, [host], ON_GPU if gpus else ON_CPU)


def config_for(replicas: int) -> Config:
    tables = {"model": {"path": "m"}, "task": {"kind": "gym", "name": "x"}, "reward": {"kind": "gym"}}
    return Config.model_validate({**tables, "rollout": {"replicas": replicas}})


def test_cores_or_memory_decide_how_many_runs_a_host_without_gpus_holds() -> None:
    config = config_for(2)
    assert at_once("auto", config, layout_of(config, 16, 0)) == 5  # of 3 workers each
    assert at_once("auto", config, layout_of(config, 2, 0)) == 1
    layout = layout_of(config, 300, 0, free_gb=150)
    run_gb = (layout.main.processes_bytes + layout.main.relay_bytes + 3 * 400_000_000) / GB
    assert at_once("auto", config, layout) == int(0.95 * 150 / run_gb) > 1
    assert at_once(7, config, layout_of(config, 2, 0)) == 7
    assert slots(5, config, layout_of(config, 16, 0)) == [{"OMP_NUM_THREADS": "1"}] * 5
    assert slots(1, config, layout_of(config, 16, 0)) == [{}]


def test_runs_at_once_have_gpus_of_their_own_while_there_are_enough() -> None:
    config = config_for(1)
    layout = layout_of(config, 64, 8)
    assert at_once("auto", config, layout) == 4  # a trainer and a replica each
    devices = [slot["CUDA_VISIBLE_DEVICES"] for slot in slots(4, config, layout)]
    assert devices == ["0,1", "2,3", "4,5", "6,7"]
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in slots(3, config, layout_of(config, 64, 2))] == [
        "0",
        "1",
        "0",
    ]
