"""How an agent ended, and what it may use."""

from __future__ import annotations

from typing import Any

import msgspec

MEMORY_MB = 4096
"""For whoever has no number of their own."""


class AgentLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of each process of an agent; None: no bound.

    `memory_mb` counts private writable memory (RLIMIT_DATA). An agent that is a function may use so much
    beyond what its imports take. The number of processes has no bound: the kernel counts them per user.
    """

    memory_mb: int | None
    open_files: int = 1024
    cpu_s: int | None = None


class AgentEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What is known when an agent's first process has ended.

    `signal` is a name such as "SIGKILL", and `exit_code` is then None. `killed`: the worker asked for the
    end. `last_words` are the last 64 KiB of stdout and stderr together. `dropped_bytes` were printed, and
    agent.log had no room for them. `returned` is what a function returned, as JSON has it.
    """

    exit_code: int | None
    signal: str | None
    killed: bool
    last_words: str
    dropped_bytes: int
    directory: str
    returned: Any
    seconds: float
