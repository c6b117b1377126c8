"""Runs the trials: starts what is due, looks at what runs, ends what the rule ends. Decides nothing itself.
A trial's metric so far is read from its run directory while the run writes there.

A trial is a process of its own, `millrace.api.work`. It ends when this process ends, however that happens: at
the end of its stdin it finishes its step and saves. So the same sweep, started again, resumes it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from millrace.api.helper_process import WorkProcess, is_in_use
from millrace.core.errors import DataError, LedgerError, MillraceError, boundary
from millrace.estimates.evaluation import figure
from millrace.ledger.reading import LedgerReader
from millrace.observe.sinks.jsonl import evaluation_scalars
from millrace.observe.sinks.log_files import Tail
from millrace.run.going_on import begun_as
from millrace.run_directory.models import is_finished
from millrace.run_directory.run_directory import RunDirectory
from millrace_sweeps import trial_record as record
from millrace_sweeps.board import Board
from millrace_sweeps.checking import begin_trial, going_on
from millrace_sweeps.decisions.capacity import Slot
from millrace_sweeps.decisions.standings import Series, halving_reason, median_reason, value_of
from millrace_sweeps.loading import EVALUATION, LoadedSweep, figure_by
from millrace_sweeps.proposals import Proposals
from millrace_sweeps.sweep_config import HalvingRule
from millrace_sweeps.trial_record import SweepTrial, Trials, TrialState

POLL_S = 0.5
STOP_S = 60.0
"""Beyond `supervision.stop_grace_s`, for a run that was asked to stop: then it is killed."""
ORPHAN_S = 300.0
"""How long a process of an earlier sweep, which was killed, may still work on its trial."""


@dataclass
class _Live:
    """A trial that runs. `kill_at`: on the monotonic clock, once it was asked to stop."""

    process: WorkProcess
    slot: int
    steps: int
    grace_s: float
    kill_at: float | None = None

    def stop(self) -> None:
        self.process.stop()
        self.kill_at = self.kill_at or time.monotonic() + self.grace_s + STOP_S


@dataclass
class Driver:
    sweep: LoadedSweep
    directory: Path
    trials: Trials
    proposals: Proposals
    slots: list[Slot]
    board: Board
    steps: dict[str, int]
    _live: dict[str, _Live] = field(default_factory=dict)
    _measured: dict[str, Measured] = field(default_factory=dict)
    _busy_since: dict[str, float] = field(default_factory=dict)
    _left: set[str] = field(default_factory=set)
    """Trials that were stopped, or that somebody else holds: they go on with the next start of the sweep."""
    _warned: bool = False

    def run(self) -> None:
        """Consumes trials that are due. Waits for the processes of running trials, each of which has
        deadlines of its own. Ends when none runs and none is due.

        Raises: KeyboardInterrupt, after the trials have finished their steps.
        """
        self._measure_begun()
        try:
            while self._fill() or self._live:
                time.sleep(POLL_S)
                for name in list(self._live):
                    self._look(name)
                self.board.refresh()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                self.board.say(
                    "Stopping: every trial finishes its step and saves. Ctrl-C again stops at once."
                )
            self._stop_all()
            raise

    def _fill(self) -> bool:
        """Start trials while there is a slot. True: some are due and wait: for a slot or a process."""
        while len(self._live) < len(self.slots):
            due = [name for name in self.trials.due() if name not in self._left]
            free = next((name for name in due if not self._is_busy(name)), None)
            if free is not None:
                self._begin(free)
            elif due or not self.trials.add(self.proposals.more(self.trials)):
                break
            else:
                record.write(self.directory, self.trials)
        return any(name not in self._left for name in self.trials.due())

    def _is_busy(self, name: str) -> bool:
        """Another process works on the run. One of an earlier sweep ends by itself, within a deadline."""
        run = self._run(name)
        if not is_in_use(run.logs / "controller.log") and not run.is_owned():
            return False
        since = self._busy_since.setdefault(name, time.monotonic())
        if time.monotonic() - since > ORPHAN_S:
            self._leave(name, f"another process works on {run.path}")
        return True

    def _begin(self, name: str) -> None:
        run, slot = self._run(name), self._free_slot()
        try:
            prepared = self.sweep.prepared(self.trials.trials[name].overrides)
            if run.config.exists():
                config = going_on(run.read_config(), begun_as(prepared.config, run))
            else:
                config = begin_trial(prepared, run, self.trials)
            run.write_config(config)
            self.steps[name] = config.steps
            if is_finished(run, config.steps):
                self._measure(name, ended=True)
                self._set(name, TrialState.FINISHED)
                return
            run.logs.mkdir(mode=0o700, exist_ok=True)
            log = run.logs / "controller.log"
            log.touch(mode=0o600)
        except (MillraceError, OSError) as error:
            self._set(name, TrialState.FAILED, str(error))
            return
        self._measured.pop(name, None)  # it knew no configuration
        self._set(name, TrialState.RUNNING)
        arguments = {"run": str(run.path), "from_version": None, "notify": prepared.config.observe.notify}
        process = WorkProcess("train", arguments, log, self.slots[slot])
        self._live[name] = _Live(process, slot, config.steps, config.supervision.stop_grace_s)

    def _look(self, name: str) -> None:
        live, trial = self._live[name], self.trials.trials[name]
        ended = live.process.has_ended  # before reading, so that the last lines are read
        news = self._measure(name, ended=ended)
        if ended:
            del self._live[name]
            self._end(name, live)
        elif live.kill_at is not None:
            if time.monotonic() > live.kill_at:
                live.process.kill()
        elif news and trial.step < live.steps and (reason := self._reason(name)):
            self._set(name, TrialState.STOPPED, reason)
            live.stop()

    def _end(self, name: str, live: _Live) -> None:
        """A trial that was asked to stop has not failed: it may have been killed because its step is long."""
        trial, reason = self.trials.trials[name], ""
        try:
            done = live.process.result()["ended"]
        except MillraceError as error:
            done, reason = False, f"{type(error).__name__}: {error}"
            if live.kill_at is None:
                self._set(name, TrialState.FAILED, reason)
                return
        if done:
            trouble = self._measured[name].trouble
            self._set(name, TrialState.FINISHED, trouble)
        elif trial.state is TrialState.STOPPED:
            record.write(self.directory, self.trials)  # its last value
        else:
            self._leave(name, reason)

    def _measure_begun(self) -> None:
        """`metric` and `last` may have changed since. The value of a run that was deleted stays."""
        for name, trial in self.trials.trials.items():
            if _has_begun(trial) and self._run(name).metrics.exists():
                self._measure(name, ended=True)
                if trial.state is TrialState.FINISHED:
                    trial.reason = self._measured[name].trouble
        record.write(self.directory, self.trials)

    def _measure(self, name: str, *, ended: bool = False) -> bool:
        """Update step and value. True: there are new steps."""
        trial, measured = self.trials.trials[name], self._measured_of(name)
        try:
            news = measured.update(ended=ended)
        except MillraceError as error:
            self._warn(str(error))
            return False
        trial.step, trial.value = measured.step, value_of(measured.series, self.sweep.config.last)
        if measured.trouble and not self.sweep.config.metric.startswith(EVALUATION):
            self._warn(f"{name}: {measured.trouble}")
        return news

    def _reason(self, name: str) -> str:
        """Why the trial ends early; empty: it goes on. Each step is looked at once, also after a resume."""
        rule, config, trial = self.sweep.config.stop, self.sweep.config, self.trials.trials[name]
        if rule is None:
            return ""
        own, looked = self._series(name), trial.looked
        if isinstance(rule, HalvingRule):
            others = [self._series(n) for n, t in self.trials.trials.items() if n != name and _has_begun(t)]
            found = halving_reason(rule, own, others, looked=looked, last=config.last, sign=config.sign)
        else:
            finished = [self._series(n) for n in self.trials.of(TrialState.FINISHED)]
            found = median_reason(rule, own, finished, config.sign)
        trial.looked = own[-1][0] if own else looked
        record.write(self.directory, self.trials)
        return found

    def _series(self, name: str) -> Series:
        """Higher is better."""
        measured = self._measured_of(name)
        if name not in self._live and not measured.step:
            measured.update(ended=True)
        return [(version, self.sweep.config.sign * value) for version, value in measured.series]

    def _stop_all(self) -> None:
        """Each trial finishes its step, or is killed at its deadline; a second interrupt kills them now."""
        try:
            for live in self._live.values():
                live.stop()
            while self._live:
                time.sleep(POLL_S)
                for name in list(self._live):
                    self._look(name)
                self.board.refresh()
        finally:
            for name, live in self._live.items():
                live.process.kill()
                if self.trials.trials[name].state is TrialState.RUNNING:
                    self.trials.trials[name].state = TrialState.INTERRUPTED
            record.write(self.directory, self.trials)

    def _leave(self, name: str, reason: str = "") -> None:
        self._left.add(name)
        self._set(name, TrialState.INTERRUPTED, reason)

    def _set(self, name: str, state: TrialState, reason: str = "") -> None:
        trial: SweepTrial = self.trials.trials[name]
        trial.state, trial.reason = state, reason
        record.write(self.directory, self.trials)
        self.board.changed(name)

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self.board.say(f"Warning: {text}")

    def _run(self, name: str) -> RunDirectory:
        return RunDirectory((self.directory / name).resolve())

    def _measured_of(self, name: str) -> Measured:
        if name not in self._measured:
            run, metric = self._run(name), self.sweep.config.metric
            by = figure_by(run.read_config(), metric) if run.config.exists() else None
            self._measured[name] = Measured(run, metric, by or "greedy")
        return self._measured[name]

    def _free_slot(self) -> int:
        used = {live.slot for live in self._live.values()}
        return next(index for index in range(len(self.slots)) if index not in used)


def _has_begun(trial: SweepTrial) -> bool:
    return trial.state is not TrialState.WAITING


# ---------------------------------------------------------------- a trial's metric


class Measured:
    """The series of one metric of one run. `step` is the last version so far."""

    def __init__(self, run: RunDirectory, metric: str, by: str = "greedy") -> None:
        self._run, self._metric, self._by = run, metric, by
        self._tail = Tail(run.metrics)
        self._values: dict[int, float] = {}
        self._names: set[str] = set()
        self.step = 0

    def update(self, *, ended: bool = False) -> bool:
        """Read what is new; with `ended` also evaluations after the last step. True: there are new steps.

        Raises: DataError: a line is damaged.
        """
        before = self.step
        for taken in iter(self._tail.take, []):
            for line in taken:
                with boundary(str(self._run.metrics), "a line is damaged", DataError):
                    self._take(msgspec.json.decode(line, type=dict[str, Any]))
        if (ended or self.step > before) and self._metric.startswith(EVALUATION):
            self._evaluate()
        return self.step > before

    @property
    def series(self) -> Series:
        return sorted(self._values.items())

    @property
    def trouble(self) -> str:
        """Why there is no value yet, if the run has steps. Empty: there is one, or there are no steps."""
        if self._values or not self.step:
            return ""
        if self._metric.startswith(EVALUATION):
            return f"the run has no value of `metric` ({self._metric!r}) yet"
        near = get_close_matches(self._metric, self._names, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "metrics.jsonl of the run has the names"
        return f"the run has no metric {self._metric!r}. {hint}"

    def _take(self, line: dict[str, Any]) -> None:
        version, value = line["version"], line.get(self._metric)
        self.step = max(self.step, version)
        self._names |= line.keys()
        if isinstance(value, int | float) and not (line["replayed"] and version in self._values):
            self._values[version] = float(value)

    def _evaluate(self) -> None:
        """An evaluation ends some steps after its version's, and the last one before the run does."""
        with suppress(LedgerError), LedgerReader(self._run.ledger, check=False) as reader:
            for record in reader.evaluations():
                if record.reason:
                    continue
                scalars = evaluation_scalars({"name": record.name, "metrics": record.metrics})
                short = f"{EVALUATION}{record.name}"
                by = figure(record.metrics, self._by)
                if (value := by if self._metric == short else scalars.get(self._metric)) is not None:
                    self._values[record.version] = value
