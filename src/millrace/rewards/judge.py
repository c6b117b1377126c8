"""The reward of a judge: a language model that grades completions by a rubric."""

from __future__ import annotations

import json
import sqlite3
from asyncio import Lock
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from statistics import fmean
from typing import Any
from weakref import WeakValueDictionary

from millrace.config.tables.reward_kinds import JudgeRewardSection
from millrace.core.errors import DataError, RewardError, StorageError, boundary
from millrace.rewards.judge_client import JudgeClient
from millrace.rewards.judge_prompts import JudgeQuestion, as_text, pairwise, scalar
from millrace.rewards.references import normal, to_json, unwrapped, written
from millrace.tasks.rows import Row, find_column


class JudgeReward:
    """From 0 to 1: a score on a scale, or the mean of two comparisons with the reference, one in each order.

    A judge that gives no judgement fails the reward. Metrics:
        judge_requests         requests for the reward, 0 if all of its judgements were kept
        judge_agreement        1 - |reward - second reward|, of completions that are graded twice
        judge_second_failed    1 if the second grading failed, which does not fail the reward
        judge_orders_agree     1 if both orders say the same; pairwise only

    Args:
        prompt: the column with the prompt.
        run_dir: the directory that keeps judgements; None: they are not kept.
        workers: reward workers of the run.
    Raises:
        ConfigError: there is no API key where the configuration says.
    """

    is_async = True
    file: str | None = None

    def __init__(
        self, config: JudgeRewardSection, prompt: str, *, run_dir: Path | None = None, workers: int = 1
    ) -> None:
        self.name = f"judge {config.model}"
        self._config, self._prompt = config, prompt
        self._client, self._kept = JudgeClient(config, workers), Judgements(run_dir)
        self._locks: WeakValueDictionary[str, Lock] = WeakValueDictionary()

    async def __call__(self, completion: str, answer: Any, columns: Row) -> dict[str, float]:
        questions = self._questions(completion, answer, columns)
        values, num_requests = await self._judge(questions, 0, self._config.attempts)
        reward = fmean(values)
        metrics = {"reward": reward, "judge_requests": float(num_requests)}
        if len(values) == 2:
            metrics["judge_orders_agree"] = float(values[0] == values[1])
        if self._is_asked_twice(questions[0]):
            metrics |= await self._again(questions, reward)
        return metrics

    async def _again(self, questions: list[JudgeQuestion], reward: float) -> dict[str, float]:
        try:
            values, _ = await self._judge(questions, 1, 1)
        except RewardError:
            return {"judge_second_failed": 1.0}
        return {"judge_second_failed": 0.0, "judge_agreement": 1 - abs(reward - fmean(values))}

    async def _judge(
        self, questions: list[JudgeQuestion], asking: int, attempts: int
    ) -> tuple[list[float], int]:
        """A judgement of each question, and the number of requests."""
        values, num_requests = [], 0
        for messages, read in questions:
            body = self._client.body(messages)
            key = key_of(body, asking)
            async with self._locks.setdefault(key, Lock()):  # an equal completion may be on its way
                if (value := self._kept.find(key)) is None:
                    value, count = await self._client.ask(body, read, key, attempts)
                    num_requests += count
                    self._kept.keep(key, value)
            values.append(value)
        return values, num_requests

    def _questions(self, completion: str, answer: Any, columns: Row) -> list[JudgeQuestion]:
        """Raises: DataError: the row has no rubric, or no reference answer where one is needed."""
        config, prompt = self._config, as_text(find_column(columns, self._prompt))
        rubric = config.rubric or find_column(columns, config.rubric_column or "")
        if not isinstance(rubric, str) or not rubric.strip():
            raise DataError(
                f"the row has no rubric: `reward.rubric_column` names the column {config.rubric_column!r}"
            )
        needs_answer = config.show_answer or config.mode == "pairwise"
        if needs_answer and answer is None:
            raise DataError("the judge needs a reference answer, and the row has none: see `task.answer`")
        answer = unwrapped(answer)
        is_composed = isinstance(answer, list | Mapping)
        if config.mode == "pairwise" and is_composed:
            raise DataError(
                f"the answer is a {'list' if isinstance(answer, list) else 'table'}, and a pairwise judge "
                "compares with one text: name it behind a dot in `task.answer`"
            )
        reference = to_json(normal(answer)) if is_composed else written(answer)
        if config.mode == "pairwise":
            return [pairwise(rubric, prompt, completion, reference, first=first) for first in (True, False)]
        shown = reference if config.show_answer else None
        return [scalar(rubric, prompt, completion, shown, config.score_min, config.score_max)]

    def _is_asked_twice(self, question: JudgeQuestion) -> bool:
        """Decided by the question alone, so that a resumed run asks the same ones twice."""
        key = key_of(self._client.body(question.messages), 0)
        return int(key[:8], 16) < self._config.asked_twice * 16**8


FILE = "judgements.sqlite"
BUSY_S = 5.0
"""Longest wait for another reward worker's write."""


class Judgements:
    """Judgements by the digest of their question. All reward workers of a run share the file.

    `directory` None, or not on this host: nothing is kept.
    """

    def __init__(self, directory: Path | None) -> None:
        self._file = None if directory is None or not directory.is_dir() else directory / FILE
        if self._file is None:
            return
        with self._storing():
            # A worker is made in one thread, and its loop, which alone asks, runs in another.
            self._database = sqlite3.connect(
                self._file, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS judgements (key TEXT PRIMARY KEY, value REAL NOT NULL) "
                "WITHOUT ROWID"
            )

    def find(self, key: str) -> float | None:
        """Raises: StorageError: the file cannot be read."""
        if self._file is None:
            return None
        with self._storing():
            row = self._database.execute("SELECT value FROM judgements WHERE key = ?", (key,)).fetchone()
        return None if row is None else float(row[0])

    def keep(self, key: str, value: float) -> None:
        """Raises: StorageError: the file cannot be written."""
        if self._file is not None:
            with self._storing():
                self._database.execute("INSERT OR IGNORE INTO judgements VALUES (?, ?)", (key, value))

    def _storing(self) -> Any:
        return boundary(FILE, "judgements of the run cannot be kept", StorageError)


def key_of(body: dict[str, Any], asking: int) -> str:
    """The digest of a request, which has model, rubric, prompt and completion. `asking`: which of several
    times the same is asked."""
    canonical = json.dumps([body, asking], sort_keys=True, separators=(",", ":"))
    return blake2b(canonical.encode(), digest_size=16).hexdigest()
