"""A group to read: the prompt, its row, every attempt side by side, and how the row went over the run. The
columns of the row are read again from the task's data: a ledger keeps the prompt alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from threading import Thread
from typing import Any

import msgspec

from millrace.config.schema import Config
from millrace.config.tables.task import FunctionTaskSection, HubTaskSection
from millrace.core.errors import MillraceError
from millrace.core.types import Group, Prompt, Trajectory
from millrace.ledger.reading import LedgerReader
from millrace.ledger.samples import Draw, Sample
from millrace.observe.shown_samples import clipped
from millrace.run_directory.run_directory import RunDirectory
from millrace.run_directory.views import View, trajectory_record
from millrace.tasks.chat import find_reference
from millrace.tasks.hub import hub_file
from millrace.tasks.parts import Parts
from millrace_ui.record.tokens import TOKENS_MAX, GroupAdvantages, Shown, advantages_of, reader_of, shown_of

DRAWS_MAX = 50
LOOK_S = 0.4
"""No index has rows: the search goes back from the newest group for about so long."""
_WIDTH = 4000


@dataclass(frozen=True, slots=True)
class RowHistory:
    """`draws`, the newest first, are those of the groups from `first` on. `whole`: these are all."""

    row_id: str
    draws: list[Draw]
    first: int
    whole: bool

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each draw that has one, the oldest first."""
        return [draw.reward_mean for draw in reversed(self.draws) if draw.reward_mean is not None]

    def as_json(self) -> dict[str, Any]:
        return {"looked_back_to_group": self.first, "draws": [asdict(draw) for draw in self.draws]}


def history_of(
    reader: LedgerReader, row_id: str, stop: int | None = None, look_s: float = LOOK_S
) -> RowHistory:
    """The newest draws of the row in groups before `stop`; None: in all groups. Raises LedgerError."""
    draws, until_s = list[Draw](), time.monotonic() + look_s
    first = reader.groups_end() if stop is None else stop
    while first > 0:
        start = max(0, first - _WIDTH)
        draws += reader.draws(row_id, start, first)
        first = start
        if len(draws) >= DRAWS_MAX or time.monotonic() >= until_s:
            break
    if len(draws) > DRAWS_MAX:
        first = draws[DRAWS_MAX - 1].group_id
    return RowHistory(row_id, draws[:DRAWS_MAX], first, whole=stop is None and not first)


MEMBERS_MAX = 64
PAGE_TOKENS = 16_000
"""The most tokens shown of a group, equal parts of its members."""


@dataclass(frozen=True, slots=True)
class ShownGroup:
    """`members` are the first `MEMBERS_MAX` of `num_members`, or one alone. `states` are of all. `ratios`:
    what the run recorded of trained over behavior probabilities, in words. `history` None: not asked for."""

    group_id: int
    row_id: str
    prompt: str
    num_members: int
    states: dict[str, int]
    members: list[Shown]
    advantages: GroupAdvantages
    ratios: str
    history: RowHistory | None


def read_group(
    run: RunDirectory, config: Config, tokenizer: Any, group_id: int, history_stop: int | None = None
) -> ShownGroup:
    """Raises LedgerError: there is no such group, the ledger is damaged, or a query takes too long."""
    with reader_of(run) as reader:
        group = reader.group(group_id)
        history = history_of(reader, group.row_id, history_stop)
        return _shown(reader, group, config, tokenizer, None, history)


def read_member(run: RunDirectory, config: Config, tokenizer: Any, trajectory_id: int) -> ShownGroup | None:
    """A trajectory alone, with the advantage in its group. None: there is none with this id. Raises
    LedgerError."""
    if not run.ledger.exists():
        return None
    with reader_of(run) as reader:
        if (one := reader.find(trajectory_id)) is None:
            return None
        return _shown(reader, reader.group(one.group_id), config, tokenizer, trajectory_id, None)


