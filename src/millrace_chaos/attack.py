"""Seeded attacks on a run in real processes, and the time to recover from each attack."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from millrace.core.errors import DeadlineExceeded, WorkerError
from millrace.core.events import Event
from millrace.runtime import process
from millrace_chaos.child_run import ChildRun

POLL_S = 0.01
QUIET_S_MAX = 180.0  # without a step: the run hangs
PAUSE_S_MEAN = 0.4  # between the moment that an attack may come and the attack
THAW_S_MAX = 2.0
SALVO = {1: 6, 2: 2, 3: 1, 5: 1}
"""Number of processes attacked at once, and its weight."""
MOMENTS = {"": 4, "step": 2, "published": 2, "checkpoint": 1, "worker_started": 2}
"""An attack follows an event of this kind at once; the empty kind is any moment. After `step` the version is
about to be published. After `worker_started` the worker is about to replay or to serve."""
HAND_OVERS = {"": 1, "slept": 4, "woke": 4, "pulled": 1, "step": 1, "published": 1, "worker_started": 1}
"""The moments of a run whose device is lent in turns: most attacks follow a worker that slept or woke, and so
fall into the next part of a hand-over."""
MOMENT_S_MAX = 0.5  # the longest wait for the event; then any moment
NEAR_S = 0.05

WEIGHTS = {"replica": 5, "trainer": 3, "relay": 3, "reward worker": 3, "forkserver": 1, "controller": 2}
BESIDE_VLLM = WEIGHTS | {"engine": 4}
"""Where replicas generate with vLLM in a process of its own."""
ACTS = {"kill": 6, "pause": 2, "freeze": 2}
"""kill: SIGKILL. pause: SIGSTOP, and SIGCONT within two seconds. freeze: SIGSTOP without SIGCONT;
the supervisor of the process must notice. Nothing supervises a controller, and a replica bears a silence of
vLLM for long, so both are paused."""

SUPERVISION = (
    "supervision.heartbeat_timeout_s=3",
    "supervision.restarts=1000000",
    "supervision.restart_window_s=5",
    "supervision.attempts=1000000",
)
"""The default budgets of restarts are too small for so many attacks."""


@dataclass(slots=True)
class Attack:
    """An attack and its recovery. `back`: a new incarnation has started. `recovery_s`: the time until the
    incarnation did useful work; None before."""

    role: str
    name: str
    act: str
    version: int
    wall_s: float
    back: bool = False
    recovery_s: float | None = None

    def __call__(self, event: Event) -> None:
        """Take in an event of the run. After a pause there is no recovery."""
        if self.act == "pause" or self.recovery_s is not None or event.wall_s <= self.wall_s:
            return
        fields = event.fields
        if event.kind == "worker_started" and (
            self.name in ("forkserver", "controller")
            or f"{self.name}.".startswith(f"{fields['name']}.")  # a rank restarts with its worker
        ):
            self.back = True
        if self.back and self._of_use(event):
            self.recovery_s = event.wall_s - self.wall_s

    def _of_use(self, event: Event) -> bool:
        match self.role:
            case "replica" | "engine":
                return event.kind == "pulled" and event.fields["replica"] == self.name.partition(".")[0]
            case "relay":
                fetched = event.kind == "fetched" and self.name == f"relay-{event.fields['host']}"
                return fetched or event.kind == "staged"
            case "trainer":
                return event.kind == "published"
            case "reward worker":
                return event.kind == "worker_started"
            case _:
                return event.kind == "pulled"


@dataclass
class Campaign:
    """`kills` attacks, spread over the steps of a run."""

    run: ChildRun
    steps: int
    kills: int
    seed: int
    on_attack: Callable[[Attack], None] = lambda attack: None
    moments: Mapping[str, int] = field(default_factory=lambda: MOMENTS)
    weights: Mapping[str, int] = field(default_factory=lambda: WEIGHTS)
    attacks: list[Attack] = field(default_factory=list)
    orphans: list[int] = field(default_factory=list)
    listening: set[str] = field(default_factory=set)  # sockets that any process of the run listened on
    sessions: int = 1
    salvos: list[int] = field(default_factory=list)  # number of processes of each attack
    _thaws: list[tuple[float, int]] = field(default_factory=list)

    def wage(self) -> None:
        """Attack from the run's start to its end.

        Raises: DeadlineExceeded: the run hangs. WorkerError: the run ended with an error.
        """
        rng = random.Random(self.seed)
        self.run.start()
        while len(self.attacks) < self.kills:
            role = rng.choices(list(self.weights), list(self.weights.values()))[0]
            # The run recovers during the last fifth of the steps.
            due = 4 * len(self.attacks) * self.steps // (5 * self.kills)
            if not self._go_on(partial(self._ready_for, role, due)) or not self._go_on(self._moment(rng)):
                break
            self._salvo(role, rng)
        self._go_on(lambda: False)

    def _go_on(self, until: Callable[[], bool]) -> bool:
        """Watch the run until the condition holds; False if the run ended before, without an error."""
        version, moved_s = self.run.version, time.monotonic()
        while not until():
            self._thaw()
            self._watch_recoveries(self.run.poll())
            if (code := self.run.exit_code) is not None:
                self._watch_recoveries(self.run.poll())
                if code != 0:
                    raise WorkerError(f"the run ended with exit code {code}:\n{self.run.last_words()}")
                return False
            if self.run.version != version:
                version, moved_s = self.run.version, time.monotonic()
            if time.monotonic() - moved_s > QUIET_S_MAX:
                raise DeadlineExceeded(
                    f"no step for {QUIET_S_MAX:g} s after version {version}:\n{self.run.last_words()}"
                )
            time.sleep(POLL_S)
        return True

    def _ready_for(self, role: str, version: int) -> bool:
        """Other roles may be down: an attack during another recovery is the most useful."""
        return self.run.version >= version and bool(self.run.pids(role))

    def _moment(self, rng: random.Random) -> Callable[[], bool]:
        """Draws a moment. The result says whether it has come: after a pause, or just after an event."""
        kind = rng.choices(list(self.moments), list(self.moments.values()))[0]
        now_s, count = time.monotonic(), self.run.counts[kind]
        if not kind:
            return partial(_has_come, now_s + rng.expovariate(1 / PAUSE_S_MEAN))
        near_s, late_s = rng.uniform(0, NEAR_S), now_s + MOMENT_S_MAX
        seen_s: list[float] = []

        def come() -> bool:
            if not seen_s and self.run.counts[kind] > count:
                seen_s.append(time.monotonic())
            return _has_come(seen_s[0] + near_s if seen_s else late_s)

        return come

    # ------------------------------------------------------------ attacks

    def _salvo(self, role: str, rng: random.Random) -> None:
        """Attack one process, or several at once. A controller is last, because its end ends the others."""
        size = min(rng.choices(list(SALVO), list(SALVO.values()))[0], self.kills - len(self.attacks))
        roles = [role, *rng.choices(list(self.weights), list(self.weights.values()), k=size - 1)]
        before = len(self.attacks)
        for each in sorted(roles, key=lambda role: role == "controller"):
            self._attack(each, rng)
        self.salvos.append(len(self.attacks) - before)

    def _attack(self, role: str, rng: random.Random) -> None:
        act = rng.choices(list(ACTS), list(ACTS.values()))[0]
        thaw_s, draw = rng.uniform(0.05, THAW_S_MAX), rng.random()
        victims = sorted(self.run.pids(role).items())
        if not victims:  # the process has just ended for another reason
            return
        name, pid = victims[int(draw * len(victims))]
        if role in ("controller", "engine") and act == "freeze":
            act = "pause"
        ranks = self.run.ranks | {*self.run.pids("engine").values()}
        self.listening |= process.listening(set(self.run.processes()) - ranks)
        attack = Attack(role, name, act, self.run.version, time.time())
        self.attacks.append(attack)
        self.on_attack(attack)
        if act == "kill":
            self.orphans += self.run.kill(role, pid)
            self.sessions += role == "controller"
            return
        self.run.send(role, pid, signal.SIGSTOP)
        if act == "pause":
            self._thaws.append((time.monotonic() + thaw_s, pid))

    def _thaw(self) -> None:
        due = [(at_s, pid) for at_s, pid in self._thaws if at_s <= time.monotonic()]
        for entry in due:
            self._thaws.remove(entry)
            with suppress(ProcessLookupError):
                os.kill(entry[1], signal.SIGCONT)

    def _watch_recoveries(self, events: list[Event]) -> None:
        for event in events:
            for attack in self.attacks:
                attack(event)


def _has_come(moment_s: float) -> bool:
    return time.monotonic() >= moment_s
