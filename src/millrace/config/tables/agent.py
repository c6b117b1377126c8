"""`[reward.agent]`: an agent as a program of its own."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from millrace.config.tables.section import Count, Seconds, Section


class AgentSection(Section):
    command: tuple[str, ...] = ()
    """The program and its arguments. `{column}` becomes that column of the row. `OPENAI_BASE_URL`,
    `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY` say where it asks for turns."""
    function: str | None = None
    """In place of a command: `package.module:name` or `file.py:name`, a function
    `def solve(row, base_url, key)`. It runs in a process of its own. `"none"`: there is a command."""
    variables: dict[str, str] = Field(default={})
    """More environment variables of the agent."""
    task_directory: str | None = None
    """The column with a task directory in Harbor's form: `instruction.md`, files, and `tests/test.sh`. The
    agent gets the files, and the instruction as the column `instruction`. `"none"`: there is none."""
    recovery: Literal["replayed", "failed"] = "replayed"
    """What follows if the process of an episode is lost. `"replayed"`: a new agent gets the recorded turns.
    If it asks something else, the trajectory begins again. `"failed"`: the trajectory fails."""
    end_s: Seconds = 2.0
    """How long an agent may run on after a budget has ended its episode. Then it is killed. This time is a
    part of `reward.timeout_s`. The rest of that is the deadline from one request to the next."""
    memory_mb: Count = 2048
    """Memory of one agent."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if bool(self.command) == (self.function is not None):
            raise ValueError("`reward.agent` needs either `command` or `function`")
        return self