def shown_members(
    group: Group, members: Sequence[Trajectory], tokenizer: Any, advantages: GroupAdvantages
) -> list[Shown]:
    """Some members of a group, each with its part of `PAGE_TOKENS`."""
    prompt = Prompt(group.group_id, group.row_id, group.prompt, group.text)
    tokens_max = min(TOKENS_MAX, PAGE_TOKENS // max(1, len(members)))
    return [shown_of(Sample(prompt, one), tokenizer, tokens_max, advantages) for one in members]


def ratios_of(reader: LedgerReader, group: Group) -> str:
    """No ratio of a single token is recorded, but some of a step: in words."""
    versions = {one.trained_version for one in group.members if one.trained_version is not None}
    text = "The ratio of a token's probabilities, trained over behavior, is not recorded"
    if not versions:
        return f"{text}."
    metrics = reader.step(max(versions)).metrics
    known = {"mean": metrics.get("importance_mean"), "largest": metrics.get("importance_max")}
    figures = " and ".join(f"{name} {value:.4g}" for name, value in known.items() if value is not None)
    return f"{text}; the step to version {max(versions)} had {figures}." if figures else f"{text}."


def _shown(
    reader: LedgerReader,
    group: Group,
    config: Config,
    tokenizer: Any,
    only: int | None,
    history: RowHistory | None,
) -> ShownGroup:
    advantages = advantages_of(group, config)
    members = [one for one in group.members if only in (None, one.trajectory_id)][:MEMBERS_MAX]
    return ShownGroup(
        group_id=group.group_id,
        row_id=group.row_id,
        prompt=group.text,
        num_members=len(group.members),
        states=dict(Counter(one.state.value for one in group.members)),
        members=shown_members(group, members, tokenizer, advantages),
        advantages=advantages,
        ratios=ratios_of(reader, group),
        history=history,
    )


HISTORY_S = 5.0
"""The row's earlier groups are looked for about so long."""


def group_view(
    reader: LedgerReader, group: Group, config: Config, tokenizer: Any, advantages: GroupAdvantages
) -> View:
    """A group: its prompt, its row, all attempts, and each time that the row was drawn. What is not known is
    None, and a field `..._unknown` says why."""
    row = TaskRows(config, lambda: tokenizer).row(group.group_id, group.row_id, group.text, wait_s=None)

    def attempt(one: Trajectory) -> View:
        record = trajectory_record(group, one, tokenizer, tokens=False)
        return record | {"metrics": one.metrics} | of_member(one, advantages)

    return {
        "group_id": group.group_id,
        "row_id": group.row_id,
        "states": dict(Counter(one.state.value for one in group.members)),
        "prompt": group.text,
        "answer": row.answer,
        "columns": row.columns,
        "columns_unknown": row.unknown,
        "advantages_unknown": advantages.unknown,
        "ratios_unknown": ratios_of(reader, group),
        "attempts": [attempt(one) for one in group.members],
        "history": history_of(reader, group.row_id, look_s=HISTORY_S).as_json(),
    }


def of_member(one: Trajectory, advantages: GroupAdvantages) -> View:
    """`advantages`: one, or one of each turn; empty: it has none, or they are not known. `masked`: it was in
    the batch, and the algorithm left its tokens out."""
    return {
        "versions": sorted({version for version, _ in one.columns.sampled_runs}),
        "advantages": advantages.of(one),
        "masked": one.trajectory_id in advantages.masked,
    }


# ---------------------------------------------------------------- the row


WAIT_S = 0.6
"""A page waits so long for the task's data. Then it says that they are still read, and loads itself again."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """`answer` is the reference answer; None: the task has none. `columns` are the others, without the
    prompt. `unknown`: why nothing is known, in words. `again`: the data are still read."""

    answer: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    unknown: str = ""
    again: bool = False


class TaskRows:
    """The rows of a run's task. The first question begins to read the data, on a thread: that may
    take seconds. A user's function is never called, and nothing is fetched from a hub."""

    def __init__(self, config: Config, tokenizer: Callable[[], Any]) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._parts: Future[Parts] | None = None

    def row(self, group_id: int, row_id: str, prompt: str, wait_s: float | None = WAIT_S) -> TaskRow:
        """The row of a group. `wait_s` None: as long as it takes."""
        if why := _not_read(self._config):
            return TaskRow(unknown=f"The columns of the row are not recorded, and {why}.")
        if (tokenizer := self._tokenizer()) is None:
            return TaskRow(unknown="The columns of the row cannot be read: the model's tokenizer is gone.")
        if self._parts is None:
            self._parts = _begun(partial(Parts, self._config, tokenizer))
        try:
            parts = self._parts.result(wait_s)
            return self._row(parts, group_id, row_id, prompt)
        except TimeoutError:
            return TaskRow(unknown="The task's data are being read: the page loads itself again.", again=True)
        except MillraceError as error:
            return TaskRow(unknown=f"The columns of the row cannot be read: {error}")
        except Exception as error:  # a template, or a library that reads the data, may raise anything
            return TaskRow(unknown=f"The columns of the row cannot be read: {type(error).__name__}: {error}")

    def _row(self, parts: Parts, group_id: int, row_id: str, prompt: str) -> TaskRow:
        part, index = parts.locate(group_id)
        task = part.task
        adds = self._config.reward.kind == "environment"  # it writes into the prompt
        if part.row_id(index) != row_id or not (adds or task.prompt_text(index) == prompt):
            return TaskRow(unknown="The task's data were changed: this row had another prompt in the run.")
        columns = task.columns(index)
        answer = None if task.answer is None else find_reference(columns, task.answer)
        others = {
            name: _text(value) for name, value in columns.items() if name not in (task.prompt, task.answer)
        }
        return TaskRow(None if answer is None else _text(answer), others)


def _begun(read: Callable[[], Parts]) -> Future[Parts]:
    """The thread ends with the process, whatever it waits for."""
    future: Future[Parts] = Future()

    def work() -> None:
        try:
            future.set_result(read())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=work, name="task rows", daemon=True).start()
    return future


def _not_read(config: Config) -> str:
    """Why the data are not read, in words."""
    tasks = [part.one_task for part in config.by_part.values()]
    if any(isinstance(task, FunctionTaskSection) for task in tasks):
        return "the rows come from a function, which only a run calls"
    if any(isinstance(task, HubTaskSection) and not hub_file(task).exists() for task in tasks):
        return "this machine has no copy of the data set"
    return ""


def _text(value: Any) -> str:
    """A text as it is, and anything else as JSON. The middle of a long one is left out."""
    if isinstance(value, str):
        return clipped(value)
    try:
        return clipped(msgspec.json.encode(value, enc_hook=str).decode())
    except (TypeError, ValueError, RecursionError):
        return clipped(str(value))
