"""What each part of the controller's work costs alone, and where the limit of tokens per CPU second lies.

    python benchmarks/control_parts.py [--json] [--replicas 256] [--tokens 128] [--median 400]

Every part is the real code, called one after the other in one process: no other process, no event loop with
other work, so it also measures on a machine that others use. `control_plane.py` has the whole.
Trajectories of 64 slots a replica end as a log-normal says, with groups of 16. All in CPU time of the thread.

tokens_per_cpu_s     of all parts together
us_per_ended         CPU us of all parts, for an ended trajectory of `tokens_per_ended` tokens
parts                CPU us of each part, and how often it ran
"""

from __future__ import annotations

import asyncio
import gc
import math
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from common import parser_of, report, say, sized
from control_plane import GROUP_SIZE, PROMPT_TOKENS, SIGMA, SLOTS, Setting, configuration, fleet
from players import text

from millrace.controller.context import RunContext
from millrace.controller.controller import COLLECT_AFTER
from millrace.controller.decide import Decisions
from millrace.controller.pace import PACE
from millrace.controller.replica_session import ReplicaSession
from millrace.controller.state.orders import Submit
from millrace.core import clock
from millrace.core.events import Events
from millrace.core.types import (
    Finish,
    Progress,
    Prompt,
    ReplicaLoad,
    Report,
    Scored,
    StepRecord,
    Trajectory,
)
from millrace.ledger import buffer
from millrace.ledger.sqlite import SqliteLedger
from millrace.observe.sinks.open_sinks import open_sinks
from millrace.runtime.local.framing import Framing, Kind, Payload
from millrace.schedule.presets import build

FLEET = 2000
"""Replicas of the fleet of which this is a part: a flush writes so few of its growing trajectories."""


