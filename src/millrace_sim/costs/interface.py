"""Costs of simulated work: the interface between the simulated roles and a model of their hardware.

`Costs` has constants that resemble a small model on a few cores. `cluster` derives costs from a model,
devices and a layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class CostModel(Protocol):
    """Seconds, unless the name says otherwise. Pure: equal arguments give equal times.

    A decode step of `batch` sequences that hold `kv_tokens` together takes
    `decode_step_s(batch) + kv_tokens * kv_token_s`: affine in the KV cache, so that a replica can add up
    many steps at once.
    """

    @property
    def kv_token_s(self) -> float: ...
    @property
    def handover_s(self) -> float:
        """Writing a report with news. Nothing decodes meanwhile, and the time does not count as busy."""

    @property
    def contention(self) -> float:
        """Factor on decode steps and prefills while the trainer computes on shared cores."""

    @property
    def pull_s(self) -> float:
        """Copying a version into standby. Decoding goes on."""

    @property
    def swap_s(self) -> float:
        """Exchanging the weights between two decode steps. Nothing decodes."""

    @property
    def publish_s(self) -> float:
        """Copying a version; the trainer waits for it."""

    @property
    def digest_s(self) -> float:
        """Time from copied to published. The trainer goes on with its step."""

    @property
    def stage_s(self) -> float:
        """Time from published to pullable."""

    @property
    def fetch_s(self) -> float:
        """Receiving a version from a relay of another host that has the whole version."""

    @property
    def hop_s(self) -> float:
        """Delay behind a source that is still receiving the version."""

    @property
    def load_s(self) -> float: ...
    @property
    def snapshot_s(self) -> float:
        """The trainer's wait for a checkpoint."""

    @property
    def save_s(self) -> float:
        """Time until a checkpoint is complete, while training goes on. Also the time of an export, which
        blocks."""

    @property
    def sleep_s(self) -> float:
        """The trainer's way to sleep, on a device that is lent in turns: what it keeps goes to the host."""

    @property
    def wake_s(self) -> float:
        """The trainer's way back. A replica has no such times: its weights come with a pull."""

    @property
    def prompts_s(self) -> float: ...
    @property
    def score_s(self) -> float:
        """Mean time of a score. The time is exponentially distributed."""

    @property
    def weights_bytes(self) -> int: ...
    def decode_step_s(self, batch: int) -> float: ...
    def prefill_s(self, tokens: int, context: int) -> float:
        """KV of `tokens` new tokens of one sequence after `context` known ones."""

    def train_s(self, lengths: Sequence[int]) -> float:
        """An optimizer step on sequences of these lengths, prompts included."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Constants. Reading the weights is shared by the batch; a sequence adds its KV and its sampling."""

    decode_base_s: float = 0.008
    decode_per_sequence_s: float = 0.0005
    kv_token_s: float = 0.0
    handover_s: float = 0.0
    contention: float = 1.0
    prefill_per_token_s: float = 0.00002
    pull_s: float = 0.05
    swap_s: float = 0.01
    step_base_s: float = 0.2
    train_per_token_s: float = 0.0001
    publish_s: float = 0.02
    digest_s: float = 0.01
    stage_s: float = 0.02
    fetch_s: float = 0.04
    hop_s: float = 0.002
    load_s: float = 0.5
    snapshot_s: float = 0.02
    save_s: float = 0.2
    sleep_s: float = 0.02
    wake_s: float = 0.02
    prompts_s: float = 0.002
    score_s: float = 0.02
    weights_bytes: int = 4_000_000

    def decode_step_s(self, batch: int) -> float:
        return self.decode_base_s + self.decode_per_sequence_s * batch

    def prefill_s(self, tokens: int, context: int) -> float:
        return tokens * self.prefill_per_token_s

    def train_s(self, lengths: Sequence[int]) -> float:
        return self.step_base_s + self.train_per_token_s * sum(lengths)
