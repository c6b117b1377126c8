"""Workers that compute nothing and speak the real protocol: many of them played by a few processes.

The controller's side is real (`LocalHandle`, its socketpair), and so is the worker's (`Worker`, its lease
and streams); only the forkserver is replaced: a `Troupe` hands each socket to one of its processes.
No torch here: 256 replicas take a second to start.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from millrace.core.completion.columns import TokenColumns
from millrace.core.placement import HERE, Place
from millrace.core.pulse import Pulse
from millrace.core.turns.packed import PackedRequest, pack_answer, unpack_request
from millrace.core.types import (
    Batch,
    CheckpointInfo,
    Endpoint,
    Finish,
    Observed,
    Progress,
    Prompt,
    Published,
    ReplicaLoad,
    Report,
    Scored,
    ScoreRequest,
    Served,
    Staged,
    StepResult,
    TrainerState,
    Work,
)
from millrace.runtime.local.handle import LocalHandle
from millrace.runtime.local.launcher import Child, Owner
from millrace.runtime.local.worker_process import Worker

VOCABULARY = 150_000
OBSERVATION = 32
"""Tokens of an environment's answer."""
_PACKET = 4096

# ---------------------------------------------------------------- the controller's side


class Troupe:
    """A `Runtime`: worker `name` is played by process `seat(name)` of `size`."""

    def __init__(self, size: int, *, silence_s_max: float) -> None:
        self._silence_s_max = silence_s_max
        self._processes = [_Process() for _ in range(size)]
        self._handles: list[LocalHandle] = []

    async def spawn(
        self,
        name: str,
        target: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        place: Place = HERE,
        timeout_s: float = 60.0,
    ) -> LocalHandle:
        process = self._processes[seat(name) % len(self._processes)]
        handle = LocalHandle(name, 1, process)  # type: ignore[arg-type]
        self._handles.append(handle)
        async with asyncio.timeout(timeout_s):
            await handle.start(place, self._silence_s_max, None)
            await handle.construct(target, kwargs or {}, None)
        return handle

    async def close(self) -> None:
        for handle in self._handles:
            handle.kill()
        await asyncio.wait([handle.dead for handle in self._handles], timeout=10.0)


def seat(name: str) -> int:
    """Replicas, the trainer, and all others sit apart: none holds up another kind's answers."""
    return {"replica": 0, "trainer": 1}.get(name.partition("-")[0], 2)


class _Process:
    """In the forkserver's place for `LocalHandle`."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", "from players import play; play()", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
            )

    async def fork(
        self,
        owner: Owner,
        fds: Sequence[int],
        *,
        epoch: int,
        silence_s_max: float | None,
        place: Place,
        prefix: tuple[str, ...] = (),
    ) -> None:
        part = json.dumps([owner.name, epoch, silence_s_max]).encode()
        socket.send_fds(self._control, [part], list(fds))
        owner.forked(Child(self._popen.pid, os.pidfd_open(self._popen.pid)))

    def drain(self) -> None:
        """Nobody reports how a player ended."""


# ---------------------------------------------------------------- the players' side


async def _play(control: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    control.setblocking(False)
    ended = loop.create_future()
    async with asyncio.TaskGroup() as tasks:

        def take_part() -> None:
            packet, fds, _, _ = socket.recv_fds(control, _PACKET, 1)
            if not packet:
                loop.remove_reader(control)
                ended.set_result(None)
                return
            worker = Worker(*json.loads(packet), tasks)
            connection = socket.socket(fileno=fds[0])
            tasks.create_task(loop.create_unix_connection(lambda: worker.framing, sock=connection))

        loop.add_reader(control, take_part)
        await ended
        os._exit(0)


def play() -> None:
    """One process of a troupe: its argument is the socket that hands it its parts."""
    asyncio.run(_play(socket.socket(fileno=int(sys.argv[1]))))


# ---------------------------------------------------------------- the roles


@dataclass(frozen=True)
class Text:
    """What every completion is cut from: token ids and log-probs distributed like a model's."""

    columns: TokenColumns

    @classmethod
    def sampled(cls, size: int = 1 << 20) -> Text:
        rng = np.random.default_rng(0)
        tokens = (VOCABULARY * rng.random(size) ** 4).astype(np.int32)
        logprobs = -rng.exponential(0.5, size).astype(np.float32)
        return cls(TokenColumns.from_buffers(tokens.tobytes(), logprobs.tobytes(), [(0, size)]))

    def start(self, trajectory_id: int, length: int) -> int:
        return trajectory_id * 7919 % (len(self.columns) - length)


_TEXTS: list[Text] = []


def text() -> Text:
    if not _TEXTS:
        _TEXTS.append(Text.sampled())
    return _TEXTS[0]


