"""Agents that all wait at once, each with an open call, for `gateway.py`: their number, and their memory."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from common import say, sized
from gateway_played import Played

from millrace.episodes.gateway.agent_environment import AgentEnvironment
from millrace.runtime.process import children, descendants

T = TypeVar("T")
AT_ONCE = sized((64, 128, 256, 512), (4, 8))
LANES = 64
"""A worker serves so many episodes at once. More only wait."""


def waiting(played: Played) -> dict[str, float]:
    """The largest of the numbers `AT_ONCE` of agents that are all answered, and the memory of that round.
    The gateway and the launcher run already."""
    found = {"agents_at_once": 0.0}
    for number in AT_ONCE:
        figures, answered = round_of(played, number)
        say(f"{number} agents at once, {answered} answered: {figures}")
        if answered < number:
            break
        found = {"agents_at_once": float(number), **figures}
    return found


def round_of(played: Played, number: int) -> tuple[dict[str, float], int]:
    """Start so many agents, and then answer all of them. Returns memory and time for each agent, and how many
    were answered."""
    launcher = launcher_pid()
    before, began_s = private_bytes(os.getpid()) + private_bytes(launcher), time.monotonic()
    all_before = proportional_bytes([launcher])
    with ThreadPoolExecutor(LANES) as threads:
        begun = list(threads.map(lambda _: _attempt(lambda: played.begun(1)), range(number)))
        started_s = time.monotonic() - began_s
        environments = [one for one in begun if isinstance(one, AgentEnvironment)]
        grown = private_bytes(os.getpid()) + private_bytes(launcher) - before
        agents = proportional_bytes([launcher, *descendants(launcher)]) - all_before
        answers = list(threads.map(lambda one: _attempt(lambda: played.end(one)), environments))
        list(threads.map(lambda one: one.close(), environments))
    for one in [*begun, *answers]:
        if isinstance(one, Exception):
            say(f"not answered: {one}")
    figures = {
        "bytes_per_waiting_agent": grown / number,
        "bytes_of_its_processes": agents / number,
        "start_ms_per_agent": 1000 * started_s / number,
    }
    return figures, sum(isinstance(one, list) for one in answers)


def launcher_pid() -> int:
    """The process that forks the agents of this one."""
    return next(pid for pid in children(os.getpid()) if "inside.forked_agents" in _text(pid, "cmdline"))


def private_bytes(pid: int) -> int:
    """Private memory. Pages that a forked process shares count in full, so that a fork changes nothing."""
    return _kilobytes(_text(pid, "status"), "RssAnon")


def proportional_bytes(pids: Iterable[int]) -> int:
    """Memory of all these processes together. A shared page counts once among those that share it."""
    return sum(_kilobytes(_text(pid, "smaps_rollup"), "Pss") for pid in pids)


def _kilobytes(text: str, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
    return 1024 * int(match[1]) if match else 0


def _text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:  # it has ended
        return ""


def _attempt(action: Callable[[], T]) -> T | Exception:
    try:
        return action()
    except Exception as error:
        return error
