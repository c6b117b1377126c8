"""What `millrace show --group` shows, as plain JSON types."""

from __future__ import annotations

from collections import Counter
from typing import Any

from millrace.config.schema import Config
from millrace.core.turns.turn_bounds import measured
from millrace.core.types import Group, Trajectory
from millrace.ledger.reading.reader import LedgerReader
from millrace.run_directory.views import View, trajectory_record
from millrace_ui.record.group.advantages import GroupAdvantages
from millrace_ui.record.group.groups import ratios_of
from millrace_ui.record.group.row_history import history_of
from millrace_ui.record.group.task_row import TaskRows

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
        return record | {"metrics": measured(one.metrics)} | of_member(one, advantages)

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