class _Completion:
    __slots__ = ("began", "end", "num_tokens", "start", "work")

    def __init__(self, work: Work, end: int, start: int) -> None:
        self.work, self.end, self.start = work, end, start
        self.num_tokens = len(work.tokens)
        self.began: float | None = None  # in tokens of its replica's slots; None: it has no slot


class PlayedReplica:
    """Every running trajectory gains `rate` tokens a second, in one report a second."""

    def __init__(self, index: float, slots: int, rate: float, median: float, sigma: float) -> None:
        self._index, self._slots, self._rate = index, slots, rate
        self._median, self._sigma = median, sigma
        self._works: dict[int, _Completion] = {}
        self._version, self._carry, self._generated = -1, 0.0, 0
        self._text = text()

    async def reports(self) -> AsyncIterator[Report]:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._index
        while True:
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            due_s += 1.0
            yield self._report()

    def _report(self, progress: list[Progress] | None = None) -> Report:
        progress = self._advance() if progress is None else progress
        running = min(self._slots, len(self._works))
        return Report(
            progress,
            ReplicaLoad(
                self._version,
                running=running,
                waiting=len(self._works) - running,
                kv_used_tokens=sum(c.num_tokens for c in self._works.values()),
                kv_capacity_tokens=self._slots * 20_000,
                generated_tokens=self._generated,
            ),
        )

    def _advance(self) -> list[Progress]:
        if self._version < 0:
            return []
        self._carry += self._rate
        count = int(self._carry)
        self._carry -= count
        running = list(self._works.values())[: self._slots]
        return [self._grow(completion, count) for completion in running]

    def _grow(self, completion: _Completion, count: int) -> Progress:
        start, work = completion.num_tokens, completion.work
        completion.num_tokens = min(start + count, completion.end)
        finished = completion.num_tokens == completion.end
        if finished:
            del self._works[work.trajectory_id]
        self._generated += completion.num_tokens - start
        columns = self._text.columns[completion.start + start : completion.start + completion.num_tokens]
        columns.runs = [(self._version, len(columns))] if columns else []
        finish = Finish.STOP if finished else None
        return Progress(work.trajectory_id, work.lease, start, columns, finish)

    async def submit(self, works: list[Work]) -> None:
        for work in works:
            draw = np.random.default_rng(work.trajectory_id).standard_normal()
            length = min(work.sampling.max_tokens, max(1, int(self._median * np.exp(self._sigma * draw))))
            start = self._text.start(work.trajectory_id, work.sampling.max_tokens)
            self._works[work.trajectory_id] = _Completion(work, max(length, len(work.tokens) + 1), start)

    async def release(self, trajectory_ids: list[int]) -> list[Progress]:
        known = [self._works.pop(one) for one in trajectory_ids if one in self._works]
        return [Progress(c.work.trajectory_id, c.work.lease, c.num_tokens, TokenColumns()) for c in known]

    async def pull(self, version: int, endpoint: Endpoint) -> Served:
        await asyncio.sleep(0.5)
        self._version = version
        return Served(version, str(version), pull_s=0.5, swap_s=0.0)


class FleetReplica(PlayedReplica):
    """Reports like a real replica: all new tokens when `interval_s` is over, and completions `slice_s` after
    their end. While others wait for a slot, `early_interval_s` lie between two such reports.
    `early`: "finished": such a report has these completions only; "all": all new tokens.

    Every turn has a length of its own. The first works of the slots end as if they had run for long, so that
    as many end a second as later. A slot makes `rate` tokens a second, from the first pull on."""

    def __init__(
        self, interval_s: float, early_interval_s: float, slice_s: float, early: str, **keywords: Any
    ) -> None:
        super().__init__(**keywords)
        self._interval_s, self._early_interval_s = interval_s, early_interval_s
        self._slice_s, self._early = slice_s, early
        self._began_s, self._news, self._num_works = 0.0, Pulse(), 0
        self._ends: list[tuple[float, int, _Completion]] = []  # a heap, by position

    async def reports(self) -> AsyncIterator[Report]:
        loop = asyncio.get_running_loop()
        due_s, early_due_s = loop.time() + self._index * self._interval_s, 0.0
        while True:
            ends_s = self._began_s + self._ends[0][0] / self._rate if self._ends else due_s
            gathers = len(self._works) > self._slots
            wait_s = min(due_s, max(ends_s + self._slice_s, early_due_s * gathers)) - loop.time()
            if wait_s > 0 and await self._news.wait(wait_s):
                self._begin()
                continue
            is_due = loop.time() >= due_s
            due_s += self._interval_s * is_due
            progress = self._collect(everything=is_due or self._early == "all")
            if is_due or progress:
                early_due_s = loop.time() + self._early_interval_s
                yield self._report(progress)

    def _position(self) -> float:
        """The tokens that a slot has made."""
        return self._rate * (asyncio.get_running_loop().time() - self._began_s)

    def _begin(self) -> None:
        """Completions that have a slot make tokens from now on."""
        if self._version >= 0:
            for one in islice(self._works.values(), self._slots):
                if one.began is None:
                    one.began = self._position() - one.num_tokens
                    heapq.heappush(self._ends, (one.began + one.end, one.work.trajectory_id, one))

    def _collect(self, *, everything: bool) -> list[Progress]:
        position, progress = self._position(), list[Progress]()
        while self._ends and self._ends[0][0] <= position:
            one = heapq.heappop(self._ends)[2]
            if self._works.get(one.work.trajectory_id) is one:
                progress.append(self._grow(one, one.end - one.num_tokens))
        for one in islice(self._works.values(), self._slots) if everything else ():
            if (
                one.began is not None
                and (count := min(int(position - one.began), one.end - 1) - one.num_tokens) > 0
            ):
                progress.append(self._grow(one, count))
        self._begin()
        return progress

    async def submit(self, works: list[Work]) -> None:
        for work in works:
            rng = np.random.default_rng((work.trajectory_id, work.turn_start))
            length = self._median * np.exp(self._sigma * rng.standard_normal())
            if self._num_works < self._slots:  # what is left of one that was met by chance
                length *= np.exp(self._sigma**2) * rng.random()
            self._num_works += 1
            end = work.turn_start + max(1, int(length))
            end = min(work.sampling.max_tokens, max(end, len(work.tokens) + 1))
            start = self._text.start(work.trajectory_id, work.sampling.max_tokens)
            self._works[work.trajectory_id] = _Completion(work, end, start)
        self._news.fire()

    async def pull(self, version: int, endpoint: Endpoint) -> Served:
        if self._version < 0:
            self._began_s = asyncio.get_running_loop().time() + 0.5
        served = await super().pull(version, endpoint)
        self._news.fire()
        return served


