"""What is wrong with the text of a configuration: file, line, key, and what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.config.load import load
from millrace.core.errors import ConfigError

CASES = [
    (
        'steps = 3\n[model]\npath = "m"\n[optimizer]\nlr = 1\nlr = 2\n',
        "`optimizer.lr` is set twice, in lines 5 and 6.\n  Leave one of them out",
        6,
    ),
    (
        '[model]\npath = "m"\n\n[task]\nkind = "gym"\n\n[model]\ndtype = "float32"\n',
        "`[model]` stands twice, in lines 1 and 7.\n  Put all its keys under one of them",
        7,
    ),
    (
        "[model]\npath = ../models/qwen  # ours\n",
        '`model.path` (../models/qwen) is text without quotes.\n  Write path = "../models/qwen"',
        2,
    ),
    ("allow = [one]\n", "`allow` ([one]) is no value of TOML.\n  Text stands in quotes", 1),
    (
        "[trainer]\noffload = True\n",
        "`trainer.offload` (True) is no value of TOML.\n  Write offload = true",
        2,
    ),
    ("[adapter]\nrank = None\n", '`adapter.rank` (None) is text without quotes.\n  Write rank = "none"', 2),
    ("[optimizer]\nlr = .1\n", "`optimizer.lr` (.1) is no value of TOML.\n  Write lr = 0.1", 2),
    ("model:\n  path: ../m\n", "this is YAML, and a configuration is TOML.\n  Write `[model]`", 1),
    ("steps: 3\n", "this is YAML, and a configuration is TOML.\n  Write `steps = 3`", 1),
    ('# mine\n{"steps": 3}\n', "this is JSON, and a configuration is TOML.\n  Write `key = value`", 2),
    ('[model]\npath = "m\n', '`model.path` ("m) has no closing quote.\n  Write path = "m"', 2),
    ("steps = = 3\n", "this line is no TOML (Invalid value): `steps = = 3`.\n  Write `key = value`", 1),
    (
        '[model]\npath = "C:\\users\\m"\n',
        "`model.path` has a backslash in double quotes.\n  Write path = 'C:\\users\\m'",
        2,
    ),
    ("[model\n", "this line is no TOML", 1),
    ('steps = """\n', "the file ends in the middle of a value (Unterminated string)", 1),
]


@pytest.mark.parametrize(("text", "message", "line"), CASES)
def test_a_mistake_in_the_text_names_file_line_key_and_remedy(
    tmp_path: Path, text: str, message: str, line: int
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert message in str(caught.value)
    assert str(caught.value).endswith(f"   [{path}:{line}]")
