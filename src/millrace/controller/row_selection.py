"""Which prompts of the stream are taken, and which rest, by the pass rates of their rows in this run.

A decision is a pure function of the configuration, the run's seed, the group id, and the groups of committed
steps. A group under way does not count. So a resumed run decides as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from millrace.config.tables.task import RestSelection, Selection
from millrace.controller.state.run_state import RunState
from millrace.core.protocols import Ledger
from millrace.core.rounding import all_equal, reaches
from millrace.core.types import RESTS, GroupOutcome, Prompt, StepRecord, Work
from millrace.schedule.lengths import ROWS_MAX


@dataclass(slots=True)
class RowRecord:
    """The trained groups of a row. `correct` and `samples` are discounted counts of trajectories.
    `solved` and `hopeless` count the groups without signal since the last one of another kind."""

    correct: float = 0.0
    samples: float = 0.0
    solved: int = 0
    hopeless: int = 0

    @property
    def pass_rate(self) -> float:
        """By Laplace's rule of succession, so that no row is at 0 or 1 for certain."""
        return (self.correct + 1) / (self.samples + 2)

    def add(self, rewards: list[float], *, correct_at: float, discount: float) -> None:
        """Take in the rewards of a trained group, at least one."""
        correct = sum(reaches(reward, correct_at) for reward in rewards)
        self.correct = discount * self.correct + correct
        self.samples = discount * self.samples + len(rewards)
        equal = all_equal(rewards)
        self.solved = self.solved + 1 if equal and correct else 0
        self.hopeless = self.hopeless + 1 if equal and not correct else 0


def keep_probability(config: Selection, row: RowRecord) -> float:
    """The probability with which a prompt of a row is taken whose groups have been trained.

    Source: the variance p (1 - p) of a reward of 0 or 1 is the signal of its group; it is largest at 1/2.
    """
    if isinstance(config, RestSelection):
        return config.retry if max(row.solved, row.hopeless) >= config.groups else 1.0
    rate = row.pass_rate
    return max(config.retry, 4 * rate * (1 - rate))


def draw(seed: int, group_id: int) -> float:
    """A number in [0, 1), uniform over group ids."""
    digest = hashlib.blake2b(f"{seed}/selection/{group_id}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little") / 2**56


class RowSelection:
    """The rows that were trained so far. Its memory follows their number. Without a configuration every
    prompt is taken, and nothing is kept."""

    def __init__(self, config: Selection | None, seed: int) -> None:
        self._config, self._seed, self._version = config, seed, 0
        self._rows: dict[str, RowRecord] = {}
        self._rested = 0  # prompts since the last figures
        self._num = Counter[str]()  # rows whose last group was solved, or hopeless

    def why_rests(self, prompt: Prompt) -> str:
        """The reason why a prompt is not taken; empty: it is taken. A row without trained groups is."""
        config, row = self._config, self._rows.get(prompt.row_id)
        if config is None or row is None:
            return ""
        probability = keep_probability(config, row)
        if draw(self._seed, prompt.group_id) < probability:
            return ""
        self._rested += 1
        solved, hopeless = row.solved, row.hopeless
        what = f"solved in its last {solved}" if solved else f"hopeless in its last {hopeless}"
        rate = f"{what} groups" if solved or hopeless else "of little signal"
        return f"{RESTS}{rate}, pass rate {row.pass_rate:.3f} at version {self._version}"

    def learn(self, ledger: Ledger, steps: Iterable[StepRecord]) -> None:
        """Take in committed steps, in order."""
        if self._config is not None:
            for step in steps:
                self.take_in(step.version, ledger.outcomes(step))

    def take_in(self, version: int, outcomes: Iterable[GroupOutcome]) -> None:
        """Take in the trained groups of the step that made `version`."""
        config = self._config
        assert config is not None
        self._version = version
        discount = 1.0 if isinstance(config, RestSelection) else config.discount
        for one in sorted(outcomes, key=lambda outcome: outcome.group_id):
            row = self._rows.setdefault(one.row_id, RowRecord())
            self._num.subtract(_ends(row))
            row.add(one.rewards, correct_at=config.correct_at, discount=discount)
            self._num.update(_ends(row))

    def figures(self) -> dict[str, Any]:
        """The field `selection` of a step: prompts that rested since the last step, and of the rows that were
        ever trained, the share whose last group was solved, or hopeless."""
        if self._config is None:
            return {}
        rested, self._rested, rows = self._rested, 0, len(self._rows)
        shares = {end: self._num[end] / max(rows, 1) for end in ("solved", "hopeless")}
        return {"selection": {"rested": rested, "rows": rows, **shares}}


def _ends(row: RowRecord) -> list[str]:
    return [end for end in ("solved", "hopeless") if getattr(row, end)]


COMPLETIONS = 2
TOKENS_MAX = 1 << 14
"""Tokens of a hint. They take 64 KiB of a message, and a millisecond or two of the controller."""
RESUMED_MAX, HINTED_MAX = 1 << 16, 1 << 14  # groups that a resumed run looks up; hints that are remembered


class EarlierOfRows:
    """The newest trained group of each row; tokens stay in the ledger. Of more than `ROWS_MAX` rows those
    are forgotten that were trained longest ago. Without `rollout.drafts = "earlier"` nothing is kept, and
    works stay as they are."""

    def __init__(self, drafts: str | None, ledger: Ledger) -> None:
        """`drafts`: `rollout.drafts`."""
        self._ledger = ledger if drafts == "earlier" else None
        self._groups: OrderedDict[str, tuple[int, int]] = OrderedDict()  # its version, and its id
        self._hinted: OrderedDict[tuple[str, int, int], None] = OrderedDict()
        if self._ledger is not None:
            steps, num = list[StepRecord](), 0
            for step in reversed(ledger.steps_after(0)):
                num += len(step.group_ids)
                if num <= RESUMED_MAX:
                    steps.append(step)
            self.learn(reversed(steps))

    def learn(self, steps: Iterable[StepRecord]) -> None:
        """Take in committed steps, in order."""
        if self._ledger is not None:
            for step in steps:
                for one in self._ledger.outcomes(step):
                    self._groups[one.row_id] = step.version, one.group_id
                    self._groups.move_to_end(one.row_id)
            while len(self._groups) > ROWS_MAX:
                self._groups.popitem(last=False)

    def hinted(self, works: list[Work], state: RunState, replica: str) -> list[Work]:
        """`works`, of which the first of each group has a hint that `replica` did not get before."""
        if self._ledger is None:
            return works
        epoch = state.replicas[replica].epoch
        return [
            replace(work, earlier=earlier) if (earlier := self._news(work, state, replica, epoch)) else work
            for work in works
        ]

    def figures(self, works: list[Work]) -> dict[str, int]:
        """The field `earlier_tokens` of a `leased` event, where drafts are made of earlier completions."""
        if self._ledger is None:
            return {}
        return {"earlier_tokens": sum(len(tokens) for work in works for tokens in work.earlier)}

    def _news(self, work: Work, state: RunState, replica: str, epoch: int) -> list[array[int]]:
        group = self._groups.get(state.groups[work.group_id].group.row_id)
        hint = replica, epoch, work.group_id
        if group is None or self._ledger is None or hint in self._hinted:
            return []
        self._hinted[hint] = None
        if len(self._hinted) > HINTED_MAX:
            self._hinted.popitem(last=False)
        tokens = self._ledger.completions(*group, COMPLETIONS)
        room = TOKENS_MAX // max(1, len(tokens))
        return [completion[:room] for completion in tokens]
