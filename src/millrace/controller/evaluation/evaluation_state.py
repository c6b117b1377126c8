"""What the controller knows of its evaluations: what is due, what is under way, and how good versions were.

Synchronous, without I/O, as `state/` is. An evaluated completion is no trajectory: it is in no group, no
batch takes it, and the accounts of training do not count it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from millrace.config.schema import Config
from millrace.config.tables.evaluations import EvaluationSection
from millrace.controller.evaluation import due
from millrace.controller.evaluation.prompt_attempt import PromptAttempt, attempts_of
from millrace.core.types import EvaluationRecord, Observed, Prompt, Score, ScoreRequest, State
from millrace.estimates.evaluation import figure, summarize


@dataclass(slots=True)
class Underway:
    """One evaluation of one version. It outlives the evaluator's process: the next process goes on from its
    tokens. `config`: of its prompts and rewards."""

    section: EvaluationSection
    version: int
    began_s: float
    completions: list[PromptAttempt]
    config: Config

    @property
    def unscored(self) -> list[PromptAttempt]:
        return [one for one in self.completions if one.score is None]

    @property
    def ungenerated(self) -> list[PromptAttempt]:
        """Those that have a turn to generate, or may have another one."""
        return [one for one in self.unscored if one.trajectory.state is not State.GENERATED]

    def score_request(self, one: PromptAttempt) -> ScoreRequest:
        """Its id contains the version, so a late score of another version matches no completion."""
        return one.score_request(self.score_ids[one.index], self.config.rollout.max_sequence_tokens)

    @property
    def score_ids(self) -> range:
        """Of the completions, in their order."""
        first = self.version * len(self.completions)
        return range(first, first + len(self.completions))

    def answer(self, score_id: int, answer: Score | Observed) -> bool:
        """Returns whether its episode goes on."""
        if score_id not in self.score_ids:
            return False
        one = self.completions[score_id - self.score_ids.start]
        one.answer(answer)
        return isinstance(answer, Observed) and one.score is None

    def metrics(self) -> dict[str, Any]:
        """As JSON."""
        attempts = [one.result() for one in self.completions]
        each = 1 + self.section.samples
        rows = [attempts[start : start + each] for start in range(0, len(attempts), each)]
        greedy, sampled = [row[0] for row in rows], [row[1:] for row in rows]
        tree = summarize("", greedy, sampled, correct_at=self.section.correct_at).to_json()
        del tree["model"]
        return tree


class Evaluations:
    """The evaluations of one run, from its position in the ledger on, at `version`."""

    def __init__(self, config: Config, recorded: Iterable[EvaluationRecord], version: int) -> None:
        self.sections = {section.name: section for section in config.evaluations}
        self.configs = {section.name: config.of_evaluation(section) for section in config.evaluations}
        self.waiting = due.DueVersions()
        self.underway: Underway | None = None
        self.given_up: dict[str, str] = {}  # evaluations that cannot be made any more, and why
        self.finishing = False  # training is over, and the run waits for the last ones
        self._last, self._resumed = config.steps, version
        self._series: dict[str, list[tuple[int, float | None]]] = {name: [] for name in self.sections}
        self._looked = dict.fromkeys(self.sections, -1)  # versions up to this one are dealt with
        self._recorded: set[tuple[str, int]] = set()
        for record in recorded:
            if record.name in self.sections:
                self._note(record)

    def idle(self, version: int) -> bool:
        """Whether every evaluation that is due up to `version` is dealt with."""
        looked = all(each >= version for each in self._looked.values())
        return looked and self.underway is None and not self.waiting.wanted

    @property
    def longest_s(self) -> float:
        """Seconds until all evaluations end at the latest, each after one that is under way."""
        return sum(2 * section.timeout_s for section in self.sections.values())

    def look(self, version: int) -> list[EvaluationRecord]:
        """The run is at `version`: note the evaluations that are due. Returns the ones that are skipped."""
        skipped = []
        for name, section in self.sections.items():
            first, self._looked[name] = self._looked[name] + 1, version
            for each in due.due(section.every, first, version, last=self._last):
                if (name, each) in self._recorded:
                    continue
                if (older := self.waiting.add(name, each)) is not None:
                    reason = due.RESUMED if older < self._resumed else due.SUPERSEDED.format(version=each)
                    skipped.append(EvaluationRecord(name, older, reason=reason))
        return skipped

    def begin(self, name: str, version: int, prompts: list[Prompt], now_s: float) -> EvaluationRecord | None:
        """Returns the version that is skipped for this one, whose weights are gone; None: none."""
        section = self.sections[name]
        config = self.configs[name]
        completions = attempts_of(prompts, section.samples, own_prompts=config.own_prompts)
        wanted = self.waiting.wanted.pop(name)
        self.underway = Underway(section, version, now_s, completions, config)
        if wanted == version:
            return None
        return EvaluationRecord(name, wanted, reason=due.GONE.format(version=version))

    def lose(self) -> EvaluationRecord | None:
        """The weights of the evaluation under way are gone, and it begins again with newer ones. Returns as
        `begin`, if a newer version waits already."""
        under, self.underway = self.underway, None
        assert under is not None
        name, wanted = under.section.name, self.waiting.wanted
        if (newer := wanted.setdefault(name, under.version)) == under.version:
            return None
        return EvaluationRecord(name, under.version, reason=due.GONE.format(version=newer))

    def ended(self, record: EvaluationRecord) -> bool:
        """Evaluation `record` is recorded. Returns whether its version is the best so far."""
        under = self.underway
        if under is not None and (under.section.name, under.version) == (record.name, record.version):
            self.underway = None
        self._note(record)
        return due.best(self._series[record.name]) == record.version

    def _note(self, record: EvaluationRecord) -> None:
        self._recorded.add((record.name, record.version))
        section = self.sections[record.name]
        is_due = due.due(section.every, record.version, record.version, last=self._last)
        if not record.reason and (is_due or not section.keep_best):  # another one may have no checkpoint
            self._series[record.name].append((record.version, figure(record.metrics, section.by)))

    # ------------------------------------------------------------ consequences for the run

    def stop_reason(self) -> str:
        """Why the run is to stop; empty: the run goes on."""
        for name, section in self.sections.items():
            series = self._series[name]
            if section.patience is not None and due.since_best(series) >= section.patience:
                return (
                    f"evaluation {name} has not improved for {section.patience} evaluations "
                    f"(`patience`): its best is version {due.best(series)}"
                )
        return ""

    def spared(self, version: int) -> list[int]:
        """Versions up to `version` whose checkpoints are to stay: the best ones, and the ones to evaluate."""
        versions: set[int] = set()
        for name, section in self.sections.items():
            if not section.keep_best:
                continue
            first = max(self._looked[name] + 1, self._resumed)
            versions.update(due.due(section.every, first, version, last=self._last))
            versions.update({self.waiting.wanted[name]} if name in self.waiting.wanted else ())
            if self.underway is not None and self.underway.section is section:
                versions.add(self.underway.version)
            if (best := due.best(self._series[name])) is not None:
                versions.add(best)
        return sorted(versions)

    def describe_waits(self) -> list[str]:
        """What the evaluations wait for, for people."""
        if (under := self.underway) is not None:
            scores = f"{len(under.unscored)} of {len(under.completions)} to come"
            return [f"evaluation {under.section.name} of version {under.version}: {scores}"]
        return [f"evaluation {name} waits for version {v}" for name, v in self.waiting.wanted.items()]
