"""Runs with hostile rewards and rows. Each run must end with closed accounts, or with a clear refusal."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Sequence
from pathlib import Path

from millrace.config.load import load
from millrace.core.errors import DeadlineExceeded
from millrace_chaos import aftermath
from millrace_chaos.child_run import ChildRun
from millrace_chaos.hostile_reward import HOSTILE
from millrace_chaos.sessions import AttackedRun, ended, refusal_problem, session

ROWS = 12  # few, so that a run of some steps draws every broken row among them
TIMEOUT_S = 2
MEMORY_MB = 512
HUGE_CHARS = 10_000_000


def write_rows(file: Path, rng: random.Random) -> None:
    """Write rows with words to repeat, and broken rows between them."""
    odd = (
        "",
        "{",
        "[1, 2]",
        "null",
        "\x00\x01",
        '{"prompt": 7, "answer": "x"}',
        '{"prompt": "", "answer": ""}',
        '{"answer": "no prompt"}',
        json.dumps({"prompt": "a" * HUGE_CHARS, "answer": "a"}),
        json.dumps({"prompt": "\x1b[2Ja", "answer": "b"}),
        "[" * 100_000,
        '{"prompt": "\\ud800", "answer": "a"}',
    )
    lines = []
    for _ in range(ROWS):
        word = "".join(rng.choices(string.ascii_lowercase, k=4))
        lines.append(json.dumps({"prompt": word, "answer": word}))
    for line in odd:
        lines.insert(rng.randrange(len(lines) + 1), line)
    file.write_text("\n".join(lines) + "\n")


def try_hostile(
    config_file: Path,
    root: Path,
    overrides: Sequence[str],
    count: int,
    seed: int,
    on_run: Callable[[AttackedRun], None] = lambda run: None,
) -> list[AttackedRun]:
    """Make `count` runs, each with the next reward of `HOSTILE` and with its own rows."""
    attacked = []
    for number in range(count):
        reward = HOSTILE[number % len(HOSTILE)].__name__
        rows = root / f"{number:03d}.jsonl"
        write_rows(rows, random.Random(f"{seed} {number}"))
        sets = [
            *overrides,
            f'task={{kind = "file", path = "{rows}", template = "{{prompt}}>"}}',
            f'reward={{kind = "function", path = "{__package__}.hostile_reward:{reward}", '
            f"timeout_s = {TIMEOUT_S}, memory_mb = {MEMORY_MB}}}",
        ]
        attacked.append(_try(reward, ChildRun(config_file, root / f"{number:03d}", sets), config_file, sets))
        on_run(attacked[-1])
    return attacked


def _try(reward: str, run: ChildRun, config_file: Path, sets: list[str]) -> AttackedRun:
    kind, config = f"reward {reward}", load(config_file, sets)
    with ended(run):
        try:
            code, words = session(run)
        except DeadlineExceeded as error:
            return AttackedRun(kind, reward, "hung", str(error))
        if "\x1b]0;owned" in words or "\x1b[2J" in words:
            return AttackedRun(kind, reward, "went on", "its words reached the terminal raw")
        if code:
            return AttackedRun(kind, reward, "refused", refusal_problem(code, words, ["reward", "rows"]))
        checks = aftermath.check_ledger(run.directory.ledger, config)
        wrong = [f"{check.claim} ({check.detail})" for check in checks if not check.holds]
        return AttackedRun(kind, reward, "went on", "; ".join(wrong))
