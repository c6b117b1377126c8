"""The decision loop: on any news, get the schedule's decisions and send out the orders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice

from millrace.controller.context import RunContext
from millrace.controller.group_ends import bring_back, end_late_waits, expire
from millrace.controller.pace import rest_s
from millrace.controller.state.orders import Move, Pull
from millrace.controller.state.run_state import RunState
from millrace.core import clock
from millrace.core.types import RESTS, BadPrompt, Group, Prompt, Work
from millrace.schedule.ahead import long_round
from millrace.schedule.view import View

TICK_S = 1.0  # decisions are at most this far apart


class Decisions:
    """Consumes the pulse; produces orders in the replicas' mailboxes. Ends with the run."""

    def __init__(self, run: RunContext, check: Callable[[RunState], None]) -> None:
        self._run, self._check = run, check
        self._repack_at_s = 0.0
        self._cached_view: View | None = None  # None: the state has changed

    def _view(self) -> View:
        if self._cached_view is None:
            self._cached_view = self._run.state.view()
        return self._cached_view

    async def loop(self) -> None:
        tick_s = min(TICK_S, self._run.schedule.repack_interval_s or TICK_S)
        while True:
            began_s, num_pulses = clock.now(), self._run.pulse.count
            self.round()
            await asyncio.sleep(rest_s(began_s))
            if self._run.pulse.count == num_pulses:
                await self._run.pulse.wait(timeout_s=tick_s)
            # Without this wait the first of several replicas that get room would get all the work.
            several = len(self._run.mailboxes) > 1
            await asyncio.sleep(self._run.pace.decision_s if several else 0.0)

    def round(self) -> None:
        """One of each decision, in this order."""
        self._cached_view = None
        self._run.device.hand_over()
        end_late_waits(self._run)
        if expire(self._run, self._view()):
            self._cached_view = None
        self._refresh()
        self._place()
        self._admit()
        self._repack()
        self._check(self._run.state)

    def _refresh(self) -> None:
        state = self._run.state
        for order in self._run.schedule.refresh(self._view()):
            self._cached_view = None
            state.replicas.begin_pull(order.replica_id, order.version)
            self._run.mailboxes[order.replica_id].put(Pull(order.version, order.discard))

    def _place(self) -> None:
        """Lease lost and restarted trajectories, under their own version unless versions may mix."""
        state, schedule, works = self._run.state, self._run.schedule, _Outbox()
        if not state.queued:
            return
        view, self._cached_view = self._view(), None
        lost = set(schedule.restart(view))
        queued = sorted(state.queued.values(), key=lambda t: t.trajectory_id)
        for trajectory in queued if lost else ():
            if (version := state.queued_view(trajectory).version) in lost:
                self._run.restart(trajectory, f"version {version} is no longer held")
        queued = [trajectory for trajectory in queued if trajectory.trajectory_id in state.queued]
        placed = schedule.place(view, [state.queued_view(trajectory) for trajectory in queued])
        leased = [(one, replica) for one, replica in zip(queued, placed, strict=True) if replica is not None]
        for trajectory, replica in leased:
            works.add(replica, state.lease(trajectory, replica))
        if any(trajectory.columns.turn_start for trajectory, _ in leased):
            self._run.flush()  # an observation is durable before a replica goes on from it
        self._submit(works)

    def _admit(self) -> None:
        run, works, groups, view = self._run, _Outbox(), list[Group](), self._view()
        replicas = run.schedule.admit(view)
        if long_round(view):
            self._cached_view = None
            for replica, leases in bring_back(run, replicas):
                works.add(replica, *leases)
            run.begin_episodes()
            return self._submit(works)
        prompts = list(islice(iter(self._next_prompt, None), len(replicas)))
        lengths = [run.state.measured.lengths.predicted(prompt.row_id) for prompt in prompts]
        for index, replica in run.schedule.pair(view, replicas, lengths):
            group, leases = run.state.admit(prompts[index], replica, now_s=clock.now())
            groups.append(group)
            works.add(replica, *leases)
        if groups:
            self._cached_view = None
            run.ledger.admit(groups)
            run.events.emit("admitted", group_ids=[g.group_id for g in groups])
            self._submit(works)
            run.begin_episodes()

    def _next_prompt(self) -> Prompt | None:
        """The next usable prompt whose row does not rest. Others are skipped, with an event. None: not
        fetched yet."""
        run = self._run
        while (prompt := run.pool.next_prompt()) is not None:
            if isinstance(prompt, Prompt):
                quarantined = prompt.row_id in run.state.quarantined
                if not (reason := "quarantined" if quarantined else run.selection.why_rests(prompt)):
                    return prompt
                prompt = BadPrompt(prompt.group_id, prompt.row_id, reason)
            run.ledger.skip([prompt])
            run.pool.skip(prompt.group_id)
            kind = "rested" if prompt.reason.startswith(RESTS) else "skipped"
            run.events.emit(kind, group_id=prompt.group_id, row_id=prompt.row_id, reason=prompt.reason)
        return None

    def _submit(self, works: _Outbox) -> None:
        for replica, batch in works.items():
            self._run.submit(replica, batch)

    def _repack(self) -> None:
        """Runs every `repack_interval_s`, and at once when a new version can be pulled."""
        run, interval = self._run, self._run.schedule.repack_interval_s
        if interval is None or not (run.repack_due or clock.now() >= self._repack_at_s):
            return
        for order in run.schedule.repack(self._view()):
            self._cached_view = None
            run.state.replicas.begin_move(order.source, order.shares)
            run.mailboxes[order.source].put(Move(order.shares))
        run.repack_due, self._repack_at_s = False, clock.now() + interval
        run.state.replicas.note_kv()


class _Outbox(dict[str, list[Work]]):
    """Works by replica. A replica gets its works in one message, so that they enter its engine together."""

    def add(self, replica: str, *works: Work) -> None:
        self.setdefault(replica, []).extend(works)
