"""What simulated work takes and what it consists of: the parameters of a simulated run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from millrace.core.types import Finish
from millrace.sim.seeded import normal, uniform


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of the hardware, in seconds. Defaults resemble a small model on a few cores.

    A decode step takes `decode_base_s + decode_per_sequence_s * batch`: reading the weights, which the
    batch shares, plus reading each sequence's KV (the memory-bound side of a roofline).
    """

    decode_base_s: float = 0.008
    decode_per_sequence_s: float = 0.0005
    prefill_per_token_s: float = 0.00002
    pull_s: float = 0.05  # copying a version into standby, while decoding goes on
    swap_s: float = 0.01  # between two decode steps, nothing decodes
    verify_s: float = 0.005
    step_base_s: float = 0.2
    train_per_token_s: float = 0.0001
    publish_s: float = 0.03
    stage_s: float = 0.02
    load_s: float = 0.5
    save_s: float = 0.2
    prompts_s: float = 0.002
    score_s: float = 0.02  # mean of an exponential, per completion
    weights_bytes: int = 4_000_000


@dataclass(frozen=True, slots=True)
class Workload:
    """What prompts, completions and rewards look like. Every draw is a pure function of its ids."""

    prompt_tokens: tuple[int, int] = (8, 64)  # range, uniform
    completion_median: float = 40.0  # of a log-normal
    completion_sigma: float = 0.8  # of its logarithm
    reward_mean: float = 0.5  # rewards are 0 or 1
    failed_fraction: float = 0.0
    abstained_fraction: float = 0.0
    bad_prompt_fraction: float = 0.0

    def prompt_length(self, seed: int, group_id: int) -> int:
        low, high = self.prompt_tokens
        return low + int(uniform(seed, "prompt", group_id) * (high - low + 1))

    def completion(self, seed: int, trajectory_id: int, max_tokens: int) -> tuple[int, Finish]:
        """Length of a whole completion and why it ends, wherever and however often it is resumed."""
        z = normal(seed, "completion", trajectory_id)
        length = max(1, round(self.completion_median * math.exp(self.completion_sigma * z)))
        return (length, Finish.STOP) if length <= max_tokens else (max_tokens, Finish.LENGTH)
