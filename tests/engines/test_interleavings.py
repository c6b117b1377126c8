"""A thousand random orders of submit, release, load and step: nothing is lost, mixed or made up."""

from __future__ import annotations

import random

import pytest
from bench import Bench, OpenBench, Played, prompt_of
from tests.long import few

from millrace.core.completion.columns import TokenColumns
from millrace.core.types import Finish, Sampling

TIMES, EACH, ACTIONS = 40, 25, 14
VERSIONS = 3


class Story:
    """One order of events, and what came of each trajectory over all of its leases."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self._bench, self._random = bench, random.Random(seed)
        self._whole: dict[int, tuple[Played, TokenColumns]] = {}  # its first lease, and everything sampled
        self._moved: list[int] = []

    def tell(self) -> None:
        """Actions in random order, then everything to its end."""
        actions = [self._submit, self._release, self._resume, self._load, self._step, self._step, self._step]
        self._submit()
        for _ in range(ACTIONS):
            self._random.choice(actions)()
        for _ in range(len(self._moved)):
            self._resume()
        self._bench.drain()
        for key in list(self._bench.played):
            self._keep(key, self._bench.played[key])
            del self._bench.played[key]

    def check(self) -> None:
        for first, columns in self._whole.values():
            budget = first.work.sampling.max_tokens
            assert len(columns) == budget if first.finish is Finish.LENGTH else len(columns) <= budget
            assert first.finish is not None and columns.versions() == sorted(columns.versions())
        self._bench.check(Played(first.work, columns) for first, columns in self._whole.values())

    def _submit(self) -> None:
        group = self._random.randrange(3)
        sampling = Sampling(max_tokens=self._random.randint(1, 10))
        prompt = prompt_of(group, 3 + 9 * group)
        self._bench.submit(
            self._bench.work(prompt, sampling, group_id=group) for _ in range(self._random.randint(1, 2))
        )

    def _release(self) -> None:
        live = [key for key, one in self._bench.played.items() if one.finish is None]
        if live:
            key = self._random.choice(live)
            released = self._bench.release(key)
            self._keep(key, released)
            if released.finish is None:
                self._moved.append(key)

    def _resume(self) -> None:
        if self._moved:
            key = self._moved.pop(self._random.randrange(len(self._moved)))
            first, columns = self._whole[key]
            work, lease = first.work, self._random.randint(1, 5) + first.work.lease
            again = self._bench.work(
                work.prompt, work.sampling, trajectory_id=key, group_id=work.group_id, lease=lease,
                tokens=columns.tokens,
            )  # fmt: skip
            first.work = self._bench.work(
                work.prompt, work.sampling, trajectory_id=key, group_id=work.group_id, lease=lease
            )
            self._bench.submit([again])

    def _load(self) -> None:
        self._bench.serve(self._random.randrange(VERSIONS))

    def _step(self) -> None:
        self._bench.step()

    def _keep(self, key: int, part: Played) -> None:
        first, columns = self._whole.setdefault(key, (Played(part.work), TokenColumns()))
        assert len(part.work.tokens) == len(columns)
        columns.extend(part.columns)
        first.finish = part.finish


@pytest.mark.parametrize("times", few(range(TIMES)))
def test_nothing_is_lost_or_mixed_in_any_order_of_events(
    times: int, stepwise: bool, bench_of: OpenBench
) -> None:
    if times and not stepwise:
        pytest.skip("a load of another process takes its time: ten orders are enough")
    bench = bench_of(slots=3, prefill_chunk=16)
    bench.serve(0)
    for seed in range(times * EACH, (times + 1) * EACH)[: EACH if stepwise else 10]:
        story = Story(bench, seed)
        story.tell()
        story.check()
