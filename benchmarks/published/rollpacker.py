"""RollPacker's tail batching over verl (arXiv:2509.21009, NSDI 2026): Qwen2.5-7B, 14B and 32B on 16, 32 and
64 H800, 128 prompts x 8, up to 8 k, 16 k and 32 k tokens, eta 1.25.

Published: tail batching alone makes the whole step 1.30, 1.48 and 2.21 times as fast (its table 2), and the
rollout of a period of four short rounds and a long one 82 to 47 s, 277 to 88 s and 673 to 170 s (figure
11). With the paper's other three parts it is 2.03 to 2.56 times. Those parts are no decisions of a
schedule.

Lengths: the longest response of a batch is 25 to 32 times the median, and three of four are shorter than
755 to 1,100 tokens, at 16 k. A log-normal with a median of 520 and a 99th percentile of 5,840 tokens has
both. For 8 k and 32 k the median is scaled with the limit. Not found: how alike the responses of a prompt
are. Chosen: half of the variance is the prompt's. Trainer and replicas share the devices in turns, as in
verl.
"""

from __future__ import annotations

from common import sized

from millrace.config.tables.schedules import RollPacker, Schedule, Synchronous
from millrace.config.tables.training import BatchShape
from millrace_sim.config import ClusterSection, LogNormalLengths, SimulatedConfig, WorkloadSection
from published.kept import played
from published.row import Row

SETTINGS = {
    "7B/8k": ("Qwen2.5-7B", 16, 1, 2, 8192),
    "14B/16k": ("Qwen2.5-14B", 32, 2, 4, 16_384),
    "32B/32k": ("Qwen2.5-32B", 64, 2, 16, 32_768),
}
"""Model, devices, devices of a replica and of a trainer rank, and the limit of a response."""
STEP, ROLLOUT = (1.30, 1.48, 2.21), (82 / 47, 277 / 88, 673 / 170)
PROMPTS, GROUP, STEPS = sized((128, 8, 16), (8, 4, 6))  # three periods after the first step
MEDIAN, P99, OF_TOKENS, SHARED, SLOTS = 520.0, 5840.0, 16_384, 0.5, 256
WHY = (
    "how alike a prompt's responses are is ours, and the tail of the lengths with it; no reward stage; the "
    "prompts left behind begin again, as in the paper"
)


def rows() -> list[Row]:
    names = sized(list(SETTINGS), ["7B/8k"])
    pairs = [(name, *(seconds(name, one) for one in (Synchronous(), RollPacker()))) for name in names]
    whole = [
        Row("rollpacker", f"step over verl, {name}", published, before[0] / after[0], "x", why=WHY)
        for (name, before, after), published in zip(pairs, STEP, strict=False)
    ]
    return whole + [
        Row("rollpacker", f"rollout over verl, {name}", published, before[1] / after[1], "x", why=WHY)
        for (name, before, after), published in zip(pairs, ROLLOUT, strict=False)
    ]


def seconds(name: str, schedule: Schedule) -> tuple[float, float]:
    """A step, and what of it is not training: means over full periods."""
    config = config_of(name, schedule)
    result = played(config)
    return result["step_s"], result["step_s"] * (1.0 - result["trainer_busy"])


def config_of(name: str, schedule: Schedule) -> SimulatedConfig:
    shape, devices, tensor, rank, most = SETTINGS[name]
    times = most / OF_TOKENS
    return SimulatedConfig(
        steps=STEPS,
        batch=BatchShape(prompts=PROMPTS, group_size=GROUP),
        schedule=schedule,
        cluster=ClusterSection(
            model=shape,
            device="H800",
            trainer_devices=devices,
            model_parallel=rank,
            replicas=devices // tensor,
            tensor_parallel=tensor,
            slots=SLOTS,
            log_prob_pass=True,
            colocated=True,
        ),
        lengths=LogNormalLengths(median=times * MEDIAN, p99=times * P99, shared=SHARED),
        workload=WorkloadSection(prompt_tokens=(64, 512), max_tokens=most),
    )
