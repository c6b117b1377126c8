"""A whole run whose agents all wait at once, for `gateway.py`: its time and its memory.

After its first turn each agent waits until all agents of the batch have theirs. Then all of them ask again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from common import ROOT, say, sized
from gateway_agents import __file__ as AGENTS
from gateway_waiting import proportional_bytes

sys.path.append(str(ROOT))

from tests.turn_runs import make_agent_start

from millrace_chaos.child_run import ChildRun

PROMPTS, GROUP_SIZE, WORKERS, REPLICAS = sized((25, 8, 4, 2), (2, 4, 1, 1))
STEPS = sized(2, 1)
POLL_S = 0.1
END_S = 600.0


def run_at_once(directory: Path) -> dict[str, float]:
    """With as many agents at once as a batch has trajectories."""
    number, meeting = PROMPTS * GROUP_SIZE, directory / "met"
    meeting.mkdir()
    overrides = {
        "task.path": json.dumps(f"{AGENTS}:rows"),
        "reward.path": json.dumps(f"{AGENTS}:reward"),
        "reward.agent.end_s": 60.0,  # of those whose first turn is cut: they wait for the others too
        "reward.agent.function": json.dumps(f"{AGENTS}:meet"),
        "reward.workers": WORKERS,
        "reward.timeout_s": 300.0,
        "batch.prompts": PROMPTS,
        "batch.group_size": GROUP_SIZE,
        "rollout.replicas": REPLICAS,
        "rollout.slots": number,
        "sampling.max_tokens": 40,
        "steps": STEPS,
    }
    sets = [f"{name}={value}" for name, value in overrides.items()]
    variables = {"MEETING": str(meeting), "MEETING_AGENTS": str(number)}
    (directory / "start").mkdir()
    run = ChildRun(make_agent_start(directory / "start"), directory / "run", sets, agents=variables)
    began_s = time.monotonic()
    try:
        run.start()
        figures = watched(run, number)
    finally:
        run.end()
    begun = [event.time_s for event in run.events if event.kind == "leased"]
    steps = [event.time_s for event in run.events if event.kind == "step"]
    accounting = json.loads(run.directory.summary.read_text())["accounting"]
    say(f"{accounting}; steps {[round(one - begun[0], 1) for one in steps]} s after the first lease")
    return {
        **figures,
        "run_s": time.monotonic() - began_s,
        "run_batch_s": steps[0] - begun[0],
        "run_failed": float(accounting["failed"]),
        "run_trained": float(accounting["trained"]),
    }


def watched(run: ChildRun, number: int) -> dict[str, float]:
    """The most agents at once, and the memory of all processes when all agents were there."""
    most, memory, deadline_s = 0, dict[str, float](), time.monotonic() + END_S
    while run.exit_code is None:
        run.poll()
        if time.monotonic() > deadline_s:
            raise SystemExit(f"the run did not end within {END_S:g} s:\n{run.last_words()}")
        agents = run.directory.path / "agents"
        most = max(most, len(os.listdir(agents)) if agents.exists() else 0)
        if most >= number and not memory:
            pids = set(run.processes())
            of_agents = [pid for pid in pids if _is_of_agents(pid)]
            memory = {
                "run_mb": proportional_bytes(pids) / 2**20,
                "run_agents_mb": proportional_bytes(of_agents) / 2**20,
                "run_processes": float(len(pids)),
            }
        time.sleep(POLL_S)
    run.poll()
    if run.exit_code:
        raise SystemExit(f"the run ended with exit code {run.exit_code}:\n{run.last_words()}")
    return {"run_agents_at_once": float(most), **memory}


def _is_of_agents(pid: int) -> bool:
    """An agent, its warden or a launcher."""
    try:
        return b"inside.forked_agents" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False
