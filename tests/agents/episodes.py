"""One episode of an environment by hand, in the reward worker of a run, as `millrace try-task` plays it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.config.load import load
from millrace.evaluation.trials import play

CONFIG = """
steps = 1
model.path = "{model}"
task = {{ kind = "file", path = "{rows}", answer = "none" }}
reward = {{ kind = "environment", path = "{path}", turns = 12, timeout_s = 60.0, memory_mb = 4096 }}
sampling.max_tokens = 256
rollout.max_sequence_tokens = 4096
"""


def play_by_hand(
    path: str, row: Mapping[str, Any], *actions: str, model: Path, directory: Path
) -> dict[str, Any]:
    rows, config = directory / "rows.jsonl", directory / "run.toml"
    rows.write_text(json.dumps(row))
    config.write_text(CONFIG.format(model=model, rows=rows, path=path))
    return play(load(config), actions)
