"""Agents with the SDKs of OpenAI and Anthropic train a tiny model, and a replica is killed half-way.

    python benchmarks/agents.py [--json] [--seeds 3] [--steps 16] [--agents with_openai ...]

It needs the SDKs: see `make setup-agents`. Each run is one of `examples/agents/train.py`.

AGENT_reward   mean reward of the first and of the last eighth of the steps, for each seed
AGENT_checks   of how many runs each check of the quickstart holds; `learned` is a rise of the reward
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from threading import Event, Thread
from typing import Any

from common import ROOT, parser_of, report, require, say, sized

from millrace.observe.sinks.jsonl import read_events
from millrace.observe.terminal import Check
from millrace.quickstart.checks import GAIN_MIN, checks_of_run, work_of
from millrace.run_directory.run_directory import RunDirectory

AGENTS = {"with_openai": "openai", "with_anthropic": "anthropic", "with_openai_agents": "agents"}
VICTIM = "replica-0"
KILL_S, POLL_S = 120.0, 0.05


class Kill:
    """Kills a replica after the step `at`, while the replica works on a turn. Agents think longer than a
    turn takes, so the replica is often idle: a kill that found it idle is repeated."""

    def __init__(self, run: RunDirectory, at: int) -> None:
        self._run, self._at, self._steps, self.killed_s = run, at, 0, 0.0
        self._over, self._thread = Event(), Thread(target=self._kill, daemon=True)

    def __call__(self, _: dict[str, Any]) -> None:
        self._steps += 1
        if self._steps == self._at:
            self._thread.start()

    def end(self) -> None:
        """The run is over: nothing is killed any more."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _kill(self) -> None:
        deadline, killed = time.monotonic() + KILL_S, set[int]()
        while not self._over.wait(POLL_S) and time.monotonic() < deadline:
            events = list(read_events(self._run.events))
            pid = [
                e.fields["pid"] for e in events if e.kind == "worker_started" and e.fields["name"] == VICTIM
            ]
            if pid[-1] not in killed and work_of(events, VICTIM, events[-1].time_s):
                with suppress(ProcessLookupError):
                    os.kill(pid[-1], signal.SIGKILL)
                killed.add(pid[-1])
                events = list(read_events(self._run.events))
                self.killed_s = events[-1].time_s
                if work_of(events, VICTIM, self.killed_s):
                    return


def one(train: Any, args: Namespace, directory: Path) -> tuple[list[float], list[Check]]:
    run = RunDirectory(directory / "run")
    kill = Kill(run, args.steps // 2)
    try:
        trained = train(args, directory, on_step=kill)
    finally:
        kill.end()
    rewards = [step["reward/mean"] for step in trained.metrics()]
    eighth = max(1, len(rewards) // 8)
    first, last = fmean(rewards[:eighth]), fmean(rewards[-eighth:])
    learned = Check("learned", last - first >= GAIN_MIN, f"reward {first:.2f} to {last:.2f}")
    return [first, last], [learned, *checks_of_run(run, VICTIM, kill.killed_s)]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=sized(3, 1))
    parser.add_argument("--steps", type=int, default=sized(16, 2))
    parser.add_argument("--warm-start-steps", type=int, default=sized(300, 5))
    parser.add_argument("--agents", nargs="+", choices=AGENTS, default=sized([*AGENTS], ["with_openai"]))
    options = parser.parse_args()
    missing = [package for agent in options.agents if find_spec(package := AGENTS[agent]) is None]
    require(not missing, f"{', '.join(missing)} is not installed: see `make setup-agents`")
    sys.path.insert(0, str(ROOT / "examples" / "agents"))
    from train import train  # type: ignore[import-not-found]

    found: dict[str, Any] = {}
    for agent in options.agents:
        rewards, holds = [], Counter[str]()
        for seed in range(1, options.seeds + 1):
            with tempfile.TemporaryDirectory() as scratch:
                args = Namespace(**{**vars(options), "agent": agent, "seed": seed, "lr": 2e-4})
                args.schedule = "millrace"
                reward, checks = one(train, args, Path(scratch))
            rewards.append([round(value, 3) for value in reward])
            holds.update({check.claim: int(check.holds) for check in checks})
            for check in checks:
                say(f"{agent}, seed {seed}: {check.claim}: {check.holds}: {check.detail}")
        found |= {f"{agent}_reward": rewards, f"{agent}_checks": dict(holds)}
    report(found, as_json=options.json)


if __name__ == "__main__":
    main()
