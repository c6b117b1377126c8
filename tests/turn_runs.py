"""A small run of episodes of several turns: a random model, one of whose eight tokens ends a turn."""

from __future__ import annotations

import shutil
from pathlib import Path

from millrace.conversations.tokenizer import make_character_tokenizer
from tests import acting
from tests.runs import CONFIG, make_model

TASK = """
[task]
kind = "function"
path = "acting.py:rows"
answer = "none"

[reward]
kind = "environment"
path = "acting.py:Acting"
turns = 4
timeout_s = 30.0
workers = 2

[batch]
"""


def make_start(directory: Path) -> Path:
    """A model, an environment and a configuration. Returns the latter."""
    make_character_tokenizer(directory / "start", "ab>")
    make_model(directory / "start")
    shutil.copy(acting.__file__, directory / "acting.py")
    head, _, rest = CONFIG.partition("[task]")
    path = directory / "run.toml"
    path.write_text(head + TASK + rest.partition("[batch]\n")[2].replace("tokens = 32", "tokens = 64"))
    return path


def make_agent_start(directory: Path) -> Path:
    """As `make_start`. The environment is an agent that asks by HTTP."""
    path = make_start(directory)
    shutil.copy(Path(acting.__file__).with_name("acting_agent.py"), directory)
    text = path.read_text().replace('path = "acting.py:Acting"', 'path = "acting_agent.py:reward"')
    path.write_text(text.replace("[batch]", '[reward.agent]\nfunction = "acting_agent.py:solve"\n\n[batch]'))
    return path
