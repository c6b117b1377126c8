"""How a program ended, and what it left: bytes alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class ProgramOutcome(Enum):
    """How a program fared. That the sandbox itself failed is no outcome: it is a SandboxError."""

    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    OUT_OF_MEMORY = "out of memory"
    KILLED = "killed"
    MALFORMED = "malformed"


@dataclass(frozen=True)
class CallAnswer:
    """What one call gave: a value of JSON, or the text of an exception.

    `left`: of a call that gave None, the first argument as it is then, in a list.
    """

    value: Any = None
    error: str | None = None
    left: list[Any] = field(default_factory=list, compare=False)


@dataclass(frozen=True)
class Execution:
    """A program that is over. All its processes are dead, and its directory is removed.

    `fault` says why it ended before its last answer; None: it did not. `stdout` is what a program without a
    function printed. `output` is the end of what it printed besides.
    """

    answers: list[CallAnswer] = field(default_factory=list)
    stdout: bytes = b""
    output: str = ""
    fault: ProgramOutcome | None = None
    reason: str = ""
    cpu_s: float = 0.0
    wall_s: float = 0.0
