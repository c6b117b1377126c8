"""What both peer scripts read and write: a job (JSON file), and one JSON line per optimizer step."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


class Job:
    """`start`, `prompts` (JSON lines in the order to be trained; a chat as its template renders it), `out`,
    `steps`, `lr`, `temperature`, `max_tokens`, `extract`, `groups`, `group_size`, `staleness_max`, `seed`,
    `device`, `dtype` (bfloat16: by autocast), `threads` (of each process)."""

    def __init__(self, path: str) -> None:
        self.__dict__.update(json.loads(Path(path).read_text()))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the job has no {name!r}")

    def rows(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in Path(self.prompts).read_bytes().splitlines()]


class StepLog:
    """Rows {step, t, tokens, reward}: seconds since the log was opened, trained completion tokens, mean
    reward."""

    def __init__(self, path: str) -> None:
        self._file, self._began = open(path, "w"), time.perf_counter()  # noqa: SIM115 - open until exit

    def write(self, step: int, *, tokens: float, reward: float, **more: float) -> None:
        row = {"step": step, "t": time.perf_counter() - self._began, "tokens": tokens, "reward": reward}
        self._file.write(json.dumps(row | more) + "\n")
        self._file.flush()


def read_job() -> Job:
    return Job(sys.argv[1])
