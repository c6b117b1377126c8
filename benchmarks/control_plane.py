"""What the controller's process costs at the rates of thousands of GPUs: the real controller, ledger, wire.

    python benchmarks/control_plane.py [--json] [--settings 400k 2m 3.2m 3.2m-turns] [--runtime local|ray]

Laminar's 32B setting (arXiv:2510.12633): 64 trajectories a replica, groups of 16, 2 k tokens in, up to 16 k
out, p99 ten times the median. The median is 1,600 there; a quarter of it by default, so that a run takes
minutes: four times as many trajectories end a second. Replicas report as real ones do: all new tokens at an
interval, and five times in this interval what has ended.

    400k, 2m     256 replicas, batches of 512 x 16: a thousand GPUs, and five times their tokens
    3.2m         2,000 replicas, batches of 4,096 x 16: 8,192 GPUs
    3.2m-turns   the same, each trajectory has four such turns, answered at once

A batch of 4,096 x 16 takes 35 million tokens. So the windows of the last two have no step, by default.

The roles compute nothing (`players.py`). They are three other processes, which share the machine's cores
with the controller. So all is in **CPU seconds of the controller's process**, not in wall time. A `dilation`
of 3 is a clock that runs a third as fast: every interval is three times as long, every rate a third. So two
cores can play what takes more. Counting begins when `--warm-up` times the tokens of all trajectories have
passed. With `--runtime ray` messages are Ray's, and its threads in the controller's process count too. The
replicas are parts of one actor (`ray_players.py`).

tokens_per_cpu_s          completion tokens from reports into the ledger, per CPU second, at 3.2m
tokens_per_cpu_s_at_NAME  the same at the other settings
cpu_fraction_at_400k      CPU seconds a second to carry 400,000 tokens/s, at 400k
cpu_fraction_at_3_2m      the same of 3,200,000 tokens/s, at 3.2m
loop_fraction             the same of the loop's thread alone: it alone decides, reads and writes
cpu_ms_per_ended          CPU time of the process for a completion or turn that ends
decision_p99_ms           CPU time of one round of decisions
flush_p99_ms              CPU time of one flush
longest_ms, longest       CPU time of the longest callback of the loop, which nothing interrupts; its name
ledger_bytes_per_token    of the file at the end, live trajectories included
peak_mb                   resident memory of the controller's process
shares                    of the CPU time of callbacks, by task. `LiveRewardWorkers._keep` is all work for
                          scores: ask for each, wait within its deadline, settle its group, log it
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
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common import parser_of, report, say, sized, table
from players import OBSERVATION, Troupe

from millrace.config.schema import Config
from millrace.controller import decide, pace, patience
from millrace.controller.controller import Controller
from millrace.controller.fleet.fleet import Fleet
from millrace.controller.pace import Pace
from millrace.controller.supervisor import WorkerSpec
from millrace.core import clock
from millrace.core.events import Event, Events
from millrace.ledger.sqlite import SqliteLedger
from millrace.observe.sinks.open_sinks import open_sinks
from millrace.run import compose
from millrace.schedule.presets import build

SLOTS, GROUP_SIZE = sized((64, 16), (16, 4))
PROMPT_TOKENS, MAX_TOKENS = sized((2048, 16_384), (64, 256))
ENVIRONMENTS = 4
STEP_S = sized(1.0, 0.1)
SLICE_S = 0.02  # of a real replica: between the end of a completion and its report
CHECKPOINT_EVERY = sized(1_000_000, 1)
SIGMA = math.log(10) / 2.326  # of a log-normal whose 99th percentile is ten times its median
COUNTED = ("report", "leased", "finished", "observed", "scored", "step")
CLOCKS = {decide: ("TICK_S",), pace: ("REST_S_MAX",), patience: ("FLOOR_S", "LOST_S", "CREDIT_S_MAX")}
"""Of the loops that decide, and of the calls of workers."""


@dataclass(frozen=True)
class Setting:
    replicas: int
    rate: int
    prompts: int
    dilation: float = 1.0
    turns: int = 1

    @property
    def slots(self) -> int:
        return self.replicas * SLOTS


SETTINGS = sized(
    {
        "400k": Setting(256, 400_000, 512),
        "2m": Setting(256, 2_000_000, 512, dilation=2.0),
        "3.2m": Setting(2000, 3_200_000, 4096, dilation=16.0),
        "3.2m-turns": Setting(2000, 3_200_000, 4096, dilation=16.0, turns=4),
    },
    {
        "400k": Setting(4, 5_000, 4),
        "3.2m": Setting(8, 20_000, 8, dilation=2.0),
        "3.2m-turns": Setting(8, 20_000, 8, dilation=2.0, turns=2),
    },
)


def configuration(setting: Setting, heartbeat_timeout_s: float) -> Config:
    environment = {"kind": "environment", "path": "played:Environment", "turns": setting.turns}
    return Config.model_validate(
        {
            "steps": 1_000_000,
            "model": {"path": "none"},
            "task": {"kind": "file", "path": "none"} | ({"answer": "none"} if setting.turns > 1 else {}),
            "reward": environment if setting.turns > 1 else {"kind": "exact"},
            "batch": {"prompts": setting.prompts, "group_size": GROUP_SIZE},
            # Groups start although no step is made.
            "schedule": {"kind": "millrace", "staleness_max": 64, "ahead": 64},
            "sampling": {"max_tokens": MAX_TOKENS},
            "rollout": {
                "replicas": setting.replicas,
                "slots": SLOTS,
                "max_sequence_tokens": PROMPT_TOKENS + setting.turns * (MAX_TOKENS + OBSERVATION),
            },
            "checkpoints": {"every": CHECKPOINT_EVERY},
            "supervision": {"heartbeat_timeout_s": heartbeat_timeout_s * setting.dilation},
        }
    )


def fleet(setting: Setting, options: argparse.Namespace, relay_slots: int) -> Fleet:
    replicas, dilation = setting.replicas, setting.dilation
    each = {"slots": SLOTS, "rate": setting.rate / setting.slots / dilation, "sigma": SIGMA}
    interval_s = compose.report_interval_s(configuration(replace(setting, dilation=1.0), options.heartbeat_s))
    each |= {"interval_s": dilation * interval_s, "slice_s": dilation * SLICE_S}
    each |= {"early_interval_s": dilation * interval_s / compose.EARLY_REPORTS}
    each |= {"median": options.median, "early": options.early}
    played = {"prompt_tokens": PROMPT_TOKENS, "turns": setting.turns}
    return Fleet(
        trainer=WorkerSpec("trainer", "trainer", "players:PlayedTrainer", {"step_s": dilation * STEP_S}),
        relays=(WorkerSpec("relay", "relay", "players:PlayedRelay", {"slots": relay_slots}),),
        replicas=tuple(
            WorkerSpec("replica", f"replica-{i}", "players:FleetReplica", {"index": i / replicas, **each})
            for i in range(replicas)
        ),
        reward_workers=tuple(
            WorkerSpec("reward worker", f"reward-worker-{i}", "players:PlayedEnvironment", played)
            for i in range(ENVIRONMENTS)
        ),
    )


class Meter:
    """Tokens carried, and the CPU time of every callback of the loop. To time callbacks takes a fifth of the
    CPU time, so they have a window of their own."""

    def __init__(self) -> None:
        self._round = False
        self.counts = Counter[str]()
        self._generated: dict[str, int] = {}
        self.decisions_s: list[float] = []
        self.flushes_s: list[float] = []
        self.longest: tuple[float, str] = (0.0, "")
        self._by_name: dict[str, float] = {}

    @property
    def tokens(self) -> int:
        return sum(self._generated.values())

    def on_event(self, event: Event) -> None:
        self.counts[event.kind] += 1
        if event.kind == "report":
            self._generated[event.fields["replica"]] = event.fields["generated_tokens"]
        elif event.kind in ("worker_died", "stalled"):
            say(f"{event.kind}: {event.fields}")

    def on_decision(self, state: Any) -> None:
        self._round = True

    @contextmanager
    def callbacks(self) -> Iterator[None]:
        """Time every callback of the loop."""
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            self._round, began_s = False, time.thread_time()
            run(handle)
            self._note(handle, time.thread_time() - began_s)

        asyncio.Handle._run = timed  # type: ignore[method-assign]
        yield
        asyncio.Handle._run = run  # type: ignore[method-assign]

    def _note(self, handle: asyncio.Handle, took_s: float) -> None:
        name = _name(handle)
        self._by_name[name] = self._by_name.get(name, 0.0) + took_s
        if self._round:
            self.decisions_s.append(took_s)
        elif name.endswith("._flush"):
            self.flushes_s.append(took_s)
        self.longest = max(self.longest, (took_s, name))

    def shares(self) -> dict[str, float]:
        largest = sorted(self._by_name.items(), key=lambda item: -item[1])[:8]
        return {name: round(took_s / sum(self._by_name.values()), 3) for name, took_s in largest}


def _name(handle: asyncio.Handle) -> str:
    callback = handle._callback  # type: ignore[attr-defined]
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return getattr(owner.get_coro(), "__qualname__", "task")
    return getattr(callback, "__qualname__", str(callback))


async def measure(controller: Controller, meter: Meter, tokens: int, warm_up: int) -> dict[str, Any]:
    """Let `warm_up` tokens pass, then take the cost of `tokens`. A third of them more is for callbacks."""
    await _until(meter, warm_up)
    cpu_s, loop_s, wall_s, carried = time.process_time(), time.thread_time(), time.monotonic(), meter.tokens
    before = meter.counts.copy()
    await _until(meter, carried + tokens)
    cpu_s, loop_s = time.process_time() - cpu_s, time.thread_time() - loop_s
    wall_s, carried = time.monotonic() - wall_s, meter.tokens - carried
    counted = meter.counts - before
    watched_s = time.monotonic()
    with meter.callbacks():
        await _until(meter, meter.tokens + tokens // 3)
    watched_s = time.monotonic() - watched_s
    controller.stop()
    return {
        "tokens_per_cpu_s": carried / cpu_s,
        "decision_p99_ms": 1e3 * _p99(meter.decisions_s),
        "decisions_per_s": len(meter.decisions_s) / watched_s,
        "flush_p99_ms": 1e3 * _p99(meter.flushes_s),
        "longest_ms": 1e3 * meter.longest[0],
        "longest": meter.longest[1],
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "tokens": carried,
        "cpu_s": cpu_s,
        "loop_cpu_s": loop_s,
        "cpu_ms_per_ended": 1e3 * cpu_s / max(1, counted["finished"]),
        "wall_s": wall_s,
        **{f"{name}_events": counted[name] for name in COUNTED},
        "shares": meter.shares(),
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


async def one(setting: Setting, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """A run of one setting in this process, which is the controller."""
    config, meter = configuration(setting, options.heartbeat_s), Meter()
    events = Events(clock.now, clock.wall)
    ledger = SqliteLedger(directory / "ledger.sqlite", run={})
    troupe = _troupe(options.runtime, silence_s_max=3 * options.heartbeat_s * setting.dilation)
    mean = setting.turns * options.median * math.exp(SIGMA**2 / 2)
    warm_up = int(options.warm_up * setting.slots * mean)
    for module, names in CLOCKS.items():
        for name in names:
            setattr(module, name, setting.dilation * getattr(module, name))
    pace.REST = setting.dilation * (1 + pace.REST) - 1
    async with open_sinks(events, config.observe, directory, {}):
        events.subscribe(meter.on_event)
        controller = Controller(
            config,
            fleet=fleet(setting, options, config.relay_slots),
            runtime=troupe,
            ledger=ledger,
            schedule=build(config),
            events=events,
            checkpoints=str(directory),
            export=None,
            check=meter.on_decision,
            pace=_dilated(setting, options),
        )
        try:
            async with asyncio.TaskGroup() as group:
                running = group.create_task(controller.run())
                tokens = int(options.seconds * setting.rate)
                result = await measure(controller, meter, tokens, warm_up)
                await running
        finally:
            await troupe.close()
            ledger.close()
    size = (directory / "ledger.sqlite").stat().st_size
    fraction = setting.rate / result["tokens_per_cpu_s"]
    loop_fraction = fraction * result["loop_cpu_s"] / result["cpu_s"]
    result |= {"cpu_fraction": fraction, "loop_fraction": loop_fraction}
    return result | {"ledger_bytes_per_token": size / meter.tokens}


def _dilated(setting: Setting, options: argparse.Namespace) -> Pace:
    real = compose.pace(configuration(replace(setting, dilation=1.0), options.heartbeat_s))
    return Pace(*(setting.dilation * seconds for seconds in (real.decision_s, real.flush_s, real.look_s)))


def _troupe(runtime: str, *, silence_s_max: float) -> Any:
    if runtime == "local":
        return Troupe(3, silence_s_max=silence_s_max)
    from ray_players import RayTroupe  # needs Ray

    return RayTroupe(3, silence_s_max=silence_s_max)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Each setting in a controller's process of its own."""
    found: dict[str, Any] = {}
    for name in options.settings:
        changes = {"rate": options.rate, "replicas": options.replicas, "dilation": options.dilation}
        setting = replace(SETTINGS[name], **{key: value for key, value in changes.items() if value})
        say(f"{name}: {setting}")
        words = [sys.executable, __file__, "--runtime", options.runtime, "--early", options.early]
        words += ["--one", json.dumps(asdict(setting))]
        words += ["--median", options.median, "--heartbeat-s", options.heartbeat_s]
        words += ["--seconds", options.seconds, "--warm-up", options.warm_up]
        done = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE, check=True, text=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
        say(done.stdout.splitlines()[-1])
    table({name: {k: v for k, v in one.items() if k != "shares"} for name, one in found.items()})
    main_name = "3.2m" if "3.2m" in found else next(iter(found))
    at: dict[str, float] = {}
    for name, one in found.items():
        key = name.replace(".", "_")
        at |= {
            f"tokens_per_cpu_s_at_{key}": one["tokens_per_cpu_s"],
            f"cpu_fraction_at_{key}": one["cpu_fraction"],
        }
    return found[main_name] | at


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--settings", nargs="+", choices=tuple(SETTINGS), default=list(SETTINGS), help="see above"
    )
    parser.add_argument("--rate", type=int, help="tokens/s, in place of the settings'")
    parser.add_argument("--replicas", type=int, help="in place of the settings'")
    parser.add_argument("--dilation", type=float, help="in place of the settings'")
    parser.add_argument(
        "--median", type=float, default=sized(400.0, 100.0), help="of a completion or turn, in tokens"
    )
    parser.add_argument(
        "--seconds", type=float, default=sized(15.0, 0.5), help="of tokens at the rate, to measure"
    )
    parser.add_argument("--warm-up", type=float, default=0.1, help="times that every trajectory is replaced")
    parser.add_argument("--heartbeat-s", type=float, default=10.0, help="`supervision.heartbeat_timeout_s`")
    parser.add_argument(
        "--early", choices=("finished", "all"), default="finished", help="tokens in a report of an end"
    )
    parser.add_argument("--runtime", choices=("local", "ray"), default="local")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is None:
        report(settings(options), as_json=options.json)
        return
    with tempfile.TemporaryDirectory() as directory:
        setting = Setting(**json.loads(options.one))
        print(json.dumps(asyncio.run(one(setting, options, Path(directory)))))


if __name__ == "__main__":
    main()
