"""Reference programs of the first rows are run before a run. One that fails its tests is named, by row."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest

from millrace.checks.first_try import try_first
from millrace.config.schema import Config
from millrace.conversations.tokenizer import make_character_tokenizer
from millrace.core.errors import DataError, SandboxError
from millrace.evaluation.trials import judge, run_trials
from millrace_sandbox.sandbox import Sandbox

pytestmark = pytest.mark.usefixtures("warm")

PROMPT = 'def square(x):\n    """Square a number."""\n'
ROW = {"prompt": PROMPT, "tests": ["assert square(3) == 9"], "canonical_solution": "    return x * x\n"}


OF_BIGCODEBENCH = {
    "prompt": "Begin with:\n```\nimport math\ndef square(x):\n```",
    "code_prompt": "import math\ndef square(x):\n",
    "canonical_solution": "    return math.prod([x, x])\n",
}
OF_SYNTHETIC = {"canonical_solution": None, "gold_standard_solution": "def square(x):\n    return x * x\n"}
OF_SWE = {"FAIL_TO_PASS": '["t.py::test_a"]', "tests": '["t.py::test_a"]'}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        Sandbox().close()
    except SandboxError as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp("model")
    make_character_tokenizer(directory, string.printable)
    return directory


def config_for(model: Path, directory: Path, *rows: dict[str, Any]) -> Config:
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Config.model_validate(
        {
            "model": {"path": str(model)},
            "task": {"kind": "file", "path": str(directory / "rows.jsonl"), "answer": None},
            "reward": {"kind": "code"},
            "sampling": {"max_tokens": 200},
        }
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"canonical_solution": "    return x + x\n"}, "rows.jsonl:2: .*gets 0, not 1"),
        ({"canonical_solution": None, "completion": "    return 1\n"}, "rows.jsonl:2: .*gets 0, not 1"),
        ({"canonical_solution": None, "solution_code": "    return 1\n"}, "rows.jsonl:2: .*gets 0, not 1"),
        ({"tests": ["assert square(3) == 10"]}, "rows.jsonl:2: .*gets 0, not 1"),
        ({**OF_SYNTHETIC, "gold_standard_solution": "def square(x): pass"}, "rows.jsonl:2: .*gets 0, not 1"),
        ({**OF_BIGCODEBENCH, "canonical_solution": "    return x\n"}, "rows.jsonl:2: .*gets 0, not 1"),
        (OF_SWE, "rows.jsonl:2: .*'FAIL_TO_PASS'.*Leave such rows out"),
        (
            {"tests": None, "test": ["assert square(3) == 9"]},
            "rows.jsonl:2: .*names the column 'tests', and there are only .*'test'",
        ),
        ({"tests": ["assert nearly(square(3), 9)"], "entry_point": "square"}, "rows.jsonl:2: .*nearly"),
    ],
)
def test_a_reference_program_that_fails_refuses_the_run_with_its_row(
    model: Path, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    with pytest.raises(DataError, match=says):
        try_first(config_for(model, tmp_path, ROW, {**ROW, **change}))


def test_a_run_whose_reference_programs_pass_begins(model: Path, tmp_path: Path) -> None:
    without = {name: value for name, value in ROW.items() if name != "canonical_solution"}
    try_first(config_for(model, tmp_path, ROW, without, {**ROW, **OF_BIGCODEBENCH}, {**ROW, **OF_SYNTHETIC}))


def test_a_trial_names_the_row_of_a_reference_program_that_fails(model: Path, tmp_path: Path) -> None:
    config = config_for(model, tmp_path, {**ROW, "tests": ["assert square(3) == 10"]})
    said = " ".join(judge(run_trials(config, 1, [])))
    assert "1 reference answers have not full marks, the first: " in said and "rows.jsonl:1" in said