class PlayedTrainer:
    def __init__(self, step_s: float) -> None:
        self._version, self._step_s = 0, step_s

    async def load(self, checkpoint: str | None) -> TrainerState:
        return TrainerState(0, slot_bytes=1)

    async def step(self, batch: Batch) -> StepResult:
        await asyncio.sleep(self._step_s)
        self._version = batch.version + 1
        num_tokens = sum(len(s.columns) for g in batch.groups for s in g.sequences)
        return StepResult(self._version, {"loss": 0.0}, {}, num_tokens, self._step_s)

    async def publish(self, *endpoints: Endpoint) -> None:
        self._copied = self._version

    async def await_published(self) -> Published:
        return Published(self._copied, str(self._copied), weights_bytes=1, stall_s=0.0)

    async def checkpoint(self, directory: str) -> None:
        self._saved = CheckpointInfo(self._version, f"{directory}/v{self._version:08d}", save_s=0.0)

    async def await_saved(self, spared: Sequence[int] = ()) -> CheckpointInfo:
        return self._saved


class PlayedRelay:
    def __init__(self, slots: int) -> None:
        self._slots, self._versions = slots, list[int]()

    async def open(self, slot_bytes: int) -> Endpoint:
        return Endpoint("played", "nowhere", self._slots, slot_bytes)

    async def stage(self, version: int, digest: str) -> Staged:
        self._versions = [*self._versions, version][-self._slots :]
        return Staged(version, digest, self._versions, stage_s=0.0)


class PlayedEnvironment:
    """Answers all turns of an episode but the last of `turns`, at once."""

    def __init__(self, prompt_tokens: int, turns: int = 1) -> None:
        self._prompt_tokens, self._text, self._turns = prompt_tokens, text(), turns
        self._num_done = dict[int, int]()  # turns of the episodes that are here

    async def prompts(self, group_ids: list[int], members: Sequence[Sequence[int]] = ()) -> list[Prompt]:
        return [self._prompt(group_id) for group_id in group_ids]

    def _prompt(self, group_id: int) -> Prompt:
        start = self._text.start(group_id, self._prompt_tokens)
        tokens = self._text.columns.tokens[start : start + self._prompt_tokens]
        return Prompt(group_id, f"row-{group_id}", tokens, "a prompt")

    async def forget(self, trajectory_ids: list[int]) -> None:
        pass

    async def answer(self, packed: PackedRequest) -> Any:
        request = unpack_request(packed)
        trajectory_id, before = request.trajectory_id, len(request.turns) // 2
        if request.known is not None:
            before = self._num_done.get(trajectory_id, 0)
        self._num_done[trajectory_id] = before + 1
        if await self._goes_on(request, before + 1):
            return pack_answer(Observed(self._text.columns.tokens[:OBSERVATION]))
        self._num_done.pop(trajectory_id)
        return Scored(float(trajectory_id % 2))

    async def _goes_on(self, request: ScoreRequest, num_done: int) -> bool:
        return request.finish is Finish.TURN and num_done < self._turns
