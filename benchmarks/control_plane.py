"""What the controller's process costs at a thousand GPUs' rates: the real controller, ledger and wire.

    python benchmarks/control_plane.py [--json] [--rates 400000 2000000] [--median 400] [--runtime local|ray]

Laminar's 32B setting (arXiv:2510.12633): 256 replicas x 64 trajectories, one report a second a replica,
batches of 512 prompts x 16, 2 k tokens in, up to 16 k out, p99 ten times the median. The median is 1,600
there; a quarter of it by default, so that a run takes minutes: four times as many trajectories end a second.
The roles compute nothing (`players.py`). They are three other processes, which share the machine's cores with
the controller. Therefore all is in **CPU seconds of the controller's process**, not in wall time. Counting
begins when `--warm-up` times the tokens of all trajectories have passed.

With `--runtime ray` messages are Ray's, and its threads in the controller's process count too. The 256
replicas are parts of one actor (`ray_players.py`).

tokens_per_cpu_s          completion tokens from reports into the ledger, per CPU second, at the first rate
tokens_per_cpu_s_at_RATE  the same at the others: longer reports, not more of them
cpu_fraction_at_400k      CPU seconds a second to carry 400,000 tokens/s: 400,000 / tokens_per_cpu_s
decision_p99_ms           CPU time of one round of decisions
flush_p99_ms              CPU time of one flush
longest_ms, longest       CPU time of the longest callback of the loop, which nothing interrupts; its name
ledger_bytes_per_token    of the file at the end, live trajectories included
peak_mb                   resident memory of the controller's process
shares                    of CPU time, by task. `LiveRewardWorkers._keep` is all work for scores: ask for
                          each, to wait within its deadline, to settle its group, to log it
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import parser_of, report, say, sized, table
from players import Troupe

from millrace.config.schema import Config
from millrace.controller.controller import Controller
from millrace.controller.fleet.fleet import Fleet
from millrace.controller.supervisor import WorkerSpec
from millrace.core import clock
from millrace.core.events import Event, Events
from millrace.ledger.sqlite import SqliteLedger
from millrace.observe.sinks.open_sinks import open_sinks
from millrace.schedule.presets import build

REPLICAS, SLOTS = sized((256, 64), (4, 16))
PROMPTS, GROUP_SIZE = sized((512, 16), (4, 4))
PROMPT_TOKENS, MAX_TOKENS = sized((2048, 16_384), (64, 256))
ENVIRONMENTS = 4
STEP_S = sized(1.0, 0.1)
TARGET = 400_000
CHECKPOINT_EVERY = sized(1_000_000, 1)
SIGMA = math.log(10) / 2.326  # of a log-normal whose 99th percentile is ten times its median


def configuration(heartbeat_timeout_s: float) -> Config:
    return Config.model_validate(
        {
            "steps": 1_000_000,
            "model": {"path": "none"},
            "task": {"kind": "file", "path": "none"},
            "reward": {"kind": "exact"},
            "batch": {"prompts": PROMPTS, "group_size": GROUP_SIZE},
            "sampling": {"max_tokens": MAX_TOKENS},
            "rollout": {
                "replicas": REPLICAS,
                "slots": SLOTS,
                "max_sequence_tokens": PROMPT_TOKENS + MAX_TOKENS,
            },
            "checkpoints": {"every": CHECKPOINT_EVERY},
            "supervision": {"heartbeat_timeout_s": heartbeat_timeout_s},
        }
    )


def fleet(rate: float, median: float, relay_slots: int) -> Fleet:
    each = {"slots": SLOTS, "rate": rate / REPLICAS / SLOTS, "median": median, "sigma": SIGMA}
    played = {"prompt_tokens": PROMPT_TOKENS}
    return Fleet(
        trainer=WorkerSpec("trainer", "trainer", "players:PlayedTrainer", {"step_s": STEP_S}),
        relays=(WorkerSpec("relay", "relay", "players:PlayedRelay", {"slots": relay_slots}),),
        replicas=tuple(
            WorkerSpec("replica", f"replica-{i}", "players:PlayedReplica", {"index": i / REPLICAS, **each})
            for i in range(REPLICAS)
        ),
        reward_workers=tuple(
            WorkerSpec("reward worker", f"reward-worker-{i}", "players:PlayedEnvironment", played)
            for i in range(ENVIRONMENTS)
        ),
    )


class Meter:
    """Tokens carried, and the CPU time of every callback of the loop while it measures."""

    def __init__(self) -> None:
        self.measuring = self._round = False
        self.steps, self.progressed_s = 0, time.monotonic()
        self._generated: dict[str, int] = {}
        self.decisions_s: list[float] = []
        self.flushes_s: list[float] = []
        self.longest: tuple[float, str] = (0.0, "")
        self._by_name: dict[str, float] = {}

    @property
    def tokens(self) -> int:
        return sum(self._generated.values())

    def on_event(self, event: Event) -> None:
        if event.kind == "report":
            self._generated[event.fields["replica"]] = event.fields["generated_tokens"]
        elif event.kind == "step":
            self.steps += 1
        elif event.kind in ("worker_died", "stalled"):
            say(f"{event.kind}: {event.fields}")

    def on_decision(self, state: Any) -> None:
        self._round = True

    def watch_callbacks(self) -> None:
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            began_s = time.thread_time()
            run(handle)
            if self.measuring:
                self._note(handle, time.thread_time() - began_s)
            self._round = False

        asyncio.Handle._run = timed  # type: ignore[method-assign]

    def _note(self, handle: asyncio.Handle, took_s: float) -> None:
        name = _name(handle)
        self._by_name[name] = self._by_name.get(name, 0.0) + took_s
        if self._round:
            self.decisions_s.append(took_s)
        elif name.endswith("._flush"):
            self.flushes_s.append(took_s)
        self.longest = max(self.longest, (took_s, name))

    def shares(self, cpu_s: float) -> dict[str, float]:
        largest = sorted(self._by_name.items(), key=lambda item: -item[1])[:8]
        return {name: round(took_s / cpu_s, 3) for name, took_s in largest}


def _name(handle: asyncio.Handle) -> str:
    callback = handle._callback  # type: ignore[attr-defined]
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return getattr(owner.get_coro(), "__qualname__", "task")
    return getattr(callback, "__qualname__", str(callback))


async def measure(controller: Controller, meter: Meter, tokens: int, warm_up: int) -> dict[str, Any]:
    """Let `warm_up` tokens pass, then take the cost of `tokens`."""
    await _until(meter, warm_up)
    cpu_s, wall_s, carried, steps = time.process_time(), time.monotonic(), meter.tokens, meter.steps
    meter.measuring = True
    await _until(meter, carried + tokens)
    meter.measuring = False
    cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
    carried = meter.tokens - carried
    controller.stop()
    return {
        "tokens_per_cpu_s": carried / cpu_s,
        "cpu_fraction_at_400k": TARGET * cpu_s / carried,
        "decision_p99_ms": 1e3 * _p99(meter.decisions_s),
        "decisions_per_s": len(meter.decisions_s) / wall_s,
        "flush_p99_ms": 1e3 * _p99(meter.flushes_s),
        "longest_ms": 1e3 * meter.longest[0],
        "longest": meter.longest[1],
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "tokens": carried,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "steps": meter.steps - steps,
        "shares": meter.shares(cpu_s),
    }


async def _until(meter: Meter, tokens: int) -> None:
    last, moved_s = -1, time.monotonic()
    while meter.tokens < tokens:
        await asyncio.sleep(0.25)
        if meter.tokens != last:
            last, moved_s = meter.tokens, time.monotonic()
        if time.monotonic() - moved_s > 120.0:
            raise SystemExit(f"no token for 120 s after {last:,}")


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))] if values else math.nan


async def one(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """A run at one rate in this process, which is the controller."""
    config, meter = configuration(options.heartbeat_s), Meter()
    events = Events(clock.now, clock.wall)
    ledger = SqliteLedger(directory / "ledger.sqlite", run={})
    troupe = _troupe(options.runtime, silence_s_max=3 * options.heartbeat_s)
    mean = options.median * math.exp(SIGMA**2 / 2)
    warm_up = int(options.warm_up * REPLICAS * SLOTS * mean)
    async with open_sinks(events, config.observe, directory, {}):
        events.subscribe(meter.on_event)
        controller = Controller(
            config,
            fleet=fleet(options.one, options.median, config.relay_slots),
            runtime=troupe,
            ledger=ledger,
            schedule=build(config),
            events=events,
            checkpoints=str(directory),
            export=None,
            check=meter.on_decision,
        )
        meter.watch_callbacks()
        try:
            async with asyncio.TaskGroup() as group:
                running = group.create_task(controller.run())
                tokens = int(options.seconds * options.one)
                result = await measure(controller, meter, tokens, warm_up)
                await running
        finally:
            await troupe.close()
            ledger.close()
    size = (directory / "ledger.sqlite").stat().st_size
    return result | {"ledger_bytes_per_token": size / meter.tokens}


def _troupe(runtime: str, *, silence_s_max: float) -> Any:
    if runtime == "local":
        return Troupe(3, silence_s_max=silence_s_max)
    from ray_players import RayTroupe  # needs Ray

    return RayTroupe(3, silence_s_max=silence_s_max)


def rates(options: argparse.Namespace) -> dict[str, Any]:
    """Each rate in a controller's process of its own."""
    found: dict[str, Any] = {}
    for rate in options.rates:
        say(f"{rate:,} tokens/s")
        words = [sys.executable, __file__, "--runtime", options.runtime, "--one", rate]
        words += ["--median", options.median, "--heartbeat-s", options.heartbeat_s]
        words += ["--seconds", options.seconds, "--warm-up", options.warm_up]
        done = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE, check=True, text=True)
        found[f"{rate:,}"] = json.loads(done.stdout.splitlines()[-1])
        say(done.stdout.splitlines()[-1])
    numbers = {name: {k: v for k, v in one.items() if k != "shares"} for name, one in found.items()}
    table(numbers)
    first, *others = found.items()
    at = {f"tokens_per_cpu_s_at_{name.replace(',', '')}": one["tokens_per_cpu_s"] for name, one in others}
    return first[1] | at


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--rates", type=int, nargs="+", default=sized([TARGET, 2_000_000], [5_000, 10_000]), help="tokens/s"
    )
    parser.add_argument(
        "--median", type=float, default=sized(400.0, 100.0), help="of a completion, in tokens"
    )
    parser.add_argument(
        "--seconds", type=float, default=sized(30.0, 0.5), help="of tokens at the rate, to measure"
    )
    parser.add_argument(
        "--warm-up", type=float, default=sized(1.0, 0.1), help="times that every trajectory is replaced"
    )
    parser.add_argument("--heartbeat-s", type=float, default=10.0, help="`supervision.heartbeat_timeout_s`")
    parser.add_argument("--runtime", choices=("local", "ray"), default="local")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is None:
        report(rates(options), as_json=options.json)
        return
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(asyncio.run(one(options, Path(directory)))))


if __name__ == "__main__":
    main()
