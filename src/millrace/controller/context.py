"""What the sessions of a run share: its state, its wake-ups, and the operations that several sessions need.
No loops are here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from millrace.config.schema import Config
from millrace.controller.episode import LANES, answered
from millrace.controller.evaluation.evaluation_state import Evaluations
from millrace.controller.fleet.fleet import Fleet
from millrace.controller.lent_device import devices
from millrace.controller.pace import Pace
from millrace.controller.patience import Patience
from millrace.controller.reward_pool import RewardPool
from millrace.controller.row_selection import EarlierOfRows, RowSelection
from millrace.controller.run_numbers import RunNumbers
from millrace.controller.state.lineage import Lineage
from millrace.controller.state.orders import Abort, Mailbox, Submit
from millrace.controller.state.relays import Relays
from millrace.controller.state.run_state import RunState
from millrace.controller.waits import Waits
from millrace.core import clock
from millrace.core.events import Events
from millrace.core.protocols import Ledger
from millrace.core.pulse import Pulse
from millrace.core.types import Endpoint, Observed, Published, Score, Scored, State, Trajectory, Work
from millrace.schedule.schedule import Schedule


class RunContext:
    """One run, from the ledger's position on."""

    def __init__(
        self, config: Config, *, fleet: Fleet, ledger: Ledger, schedule: Schedule, events: Events, pace: Pace
    ) -> None:
        self.config, self.ledger, self.schedule, self.events = config, ledger, schedule, events
        self.pace = pace
        self.pulse, self.waits = Pulse(), Waits()
        self.patience = Patience(config.supervision.step_timeout_s)
        self.mailboxes = {spec.name: Mailbox() for spec in fleet.replicas}
        self.trainers = [spec.name for spec in (fleet.trainer, fleet.standby) if spec is not None]
        self.trainer_hosts = fleet.trainer.place.hosts or (fleet.trainer.place.host,)
        hosts = [spec.place.host for spec in fleet.relays]
        relays = Relays(hosts, self.trainer_hosts, config.weights.directory or "")
        self.state = RunState(RunNumbers.of(config, schedule), fleet.hosts, relays)
        self.device = devices(self)
        self.to_stage: deque[Published] = deque()  # in the slots of the root relay, not yet staged
        self.to_relays = Pulse()  # for relays only: `pulse` fires with every completion
        self.lineage = Lineage()
        self.arithmetic = ""  # how the newest trainer process rounds its steps
        self._computes: dict[str, str] = {}
        self.stopping, self.stop_reason = False, "stopped"
        self.repack_due = False
        self.began_s = clock.now()
        self.written_s = self.began_s  # the last write to the ledger
        self._out_of_signal = False
        recovered = ledger.recover()
        self.resumed_version = recovered.version
        self.evaluations = Evaluations(config, ledger.evaluations(), recovered.version)
        self.state.resume(recovered.version, recovered.reached, recovered.quarantined)
        self.selection = RowSelection(config.selection, config.seed)
        self.selection.learn(ledger, ledger.steps_after(0) if config.selection else ())
        self.earlier = EarlierOfRows(config.rollout.drafts, ledger)
        self.pool = RewardPool(
            self.pulse,
            self.waits,
            self._scored,
            next_group_id=recovered.next_group_id,
            prefetch=config.batch.prompts * (1 if self.state.numbers.own_prompts else 2),
            timeout_s=config.reward.timeout_s,
            look_s=pace.look_s,
            lanes=LANES if self.state.numbers.episode_tokens else 1,
            group_size=self.state.numbers.group_size if self.state.numbers.own_prompts else None,
            room=config.rollout.max_sequence_tokens,
        )
        for group in recovered.groups:
            self.request_scores(self.state.adopt(group, birth=recovered.version))
        self.begin_episodes()

    def stop(self, reason: str) -> None:
        """End after the step under way; the first reason counts."""
        if not self.stopping:
            self.stopping, self.stop_reason = True, reason
        self.pulse.fire()

    @property
    def roots(self) -> tuple[Endpoint, ...]:
        """The endpoints of all root relays; empty: one of these relays is not up."""
        endpoints = [self.state.relays[host].endpoint for host in self.trainer_hosts]
        return tuple(filter(None, endpoints)) if all(endpoints) else ()

    def endpoint(self, host: str) -> Endpoint | None:
        """The endpoint of the relay of `host`; None: the relay is not up."""
        return self.state.relays[host].endpoint

    def computes(self, name: str, number_format: str) -> None:
        """Report the number format in which worker `name` computes, when it is new."""
        if number_format and self._computes.get(name) != number_format:
            self._computes[name] = number_format
            self.events.emit("computes", name=name, computes=number_format)

    # ------------------------------------------------------------ leases

    def submit(self, replica: str, works: list[Work]) -> None:
        """Send the works of new leases to `replica`."""
        works = self.earlier.hinted(works, self.state, replica)
        self.mailboxes[replica].put(Submit(works))
        self.events.emit(
            "leased",
            trajectory_ids=[w.trajectory_id for w in works],
            replica=replica,
            version=self.state.replicas[replica].version,
            resumed_tokens=sum(len(w.tokens) for w in works),
            **self.earlier.figures(works),
        )

    def restart(self, trajectory: Trajectory, reason: str) -> None:
        """A queued trajectory begins again: its present turn, or from its prompt."""
        discarded, again = self.state.restart(trajectory)
        if again:
            self.pool.restart(trajectory.trajectory_id)
        self.events.emit(
            "restarted", trajectory_id=trajectory.trajectory_id, discarded_tokens=discarded, reason=reason
        )
        self.begin_episodes()

    def stop_work(self) -> None:
        """Stop the replicas that work on trajectories that have ended. Reward workers stop before the ledger
        says so (`update_ledger`)."""
        workers: dict[str, list[int]] = {}
        for trajectory_id, replica in self.state.cut:
            workers.setdefault(replica, []).append(trajectory_id)
        self.state.cut = []
        for replica, ids in workers.items():
            self.mailboxes[replica].put(Abort(ids))

    # ------------------------------------------------------------ scores and ends

    def request_scores(self, trajectories: Iterable[Trajectory]) -> None:
        """An answer that is here already counts after all requests: it may end a group."""
        asked = [(t.trajectory_id, self.pool.request(self.state.score_request(t))) for t in trajectories]
        for trajectory_id, begun in asked:
            if begun is not None:
                self._scored(trajectory_id, begun.answer, begun.took_s)

    def begin_episodes(self) -> None:
        """Ask for the prompts of trajectories that have prompts of their own."""
        if beginning := self.state.take_beginning():
            self.events.emit("beginning", trajectory_ids=[t.trajectory_id for t in beginning])
            self.request_scores(beginning)

    def _scored(self, trajectory_id: int, score: Score | Observed, took_s: float | None = None) -> None:
        unreplaced, num_queued = self.state.unreplaced, len(self.state.queued)
        begins = isinstance(score, Observed) and score.begins
        discarded = self.state.num_tokens(trajectory_id) if begins else 0
        trajectory = self.state.score(trajectory_id, score)
        if trajectory is None:
            if self.state.parked.answered(trajectory_id):
                self.pool.restart(trajectory_id)
            else:
                self.pool.forget([trajectory_id])  # its episode went on after its end
            return
        if self.state.cut:
            self.stop_work()
        if self.state.unreplaced > unreplaced == 0 and not self._out_of_signal:
            self._warn_out_of_signal()
        self.begin_episodes()
        if isinstance(score, Observed):
            if discarded:
                reason = "its agent was lost, and the next one asks something else"
                self.events.emit(
                    "restarted", trajectory_id=trajectory_id, discarded_tokens=discarded, reason=reason
                )
            start = {"start_s": self.pool.took_s if took_s is None else took_s} if begins else {}
            self.events.emit("observed", trajectory_id=trajectory_id, tokens=len(score.tokens), **start)
            self.pulse.fire()
            return
        value = score.value if isinstance(score, Scored) else None
        self.events.emit(
            "scored",
            trajectory_id=trajectory_id,
            value=value,
            outcome=type(score).__name__.lower(),
            reason=getattr(score, "reason", ""),
        )
        if trajectory.state is State.BUFFERED:
            self.state.measure_group(trajectory.group_id, clock.now())
        # Its group is complete, it ended, or the rest of its group is to start: a decision may differ.
        if trajectory.state is not State.SCORED or len(self.state.queued) > num_queued:
            self.pulse.fire()

    def _warn_out_of_signal(self) -> None:
        """Once a run. The metric `groups_without_signal` of each step counts these groups."""
        self._out_of_signal = True
        self.events.emit(
            "warned",
            source="algorithm.resample",
            reason=f"after version {self.state.version} {self.state.resampled} groups in which all rewards "
            "are equal were replaced, which is the limit: more of them are trained, and teach nothing. The "
            "task is learned, or too hard",
        )

    def give_up_evaluations(self, evaluations: Iterable[str], reason: str) -> None:
        """The run goes on without these evaluations: they are skipped from now on."""
        names = [name for name in evaluations if name not in self.evaluations.given_up]
        self.evaluations.given_up |= dict.fromkeys(names, reason)
        if names:
            warning = f"{', '.join(names)}: skipped from now on: {reason}"
            self.events.emit("warned", source="evaluations", reason=warning)

    # ------------------------------------------------------------ ledger

    def flush(self) -> None:
        """Write changed trajectories to the ledger."""
        self.update_ledger()
        self.ledger.flush()

    def update_ledger(self) -> None:
        """Give changed trajectories to the ledger, which is about to write, and report the ended ones."""
        self.written_s = clock.now()
        changed, grown, ended = self.state.changes()
        self.ledger.update(changed)
        self.pool.forget(answered(changed))
        self.ledger.grow(grown)
        for t in ended:
            self.events.emit("ended", trajectory_id=t.trajectory_id, state=t.state.value, reason=t.reason)
