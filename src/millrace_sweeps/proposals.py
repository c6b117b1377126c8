"""Where the combinations come from: all at the start, or one after the other from Optuna."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Protocol

from millrace.core.extras import refuse_missing
from millrace_sweeps.decisions.space import (
    DRAWS_PER_TRIAL,
    Domain,
    Overrides,
    Range,
    choices,
    corners,
    domains,
    drawn,
    grid,
    holds,
    identity,
    with_seeds,
)
from millrace_sweeps.decisions.standings import combinations, ended_value
from millrace_sweeps.sweep_config import OptunaSearch, SweepConfig
from millrace_sweeps.trial_record import ENDED, SweepTrial, Trials


class Proposals(Protocol):
    def first(self) -> list[Overrides]:
        """The trials that are known before any has run."""

    def examples(self) -> list[Overrides]:
        """Trials to check before the first starts."""

    def more(self, trials: Trials) -> list[Overrides]:
        """Further trials, when a run could start and none waits. Empty: none for now."""


class AllKnown:
    """A grid, random draws, or seeds alone."""

    def __init__(self, config: SweepConfig) -> None:
        search = config.search
        if search is None:
            found = grid(choices(config.grid))
        else:
            found = drawn(domains(search.keys, "random.keys"), search.trials, search.seed)
        self._all = with_seeds(found, config.seeds)

    def first(self) -> list[Overrides]:
        return self._all

    def examples(self) -> list[Overrides]:
        return self._all

    def more(self, trials: Trials) -> list[Overrides]:
        return []


class Optuna:
    """Optuna's samplers. The study is made anew from the trials each time: nothing else is kept.

    Its value of a combination is the mean over the seeds, each with what it had at its end. A combination
    with a seed that ended without a value is a failed trial of the study, and one that runs is a running
    trial. A combination is run once: if it is proposed again, Optuna is asked for another.
    """

    def __init__(self, config: SweepConfig, search: OptunaSearch) -> None:
        needed = ["optuna", *(["scipy"] if search.sampler == "gp" else [])]
        for package in needed:
            refuse_missing(package, "`optuna`", "use [random]")
        self._config, self._search = config, search
        self._domains = domains(search.keys, "optuna.keys")

    def first(self) -> list[Overrides]:
        return []

    def examples(self) -> list[Overrides]:
        return with_seeds(corners(self._domains), self._config.seeds[:1])

    def more(self, trials: Trials) -> list[Overrides]:
        done = combinations(trials)
        if len(done) >= self._search.trials:
            return []
        study = self._study(trials)
        known = {identity(overrides) for overrides, _ in done}
        for _ in range(DRAWS_PER_TRIAL):
            asked = study.ask()
            overrides = {key: _suggest(asked, key, domain) for key, domain in self._domains.items()}
            if identity(overrides) not in known:
                return with_seeds([overrides], self._config.seeds)
        return []

    def _study(self, trials: Trials) -> Any:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        kinds = {"tpe": optuna.samplers.TPESampler, "gp": optuna.samplers.GPSampler}
        done = combinations(trials)
        sampler = kinds[self._search.sampler](seed=self._search.seed + len(done))
        direction = "maximize" if self._config.goal == "max" else "minimize"
        study = optuna.create_study(sampler=sampler, direction=direction)
        distributions = {key: _distribution(domain) for key, domain in self._domains.items()}
        for overrides, members in done:
            if overrides.keys() != self._domains.keys():
                continue
            if not all(holds(domain, overrides[key]) for key, domain in self._domains.items()):
                continue  # the domains have changed since
            value, ended = ended_value(members.values()), not _is_open(members.values())
            state = "COMPLETE" if value is not None else "FAIL" if ended else "RUNNING"
            params = {key: _param(self._domains[key], overrides[key]) for key in distributions}
            study.add_trial(
                optuna.trial.create_trial(
                    state=optuna.trial.TrialState[state],
                    params=params,
                    distributions=distributions,
                    value=value,
                )
            )
        return study


def _is_open(members: Iterable[SweepTrial]) -> bool:
    return any(trial.state not in ENDED for trial in members)


def _suggest(asked: Any, key: str, domain: Domain) -> Any:
    match domain:
        case Range() if domain.of_integers:
            return asked.suggest_int(key, domain.low, domain.high, log=domain.log)
        case Range():
            return domain.rounded(asked.suggest_float(key, domain.low, domain.high, log=domain.log))
    return json.loads(asked.suggest_categorical(key, [json.dumps(value) for value in domain]))


def _distribution(domain: Domain) -> Any:
    """Choices as JSON: Optuna takes no lists and tables."""
    import optuna

    match domain:
        case Range(low, high, log) if domain.of_integers:
            return optuna.distributions.IntDistribution(low, high, log=log)
        case Range(low, high, log):
            return optuna.distributions.FloatDistribution(low, high, log=log)
    return optuna.distributions.CategoricalDistribution([json.dumps(value) for value in domain])


def _param(domain: Domain, value: Any) -> Any:
    return value if isinstance(domain, Range) else json.dumps(value)


def proposals(config: SweepConfig) -> Proposals:
    """Raises: ConfigError: Optuna is wanted and not installed."""
    return AllKnown(config) if config.optuna is None else Optuna(config, config.optuna)