class Times:
    """CPU seconds and calls by part."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls = Counter[str]()

    @contextmanager
    def of(self, part: str, calls: int = 1) -> Iterator[None]:
        began_s = time.thread_time()
        try:
            yield
        finally:
            self.seconds[part] += time.thread_time() - began_s
            self.calls[part] += calls


class Wire:
    """Both ends of a connection: what one sends the other receives, through `Framing`."""

    def __init__(self, times: Times) -> None:
        self._times, self._sent = times, list[bytes]()
        self._in: Framing = Framing(self._receive, lambda: None)
        self._out = Framing(self._receive, lambda: None)
        self._out._transport = self  # type: ignore[assignment]
        self.value: Any = None

    def writelines(self, lines: list[bytes]) -> None:
        self._sent += [bytes(line) for line in lines]

    def _receive(self, kind: Kind, epoch: int, call_id: int, payload: Payload) -> None:
        self.value = payload.value()

    def send(self, value: Any) -> int:
        self._out.send(Kind.ITEM, 1, 1, value)
        while self._out._outgoing:
            self._out._write()
        sent, self._sent = b"".join(self._sent), []
        self._bytes = memoryview(sent)
        return len(sent)

    def receive(self) -> Any:
        sent = self._bytes
        while sent:
            room = self._in.get_buffer(-1)
            num = min(len(room), len(sent))
            room[:num] = sent[:num]
            self._in.buffer_updated(num)
            sent = sent[num:]
        return self.value


class Fleet:
    """A run whose replicas, reward worker and trainer are this object."""

    def __init__(self, run: RunContext, median: float, early: str) -> None:
        self.run, self.times, self._median, self._early = run, Times(), median, early
        self._wire, self._left = Wire(self.times), dict[int, int]()  # tokens until the end, by trajectory
        self._rng, self._next_group, self._text = np.random.default_rng(0), 0, text()
        self._sessions = [ReplicaSession(name, run, lambda reason: None) for name in run.mailboxes]
        self._worker = _Worker("reward-worker-0", asyncio.get_running_loop().create_future())
        self._decisions = Decisions(run, lambda state: None)
        run.pool.next_prompt = self._prompt  # type: ignore[method-assign]
        run.state.relays.newest = 0
        for session in self._sessions:
            run.state.replicas.up(session.name, 1)
            run.state.replicas.served(session.name, 0)
        while self._decide():
            self._begin(at_start=True)
        self.run.flush()
        self.tokens = 0

    def round(self, tokens: int, flushes: int, decisions: int) -> None:
        """Every slot makes `tokens` tokens; so many flushes and rounds of decisions are made meanwhile."""
        num = len(self._sessions)
        for number, session in enumerate(self._sessions, 1):
            self._report(session, tokens)
            if number * decisions // num > (number - 1) * decisions // num:
                self._score()
                self._decide()
                self._begin()
            if number * flushes // num > (number - 1) * flushes // num:
                with self.times.of("flush"):
                    self.run.flush()
                self._step()

    def _decide(self) -> bool:
        """A round of decisions, with the groups that it admits. Returns whether there are any."""
        before = self._next_group
        with self.times.of("decisions"):
            self._decisions.round()
        return self._next_group > before

    def _report(self, session: ReplicaSession, tokens: int) -> None:
        """One report of all that grow, and one for each that ends: alone, or with what the others have made
        since the last report."""
        leased = [*self.run.state.replicas[session.name].leased.values()]
        ends = [one for one in leased if self._left[one.trajectory_id] <= tokens]
        growing = [one for one in leased if self._left[one.trajectory_id] > tokens]
        parts = len(ends) + 1 if self._early == "all" else 1
        for one in ends:
            beside = [self._grow(other, tokens // parts) for other in growing] if parts > 1 else []
            self._deliver(session, [*beside, self._grow(one, self._left[one.trajectory_id])], "ended")
        last = tokens - (parts - 1) * (tokens // parts)
        self._deliver(session, [self._grow(one, last) for one in growing], "growing")

    def _grow(self, trajectory: Trajectory, count: int) -> Progress:
        tid, start = trajectory.trajectory_id, len(trajectory.columns)
        self._left[tid] -= count
        self.tokens += count
        columns = self._text.columns[start : start + count]
        columns.runs = [(self.run.state.version, count)]
        finish = None if self._left[tid] else Finish.STOP
        return Progress(tid, trajectory.lease, start, columns, finish)

    def _deliver(self, session: ReplicaSession, progress: list[Progress], kind: str) -> None:
        load = ReplicaLoad(self.run.state.version, running=SLOTS, kv_capacity_tokens=SLOTS * 20_000)
        self._wire.send(Report(progress, load))
        with self.times.of(f"read a report: {kind}"):
            received = self._wire.receive()
        with self.times.of(f"take it in: {kind}"):
            session._take_in(received)

    def _score(self) -> None:
        pool = self.run.pool
        while pool.num_requests:
            requests = pool._requests.take(self._worker)  # type: ignore[arg-type]
            with self.times.of("send to score", len(requests)):
                self._wire.send(("score", (requests,), 8))
            for request in requests:
                self._wire.send((request.trajectory_id, Scored(float(request.trajectory_id % 2))))
                with self.times.of("take in a score"):
                    trajectory_id, score = self._wire.receive()
                    pool._finish(self._worker.name, trajectory_id, score)
            pool._requests.give_back(self._worker.name, ())

    def _prompt(self) -> Prompt:
        group_id, self._next_group = self._next_group, self._next_group + 1
        start = text().start(group_id, PROMPT_TOKENS)
        tokens = text().columns.tokens[start : start + PROMPT_TOKENS]
        return Prompt(group_id, f"row-{group_id}", tokens, "a prompt")

    def _begin(self, *, at_start: bool = False) -> None:
        """The replicas get the works that were leased to them."""
        for mailbox in self.run.mailboxes.values():
            for order in mailbox.orders:
                assert isinstance(order, Submit), order
                with self.times.of("send works", len(order.works)):
                    self._wire.send(("submit", (order.works,)))
                for work in order.works:
                    length = self._median * np.exp(SIGMA * self._rng.standard_normal())
                    if at_start:
                        length *= np.exp(SIGMA**2) * self._rng.random()
                    self._left[work.trajectory_id] = max(1, min(16_384, int(length)))
            mailbox.orders.clear()

    def _step(self) -> None:
        run, state = self.run, self.run.state
        while state.num_ready >= run.config.batch.prompts:
            with self.times.of("take a batch", run.config.batch.prompts * GROUP_SIZE):
                state.take(_ready(state)[: run.config.batch.prompts])
                batch = state.batch()
            with self.times.of("send a batch", run.config.batch.prompts * GROUP_SIZE):
                self._wire.send(("step", (batch,)))
            with self.times.of("commit a step", run.config.batch.prompts * GROUP_SIZE):
                trained = [s.trajectory_id for g in batch.groups for s in g.sequences]
                record = StepRecord(batch.version + 1, list(state.taken), trained, {"loss": 0.0})
                run.update_ledger()
                run.ledger.commit_step(record)
                state.committed(batch.version + 1)
                state.relays.newest = batch.version + 1
                for name in state.replicas:
                    state.replicas.served(name, batch.version + 1)


class _Worker:
    def __init__(self, name: str, dead: asyncio.Future[str]) -> None:
        self.name, self.dead = name, dead


def _ready(state: Any) -> list[int]:
    return [i for i, record in state.groups.items() if record.ready_rank is not None]


async def measure(options: Any, directory: Path) -> dict[str, Any]:
    setting = Setting(options.replicas, 1, options.prompts)
    config, events = configuration(setting, 10.0), Events(clock.now, clock.wall)
    ledger = SqliteLedger(directory / "ledger.sqlite", run={})
    gc.set_threshold(COLLECT_AFTER)
    buffer.GROWING_MIN = math.ceil(buffer.GROWING_MIN * options.replicas / FLEET)
    options.heartbeat_s = 10.0
    async with open_sinks(events, config.observe, directory, {}):
        run = RunContext(
            config,
            fleet=fleet(setting, options, config.relay_slots),
            ledger=ledger,
            schedule=build(config),
            events=events,
            pace=PACE,
        )
        played = Fleet(run, options.median, options.early)
        for _ in range(options.warm_up):
            played.round(options.tokens, options.flushes, options.decisions)
        played.times, played.tokens = Times(), 0
        for _ in range(options.rounds):
            played.round(options.tokens, options.flushes, options.decisions)
    ledger.close()
    return summary(played)


def summary(played: Fleet) -> dict[str, Any]:
    times = played.times
    parts = {
        name: (round(1e6 * seconds / times.calls[name], 1), times.calls[name])
        for name, seconds in times.seconds.items()
    }
    ended = times.calls["take in a score"]
    total_s = sum(times.seconds.values())
    shares = {name: round(seconds / total_s, 3) for name, seconds in times.seconds.items()}
    for name, (us, calls) in parts.items():
        each = 1e6 * times.seconds[name] / ended
        say(f"{name:26} {us:10.1f} us x {calls:7} {100 * shares[name]:5.1f} %  {each:7.1f} us an end")
    return {
        "tokens_per_cpu_s": played.tokens / total_s,
        "us_per_ended": 1e6 * total_s / ended,
        "tokens_per_ended": played.tokens / ended,
        "cpu_s": total_s,
        "parts": parts,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--replicas", type=int, default=sized(16, 4))
    parser.add_argument("--prompts", type=int, default=sized(8, 2))
    parser.add_argument("--tokens", type=int, default=128, help="of a slot between two reports")
    parser.add_argument("--median", type=float, default=sized(400.0, 100.0))
    parser.add_argument("--rounds", type=int, default=sized(10, 2))
    parser.add_argument(
        "--early", choices=("finished", "all"), default="finished", help="tokens in a report of an end"
    )
    parser.add_argument("--warm-up", type=int, default=sized(14, 2), help="rounds that do not count")
    parser.add_argument("--flushes", type=int, default=2, help="in a round")
    parser.add_argument("--decisions", type=int, default=sized(64, 2), help="rounds of them in a round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report(asyncio.run(measure(options, Path(directory))), as_json=options.json)


if __name__ == "__main__":
    main()
