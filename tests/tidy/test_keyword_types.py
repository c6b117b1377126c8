"""An editor completes the keys of a configuration, and a type checker refuses others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api
from scripts.pages.keyword_types import stub

import millrace
from tests.tidy.sources import SOURCE

FILE = SOURCE / "millrace" / "api" / "keys.pyi"
USES = """
from typing import Unpack
from keys import TrainKeys
def train(**keywords: Unpack[TrainKeys]) -> None: ...
"""
RIGHT = (
    'optimizer={"lr": 1e-4}, steps=3',
    'task={"kind": "file", "path": "rows.jsonl"}',
    'task={"template": "{word}>"}',
    'evaluations=[{"name": "a", "every": 2}]',
    'selection="none", rollout={"servers": ["http://a"]}',
)
WRONG = (
    'optimizer={"learning_rate": 1e-4}',
    'steps="3"',
    'task={"kind": "file", "nam": "a"}',
    "optimiser={}",
)


def test_the_types_of_keywords_are_those_of_the_schema() -> None:
    assert FILE.read_text(encoding="utf-8") == stub(), "run `make docs`"


@pytest.mark.parametrize(
    ("function", "keys"),
    [(millrace.train, "TrainKeys"), (millrace.evaluate, "EvaluateKeys"), (millrace.Run.resume, "ResumeKeys")],
)
def test_the_functions_take_the_typed_keywords(function: object, keys: str) -> None:
    assert function.__annotations__["keywords"] == f"Unpack[{keys}]"


def test_a_type_checker_knows_right_keys_from_wrong_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys.pyi").write_text(stub())
    (tmp_path / "uses.py").write_text(USES + "".join(f"train({one})\n" for one in (*RIGHT, *WRONG)))
    monkeypatch.chdir(tmp_path)
    said, _, _ = api.run(["uses.py", "--strict", "--config-file=", "--no-incremental"])
    lines = {int(line) for line in re.findall(r"^uses.py:(\d+): error", said, re.MULTILINE)}
    first = USES.count("\n") + 1 + len(RIGHT)
    assert lines == set(range(first, first + len(WRONG))), said
