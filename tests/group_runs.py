"""A run whose groups have rows in a file, several attempts each, and several draws of a row."""

from __future__ import annotations

import json
from pathlib import Path

from millrace.config.freeze import record
from millrace.config.load import Source, combine, read_mapping
from millrace.config.schema import Config
from millrace.conversations.tokenizer import load_tokenizer, make_character_tokenizer
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.types import Finish, Group, State, StepRecord, Trajectory
from millrace.ledger.sqlite import SqliteLedger
from millrace.observe.sinks.jsonl import EventLog, MetricsLog
from millrace.run_directory.run_directory import RunDirectory
from millrace.tasks.parts import Parts
from tests.look_runs import events

HOSTILE = "<script>alert(1)</script>"
ROWS, MEMBERS = 3, 4
WORDS = ["abcd", "dcba", "ab", "abc d e"]


def write_group_run(
    path: Path, *, steps: int = 9, algorithm: str = "grpo", max_tokens: int = 16
) -> RunDirectory:
    """One group a step: each row is drawn every third step. The last group has a failed member."""
    path.mkdir(parents=True)
    run, model = RunDirectory(path), path.parent / "start of groups"
    if not model.exists():
        model.mkdir()
        make_character_tokenizer(model, "abcdefghijklmnopqrstuvwxyz <>/()1")
    data = path.parent / "words.jsonl"
    rows = [
        {"prompt": f"{HOSTILE} {n}", "answer": f"answer <b>{n}</b>", "level": n, "tags": [HOSTILE, "x"]}
        for n in range(ROWS)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "steps": steps,
        "model": {"path": str(model)},
        "task": {"kind": "file", "path": str(data), "answer": "answer"},
        "reward": {"kind": "exact"},
        "algorithm": {"kind": algorithm},
        "sampling": {"max_tokens": max_tokens},
        "batch": {"prompts": 1, "group_size": MEMBERS},
    }
    config = combine(Config, Source({}, {}), read_mapping(Config, tree, "a test"))
    record(config, run.config)
    for log in EventLog(run.events), MetricsLog(run.metrics):
        for event in events(steps):
            log(event)
        log.close()
    _write_ledger(run.ledger, config, steps)
    return run


def _write_ledger(path: Path, config: Config, steps: int) -> None:
    tokenizer = load_tokenizer(config.model.path)
    parts, ledger = Parts(config, tokenizer), SqliteLedger(path, run={})
    for group_id in range(steps):
        part, row = parts.locate(group_id)
        text = part.task.prompt_text(row)
        members = [_member(group_id, place, tokenizer) for place in range(MEMBERS)]
        if group_id == steps - 1:
            members[-1].state, members[-1].reason, members[-1].reward = (
                State.FAILED,
                f"raised {HOSTILE}",
                None,
            )
        group = Group(group_id, part.row_id(row), token_array([5, 6]), text, members)
        ledger.admit([group])
        ledger.flush()
        ids = [member.trajectory_id for member in members if member.reward is not None]
        metrics = {"loss": 0.5, "importance_mean": 1.0, "importance_max": 1.25}
        ledger.commit_step(StepRecord(group_id + 1, [group_id], ids, metrics))
    ledger.close()


def _member(group_id: int, place: int, tokenizer: object) -> Trajectory:
    """Its length, reward and versions follow from its place in the group."""
    tokens = tokenizer.encode(WORDS[place], add_special_tokens=False)  # type: ignore[attr-defined]
    versions = [max(0, group_id - 1)] + [group_id] * (len(tokens) - 1)
    member = Trajectory(MEMBERS * group_id + place, group_id)
    member.columns = TokenColumns.of(tokens, [-0.4 * n for n in range(len(tokens))], versions)
    member.finish = Finish.LENGTH if place == MEMBERS - 1 else Finish.STOP
    member.reward = [1.0, 0.0, 0.5, 0.25][place] * (1 if group_id % 2 else 0.5)
    member.metrics = {"correct": float(place == 0), "quality": 0.1 * place}
    member.replica, member.lease, member.state = "replica-0", 1, State.BUFFERED
    return member
