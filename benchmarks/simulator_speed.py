"""How fast the simulator is: 256 replicas x 64 trajectories on 512 GPUs, one simulated hour.

python benchmarks/simulator_speed.py [--hours H] [--json]

An event is a change of one trajectory: it is admitted, leased to a replica (again after a move), decodes one
unit of tokens (the longest completion has 256), is finished, scored, or trained. Stretches of units are
computed in closed form, so most of these cost nothing by themselves. `changes` are the same
without the units. `callbacks` are what the loop executed (timers, messages, tasks resumed), each with all
that the real controller does then.

The workload is long chain-of-thought: completions of 4 k tokens in the median and 32 k at the 99th percentile
and the limit, in batches of 512 prompts x 16, under the default schedule. CPU seconds are of this process,
set-up included.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

from common import parser_of, sized

from millrace.config.tables.training import BatchShape
from millrace.controller.state.run_state import RunState
from millrace.core.errors import DeadlineExceeded
from millrace.core.events import Event
from millrace_sim.config import ClusterSection, LogNormalLengths, SimulatedConfig, WorkloadSection
from millrace_sim.measure import Measure
from millrace_sim.setup import scenario
from millrace_sim.simulation import Scenario, simulate
from millrace_sim.virtual.loop import VirtualLoop


class Meter(Measure):
    """Counts what happened, and stops the run after `hours`."""

    def __init__(self, planned: Scenario, hours: float) -> None:
        super().__init__(planned, 1, planned.config.steps)
        self.batch = planned.config.batch
        self.limit_s, self.callbacks, self.changes, self.time_s = hours * 3600.0, 0, 0, 0.0
        self.decoded: dict[str, int] = {}  # units, by replica

    def on_event(self, event: Event) -> None:
        super().on_event(event)
        match event.kind:
            case "report":
                self.decoded[event.fields["replica"]] = event.fields["generated_tokens"]
            case "admitted":
                self.changes += len(event.fields["group_ids"]) * self.batch.group_size
            case "leased":
                self.changes += len(event.fields["trajectory_ids"])
            case "finished" | "scored":
                self.changes += 1
            case "step":
                self.changes += self.batch.prompts * self.batch.group_size

    def on_decision(self, state: RunState) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.callbacks, self.time_s = loop.num_callbacks, loop.time()
        if self.time_s >= self.limit_s:
            raise DeadlineExceeded("the simulated time is over")


def config() -> SimulatedConfig:
    return SimulatedConfig(
        steps=10_000,
        batch=BatchShape(prompts=512, group_size=16),
        cluster=ClusterSection(
            model="Qwen2.5-7B", device="H800", trainer_devices=256, replicas=256, slots=64
        ),
        lengths=LogNormalLengths(median=4_000, p99=32_000),
        workload=WorkloadSection(prompt_tokens=(512, 2048), max_tokens=32_768),
    )


def run(hours: float) -> dict[str, float]:
    planned = scenario(config())
    meter = Meter(planned, hours)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    with contextlib.suppress(DeadlineExceeded):
        simulate(planned, meter)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    steps = len([span for span in meter.timeline.trainer if span.what == "step"])
    events = meter.changes + sum(meter.decoded.values())
    return {
        "simulated_s": meter.time_s,
        "steps": steps,
        "trajectories": steps * planned.config.trajectories_per_step,
        "events": events,
        "changes": meter.changes,
        "callbacks": meter.callbacks,
        "events_per_cpu_s": events / cpu_s,
        "changes_per_cpu_s": meter.changes / cpu_s,
        "callbacks_per_cpu_s": meter.callbacks / cpu_s,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--hours", type=float, default=sized(1.0, 0.01))
    options = parser.parse_args()
    result = run(options.hours)
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:20} {value:,.0f}")


if __name__ == "__main__":
    main()
