"""What an agent's HTTP costs: time of a call, CPU time of a reward worker, memory of agents that wait.

    python benchmarks/gateway.py [--json] [--rounds 5] [--without-run]

An agent is a function in a process of its own (`gateway_agents.py`), which asks for chat completions. This
process is the reward worker: the gateway, its sessions and its environments. Instead of a model, the
environment's thread answers each call at once, always with the same 40 tokens. On the direct path the agent
is a thread of this process. The dialect reads and writes its calls too, and no HTTP carries them.

Each round measures both paths, one after the other. A conversation has 8 calls, and each call has the whole
conversation. The first call of a conversation has another figure, because the agent's process begins in it.

overhead_ms_p50, overhead_ms_p99  quantile of a call's time over HTTP, minus the median of the direct path
direct_ms_p50                     a call on the direct path
first_ms_p50                      the first call of a conversation over HTTP, with its connection
calls_per_cpu_s                   calls over HTTP in a second of this process's CPU time, with eight agents
direct_calls_per_cpu_s            the same of the direct path
agents_at_once                    most agents that waited at once, each with an open call, and were answered
bytes_per_waiting_agent           what one of them adds to the private memory of worker and launcher
bytes_of_its_processes            memory of its own two processes, and what they share
start_ms_per_agent                time to its first call
run_*                             a whole run, whose agents all wait at once (`gateway_run.py`)

Targets on an idle machine: overhead_ms_p50 at most 5, overhead_ms_p99 at most 20. `machine` has the load.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from common import medians, parser_of, report, say, sized, table
from gateway_played import Played, make_played
from gateway_run import run_at_once
from gateway_waiting import waiting

CALLS = 8
CONVERSATIONS = sized(40, 2)
AGENTS, BUSY_CONVERSATIONS = 8, sized(40, 2)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=sized(5, 1))
    parser.add_argument("--without-run", action="store_true", help="without the whole run")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        by_http, direct = make_played(Path(directory))
        figures: dict[str, object] = {**calls(by_http, direct, options.rounds)}
        figures |= waiting(by_http)
        if not options.without_run:
            figures |= run_at_once(Path(directory))
    cores = len(os.sched_getaffinity(0))
    load = f"load {load_before:.1f} before and {os.getloadavg()[0]:.1f} after"
    figures["machine"] = f"{platform.machine()}, {cores} cores, Python {platform.python_version()}, {load}"
    report(figures, as_json=options.json)


def calls(by_http: Played, direct: Played, rounds: int) -> dict[str, float]:
    """Medians over the rounds."""
    for one in (by_http, direct):
        one.play(CALLS)  # warm
    found = []
    for number in range(rounds):
        found.append({**times(by_http, direct), **cpu(by_http, direct)})
        say(f"round {number}: {found[-1]}")
    table({f"round {number}": one for number, one in enumerate(found)})
    return medians(found)


def times(by_http: Played, direct: Played) -> dict[str, float]:
    """One call at a time. The two paths take turns, one conversation each."""
    http_ms, direct_ms, first_ms = list[float](), list[float](), list[float]()
    for _ in range(CONVERSATIONS):
        first, *later = by_http.play(CALLS)
        first_ms.append(first)
        http_ms += later
        direct_ms += direct.play(CALLS)[1:]
    base = quantile(direct_ms, 50)
    return {
        "overhead_ms_p50": quantile(http_ms, 50) - base,
        "overhead_ms_p99": quantile(http_ms, 99) - base,
        "direct_ms_p50": base,
        "direct_ms_p99": quantile(direct_ms, 99),
        "first_ms_p50": quantile(first_ms, 50),
    }


def cpu(by_http: Played, direct: Played) -> dict[str, float]:
    """Many agents at once."""
    both = {"calls_per_cpu_s": by_http, "direct_calls_per_cpu_s": direct}
    return {name: busy(played) for name, played in both.items()}


def busy(played: Played) -> float:
    """Calls for a second of CPU time. The start of agents counts too."""
    began_s = time.process_time()
    with ThreadPoolExecutor(AGENTS) as threads:
        done = list(threads.map(lambda _: played.play(CALLS), range(BUSY_CONVERSATIONS)))
    return sum(map(len, done)) / (time.process_time() - began_s)


def quantile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))


if __name__ == "__main__":
    main()
