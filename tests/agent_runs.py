"""A small run of agents: as `tests.turn_runs`, and the environment is a program that asks by HTTP."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests import acting
from tests.turn_runs import make_start


def make_agents(directory: Path) -> Path:
    """A model, an agent and a configuration. Returns the latter."""
    path = make_start(directory)
    shutil.copy(Path(acting.__file__).with_name("acting_agent.py"), directory)
    text = path.read_text().replace('path = "acting.py:Acting"', 'path = "acting_agent.py:reward"')
    path.write_text(text.replace("[batch]", '[reward.agent]\nfunction = "acting_agent.py:solve"\n\n[batch]'))
    return path
