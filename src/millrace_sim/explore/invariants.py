"""Invariants of every run under any faults, checked at every event, at every decision, and at the end.

The promises are those of Millrace, not of one schedule. If a schedule decides (staleness, versions in one
trajectory), the checks read its configuration and not its code, which may be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

from millrace.config.tables.schedules import (
    AReaL,
    LlamaRL,
    Millrace,
    RollFlash,
    StaleFlow,
    StreamRL,
    redundant_samples,
)
from millrace.controller.state.run_state import ReplicaRecord, RunState
from millrace.core import clock
from millrace.core.errors import MillraceError
from millrace.core.events import Event
from millrace.core.types import State, Trajectory
from millrace.ledger.sqlite import SqliteLedger
from millrace.schedule.device_turns import Use
from millrace_sim.roles.sim_reward_worker import FORKED
from millrace_sim.roles.world import World
from millrace_sim.simulation import Observer, Scenario

SILENCE_TIMEOUTS = 2.0
"""A replica reports every second, and is killed 4/3 of its heartbeat deadline after its last report; and a
margin."""


class InvariantBroken(MillraceError, AssertionError):
    """Millrace broke a promise."""


def require(holds: bool, promise: str, **values: Any) -> None:
    """Raises: InvariantBroken, which names the promise and the actual `values`."""
    if not holds:
        text = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise InvariantBroken(f"{promise}: {text}")


class Invariants(Observer):
    """Watches one run. A controller that resumes remembers only what is durable."""

    def __init__(self, scenario: Scenario) -> None:
        self._config, self._workload = scenario.config, scenario.workload
        self._schedule = schedule = scenario.config.schedule
        mix = "within" if isinstance(schedule, AReaL | LlamaRL | StaleFlow) else "between"
        self._mix: str = schedule.mix if isinstance(schedule, Millrace | RollFlash | StreamRL) else mix
        self._ordered = not any(mishaps.overtaken for mishaps in scenario.faults.mishaps)
        self._steady = self._ordered and not scenario.faults.clock_jumps
        self._published: dict[int, set[str]] = {}
        self._step = 0  # newest committed version
        self._on: dict[str, Callable[[dict[str, Any]], None]] = {
            "run_started": self._on_start,
            "restarted": self._on_restart,
            "published": self._on_published,
            "staged": self._on_served,
            "fetched": self._on_served,
            "pulled": self._on_served,
            "report": self._on_report,
            "finished": self._on_finished,
            "ended": self._on_ended,
            "step": self._on_step,
            "left": self._on_left,
        }
        self._world = World()
        self._begin_life()

    @property
    def num_corrupted(self) -> int:
        """Number of corrupted copies of weights."""
        return self._world.num_corrupted

    def on_start(self, world: World) -> None:
        self._world = world

    def _begin_life(self) -> None:
        self._num_tokens: dict[int, int] = {}  # trajectory -> its tokens at the last look
        self._leases: dict[int, int] = {}
        self._served: dict[str, tuple[int, int]] = {}  # replica -> (epoch, version)
        self._newest: dict[str, int] = {}  # of each host, at the last look
        self._pulling: dict[str, int] = {}  # what each replica was pulling then
        self._rescues: dict[str, int] = {}  # replica -> older version that it was sent to fetch
        self._heard_s: dict[str, float] = {}  # replica -> its last report, or its start
        self._state: RunState | None = None

    def on_event(self, event: Event) -> None:
        check = self._on.get(event.kind)
        if check is not None:
            check(event.fields)

    # ------------------------------------------------------------ events

    def _on_start(self, event: dict[str, Any]) -> None:
        self._begin_life()
        require(
            event["resumed_version"] == self._step,
            "a resumed run goes on from the last committed step",
            resumed=event["resumed_version"],
            committed=self._step,
        )

    def _on_restart(self, event: dict[str, Any]) -> None:
        self._num_tokens[event["trajectory_id"]] = 0

    def _on_published(self, event: dict[str, Any]) -> None:
        version, digest = event["version"], event["digest"]
        known = self._published.setdefault(version, {digest})
        require(digest in known, "a version that is published again is the same", version=version)
        require(version <= self._step, "nothing is published before it is committed", version=version)

    def _on_served(self, event: dict[str, Any]) -> None:
        version, digest = event["version"], event["digest"]
        require(
            digest in self._published.get(version, ()),
            "every digest that is held or served was published",
            version=version,
            digest=digest,
        )

    def _on_report(self, event: dict[str, Any]) -> None:
        """If messages keep their order, a report has the version that the controller knows. A replica that
        leaves may still swap to the version of a pull for which nobody waits any more."""
        self._heard_s[event["replica"]] = clock.now()
        if self._state is None or not self._ordered:
            return
        replica = self._state.replicas[event["replica"]]
        if replica.leaving:
            return
        known = {replica.version} | ({replica.pulling} if replica.pulling >= 0 else set())
        known |= {-1} if replica.use is Use.FALLING_ASLEEP else set()
        require(
            event["version"] in known, "a replica serves the version that was ordered", known=known, **event
        )

    def _on_left(self, event: dict[str, Any]) -> None:
        self._heard_s.pop(event["replica"], None)
        self._served.pop(event["replica"], None)

    def _on_finished(self, event: dict[str, Any]) -> None:
        tid, tokens = event["trajectory_id"], event["tokens"]
        if self._config.reward.kind == "environment":
            return
        due, _ = self._workload.completion_length(self._config.seed, tid, self._config.sampling.max_tokens)
        require(tokens == due, "a completion is whole", trajectory_id=tid, tokens=tokens, due=due)

    def _on_ended(self, event: dict[str, Any]) -> None:
        require(bool(event["reason"]), "what ends untrained has a reason", **event)

    def _on_step(self, event: dict[str, Any]) -> None:
        if event["replayed"]:
            require(event["version"] <= self._step, "only committed steps are replayed", **event)
            return
        require(
            event["version"] == self._step + 1,
            "steps follow each other",
            version=event["version"],
            committed=self._step,
        )
        self._step = event["version"]
        bound = self._config.staleness_bound
        if bound is not None:
            stalest = event["staleness_max"]
            require(stalest <= bound, "staleness within its bound", staleness=stalest, bound=bound)

    # ------------------------------------------------------------ the controller's state

    def on_decision(self, state: RunState) -> None:
        self._state = state
        leased = self._check_leases(state)
        for tid, trajectory in state.trajectories.items():
            require(
                (trajectory.state is State.LEASED) == (tid in leased),
                "a trajectory is leased exactly where a replica holds it",
                trajectory=trajectory,
            )
            self._check_tokens(trajectory)
            require(
                trajectory.group_id in state.groups, "a live trajectory's group is live", trajectory_id=tid
            )
        self._check_groups(state)
        self._check_hosts(state)
        for replica in state.replicas.values():
            self._check_version(state, replica)
            self._check_silence(replica)

    def _check_leases(self, state: RunState) -> dict[int, str]:
        leased: dict[int, str] = {}
        for name, replica in state.replicas.items():
            require(replica.alive or not replica.leased, "a dead replica holds no lease", replica=name)
            for tid, trajectory in replica.leased.items():
                require(tid not in leased, "leases are unique", trajectory_id=tid, replica=name)
                require(
                    trajectory.replica == name and trajectory.epoch == replica.epoch,
                    "a lease names the incarnation that holds it",
                    trajectory=trajectory,
                    epoch=replica.epoch,
                )
                require(
                    trajectory.lease >= self._leases.get(tid, 0), "lease numbers only rise", trajectory_id=tid
                )
                self._leases[tid] = trajectory.lease
                leased[tid] = name
        for tid in state.queued:
            require(tid not in leased, "what is queued is not leased", trajectory_id=tid)
        return leased

    def _check_tokens(self, trajectory: Trajectory) -> None:
        tid, count = trajectory.trajectory_id, len(trajectory.columns)
        before = self._num_tokens.get(tid, 0)
        if count == before:
            return
        require(
            count >= before, "tokens are lost only by a counted restart", trajectory_id=tid, before=before
        )
        columns = trajectory.columns
        versions = [version for version, _ in columns.sampled_runs]
        require(
            count == len(columns.logprobs) == sum(num for _, num in columns.runs),
            "every token has its log-prob and its version",
            trajectory=trajectory,
        )
        forks = {fork.start for fork in columns.forks}
        begins = [0, *(stop for start, stop, _ in columns.turns() if start in forks), count]
        places = chain.from_iterable(range(end - begin) for begin, end in pairwise(begins))
        require(
            all(token in (place, FORKED) for token, place in zip(columns.tokens, places, strict=True)),
            "tokens come whole and in order",
            trajectory_id=tid,
        )
        require(versions == sorted(versions), "versions never fall along a trajectory", trajectory_id=tid)
        if self._mix != "within":
            turn = columns if self._mix == "never" else columns[columns.turn_start :]
            num = len({version for version, _ in turn.sampled_runs})
            require(num <= 1, "one version per turn, or trajectory", trajectory_id=tid, versions=versions)
        self._num_tokens[tid] = count

    def _check_groups(self, state: RunState) -> None:
        size = self._config.batch.group_size + redundant_samples(self._schedule)
        for group_id, record in state.groups.items():
            members = record.group.members
            require(len(members) == size, "a group has all of its members", group_id=group_id)
            if record.ready_rank is not None:
                live = [member for member in members if member.live]
                require(
                    2 <= len(live) <= self._config.batch.group_size
                    and all(m.state is State.BUFFERED and m.reward is not None for m in live),
                    "a group is ready when all of it is scored",
                    group_id=group_id,
                )
        for group_id in state.taken:
            require(
                state.groups[group_id].ready_rank is not None,
                "only ready groups are taken",
                group_id=group_id,
            )

    def _check_hosts(self, state: RunState) -> None:
        """Versions never go back on a host, and no replica pulls a version that its host does not have."""
        self._newest = {host: newest for host, newest in self._newest.items() if host in state.relays}
        for host, relay in state.relays.items():
            before = self._newest.get(host, -1)
            require(
                relay.newest >= before or relay.endpoint is None,
                "the newest version of a host never goes back",
                host=host,
                before=before,
                now=relay.newest,
            )
            self._newest[host] = relay.newest
        for replica in state.replicas.values():
            version = replica.pulling
            if version != self._pulling.get(replica.name, -1):
                versions = state.relays[replica.host].versions
                require(
                    version < 0 or version in versions,
                    "a replica pulls what its host holds",
                    version=version,
                    versions=versions,
                )
            self._pulling[replica.name] = version

    def _check_version(self, state: RunState, replica: ReplicaRecord) -> None:
        """Versions never go back on a replica, except for lost trajectories that no other replica can go on
        with."""
        epoch, before = self._served.get(replica.name, (-1, -1))
        if not replica.alive or epoch != replica.epoch:
            before = -1
            self._rescues.pop(replica.name, None)
        if replica.version < before and replica.use is not Use.ASLEEP:
            require(
                self._rescues.get(replica.name) == replica.version,
                "a replica goes back only for lost trajectories",
                replica=replica.name,
                before=before,
                now=replica.version,
            )
        if 0 <= replica.pulling < replica.version:
            if self._rescues.get(replica.name) != replica.pulling:
                orphaned = replica.pulling in state.versions_queued
                require(
                    orphaned, "an older version is fetched only for lost trajectories", replica=replica.name
                )
            self._rescues[replica.name] = replica.pulling
        self._served[replica.name] = replica.epoch, replica.version

    def _check_silence(self, replica: ReplicaRecord) -> None:
        """Heartbeats are a third of their deadline apart; a deadline later the replica is killed."""
        if not replica.alive:
            self._heard_s.pop(replica.name, None)
            return
        silent_s = clock.now() - self._heard_s.setdefault(replica.name, clock.now())
        limit_s = SILENCE_TIMEOUTS * self._config.supervision.heartbeat_timeout_s
        require(
            silent_s <= limit_s or not self._steady,
            "a silent replica is killed when its heartbeat is late",
            replica=replica.name,
            silent_s=silent_s,
        )

    # ------------------------------------------------------------ the end

    def on_end(self, ledger: SqliteLedger, world: World) -> None:
        require(not world.overlaps, "one side at a time holds a device that is lent", overlaps=world.overlaps)
        accounting, recovery, steps = ledger.accounting(), ledger.recover(), ledger.steps_after(0)
        require(accounting.balanced, "the accounts close", accounting=accounting)
        require(accounting.in_flight == 0, "nothing is in flight at the end", accounting=accounting)
        require(
            self._config.staleness_bound is None or accounting.stale == 0,
            "a bounded schedule lets no group grow too old",
            accounting=accounting,
        )
        require(
            not recovery.unused_group_ids, "no prompt is passed over", group_ids=recovery.unused_group_ids
        )
        require(
            recovery.version == self._config.steps, "the run makes all its steps", version=recovery.version
        )
        final = next(iter(world.exports.values()), None)
        require(final is not None, "the final weights are exported")
        assert final is not None
        committed = tuple(tuple(record.trajectory_ids) for record in steps)
        trained = [tid for step in final.trained for tid in step]
        require(len(set(trained)) == len(trained), "nothing is trained twice in the final weights")
        require(
            final.trained == committed, "the final weights are what the ledger says", trained=final.trained
        )
        poison = [tid for tid in trained if world.poisons(tid)]
        require(not poison, "what a step cannot be made of is not trained on", trajectory_ids=poison)
        require(accounting.trained == len(trained), "trained counts what was trained", accounting=accounting)
        prompts = [len(record.group_ids) for record in steps]
        require(
            set(prompts) == {self._config.batch.prompts}, "every batch has all of its groups", batches=prompts
        )
