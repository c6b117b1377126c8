"""The simulated engine on the bench: it decodes in a time of its own, and computes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from bench import Bench, Played

from millrace.core.digest import digest_buffers, kind_of
from millrace.core.protocols import WeightsReader
from millrace.core.types import Progress, ReplicaLoad, Work
from millrace.rollout.protocol import Capabilities, Engine, EngineOptions
from millrace_sim.costs.interface import Costs
from millrace_sim.costs.workload import Workload
from millrace_sim.roles.batching import LOGPROB, BatchingEngine

CAN = Capabilities(frozenset({"rollout.colocated"}), shares_prefixes=True, chunks_prompts=False)
A_STEP_A_SECOND = Costs(decode_base_s=1.0, decode_per_sequence_s=0.0, prefill_per_token_s=0.0, swap_s=0.0)


class SteppedEngine:
    """`BatchingEngine` with the methods of an `Engine`: a step is a second of its time."""

    computes = "nothing"

    def __init__(self, options: EngineOptions) -> None:
        self._engine = BatchingEngine(
            slots=options.slots,
            kv_capacity_tokens=options.slots * options.max_sequence_tokens,
            keep_kv=False,
            costs=A_STEP_A_SECOND,
            workload=Workload(),
        )
        self._now_s = 0.0
        self._staged = self._served = ""

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def has_work(self) -> bool:
        load = self._engine.load()
        return self.version >= 0 and load.running + load.waiting > 0

    @property
    def has_finished(self) -> bool:
        return self._engine.has_finished

    def submit(self, works: Iterable[Work]) -> None:
        self._engine.submit(works, self._now_s, 1.0)

    def release(self, trajectory_ids: Iterable[int]) -> list[Progress]:
        return self._engine.release(trajectory_ids, self._now_s, 1.0)

    def step(self) -> None:
        self._now_s += 1.0
        self._engine.advance(self._now_s, 1.0)

    def take_progress(self, *, ended: bool = False) -> list[Progress]:
        return self._engine.collect(self._now_s, 1.0)

    def load(self) -> ReplicaLoad:
        return self._engine.load()

    def stage(self, version: int, reader: WeightsReader) -> tuple[str, str]:
        with reader.view(version) as (staged, pieces):
            self._staged = digest_buffers(pieces, kind_of(staged))
        return staged, self._staged

    def swap(self, version: int) -> None:
        self._engine.swap(version, self._now_s, 1.0)
        self._served = self._staged

    def digest(self) -> str:
        return self._served

    def sleep(self) -> None:
        if self.version >= 0:
            self._engine.sleep(self._now_s, 1.0)

    def wake(self) -> None:
        """Its weights come with the next version."""

    def close(self) -> None:
        """It has started nothing."""


class SimulatedBench(Bench):
    def open_engine(self, kind: str) -> Engine:
        return SteppedEngine(self.options)

    def check(self, played: Iterable[Played]) -> None:
        """A simulated token is its position: none is lost, and none comes twice."""
        for one in played:
            start = len(one.work.tokens)
            assert one.tokens == list(range(start, start + len(one.columns)))
            assert set(one.columns.logprobs) <= {LOGPROB}
