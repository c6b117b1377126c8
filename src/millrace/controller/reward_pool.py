"""The pool of reward workers: prompts ahead of need (prompts.py), and scores with a deadline each.

Any worker serves any job. If a reward does not answer in time, its worker is killed and replaced. That
trajectory fails with the reason, and the others of its batch are scored again by other workers. While a
reward runs, only that deadline ends its worker: a reward that holds the interpreter stops the worker's
heartbeats.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from millrace.controller.fault import is_workers
from millrace.controller.prompts import PROMPT_EPISODES, PromptStream
from millrace.controller.score_requests import ANY, BATCH, DEATHS_MAX, ScoreRequests
from millrace.controller.state.begun_ahead import Begun, BegunAhead
from millrace.controller.supervisor import PlannedRestart
from millrace.controller.waits import OpenCalls, Waits
from millrace.core import clock
from millrace.core.errors import MillraceError, OutOfMemory, WorkerDied
from millrace.core.protocols import Handle
from millrace.core.pulse import Pulse
from millrace.core.turns.packed import pack_request, unpack_answer
from millrace.core.types import BadPrompt, Failed, Observed, Prompt, Score, ScoreRequest

LOST = "lost_with_worker"
TICK_S = 60.0  # between two looks for work without a pulse
GRACE_S = 2.0  # beyond the deadline: the worker meets it itself unless its reward holds the interpreter
NEWEST = 1 / BATCH  # weight of the newest score in their mean time


class RewardPool:
    """Consumes score requests and prompt demand. Produces `on_score(trajectory_id, score)`, and a buffer of
    prompts in the order of their group ids. Fires `pulse` when either has news. A worker's session that is
    woken waits `look_s` before it looks for work. A worker serves `lanes` calls at once; several lanes have
    one request a call, so that no slow environment delays another. Without `look_s` such a call begins with
    its request, and wakes no session. `group_size`: see `PromptStream`. `room`: tokens of a sequence."""

    def __init__(
        self,
        pulse: Pulse,
        waits: Waits,
        on_score: Callable[[int, Score | Observed], None],
        *,
        next_group_id: int,
        prefetch: int,
        timeout_s: float,
        look_s: float = 0.0,
        lanes: int = 1,
        group_size: int | None = None,
        room: int = 0,
    ) -> None:
        self._pulse, self._waits, self._on_score = pulse, waits, on_score
        # The sessions that wait for work, by worker, and what begins a call of each.
        self._idle: dict[str, tuple[Pulse, Callable[[], bool]]] = {}
        self._timeout_s, self._look_s, self._lanes = timeout_s, look_s, lanes
        self._requests = ScoreRequests(lanes)
        self.spare = frozenset[str]()  # workers that are to end
        self._episodes: dict[str, dict[str, int]] = {}  # counts of workers
        self._gone = Counter[str]()  # the same, of workers that are gone
        self.score_s = 0.0  # recent mean time of one score, by one worker
        self.took_s = 0.0  # the newest answer
        self._ahead = BegunAhead(group_size, room)
        self._begins = min(group_size or 1, PROMPT_EPISODES) if lanes > 1 else 0  # lanes of a prompt
        self._prompts = PromptStream(
            waits,
            next_group_id=next_group_id,
            prefetch=prefetch,
            begin_s=timeout_s + GRACE_S if lanes > 1 else None,
            group_size=group_size,
        )

    def request(self, request: ScoreRequest) -> Begun | None:
        """Returns the answer, if the episode has begun before."""
        if request.begins:
            is_asked, begun = self._ahead.take(request.trajectory_id)
            if is_asked:
                return begun
        self._put(request)
        return None

    def _put(self, request: ScoreRequest) -> None:
        home = self._requests.put(request)
        if self._lanes == 1 or self._look_s:
            return self._wake(home)
        for name in [*self._idle] if home == ANY else (home,):
            if name in self._idle and self._idle[name][1]():
                return

    def forget(self, ids: Collection[int]) -> None:
        """These trajectories need no answer any more, and the ledger is about to say so."""
        self._ahead.forget(ids)
        for worker in self._requests.forget(ids):
            self._wake(worker or next(iter(self._idle), ANY))  # one is enough for episodes of no worker

    def restart(self, trajectory_id: int) -> None:
        """A trajectory that waits for no answer begins again, without the episode so far."""
        if worker := self._requests.restart(trajectory_id):
            self._wake(worker)

    def _wake(self, worker: str = ANY) -> None:
        """The session of `worker`, or of all workers (ANY), looks for work."""
        for name in [*self._idle] if worker == ANY else (worker,):
            if idle := self._idle.pop(name, None):
                idle[0].fire()

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_busy(self) -> int:
        """Workers that score."""
        return self._requests.num_busy

    def spare_all(self, names: Iterable[str]) -> None:
        """These workers, and no others, end after their present job."""
        self.spare = frozenset(names)
        self._wake()

    def next_prompt(self) -> Prompt | BadPrompt | None:
        """The next prompt of the stream, or None: not fetched yet."""
        prompt = self._prompts.next()
        if prompt is not None and self._prompts.is_short:
            self._wake()
        return prompt

    def skip(self, group_id: int) -> None:
        """No trajectory goes on from this prompt. Episodes that were begun for it are closed."""
        self.forget(self._ahead.members([group_id]))

    @property
    def episodes(self) -> dict[str, int]:
        """Episodes that are `open`, and that were closed, by cause, as workers last said. Those of a worker
        that is gone are `lost_with_worker`."""
        return dict(sum(map(Counter, self._episodes.values()), self._gone.copy()))

    def end_prompts(self) -> None:
        """No more prompts are wanted."""
        self._prompts.end()

    def is_scoring(self, handle: Handle) -> bool:
        """Whether a reward or an environment of this worker may be running. These have deadlines of their
        own."""
        return self._requests.is_busy(handle.name)

    # ------------------------------------------------------------ sessions of workers

    async def session(self, handle: Handle) -> None:
        """Serve jobs on one worker until it dies or is spare. Prompts first: generation waits for them."""
        calls = OpenCalls(handle.name, self._waits, self._timeout_s + GRACE_S)
        begin = partial(self._begin, handle, calls)
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(calls.watch(partial(self._late, handle)))
                while handle.name not in self.spare:
                    if self._lanes == 1 and self._prompts.wanted(handle.name):
                        await self._fetch(handle, self._prompts.take(handle.name))
                    elif ended := self._requests.ended(handle.name):
                        counts = await handle.call("forget", ended, timeout_s=TICK_S + self._timeout_s)
                        self._episodes[handle.name] = counts or {}
                        self._requests.told(handle.name)
                    elif self._lanes == 1 and (requests := self._requests.take(handle)):
                        await self._score(handle, requests)
                    elif self._lanes > 1 and self._begin_prompt(handle, group, calls):
                        await asyncio.sleep(0)  # the next one is another worker's
                    elif self._lanes == 1 or not begin():
                        self._idle[handle.name] = (work := Pulse()), begin
                        try:
                            await work.wait(timeout_s=TICK_S)
                        finally:
                            self._idle.pop(handle.name, None)
                        if self._look_s:
                            await asyncio.sleep(self._look_s)
                while calls:  # see `Supervisor`: a call must fail inside the group
                    await calls.ended.wait(timeout_s=TICK_S)
                watch.cancel()
                await asyncio.wait([watch])
        except BaseExceptionGroup as failures:  # one call fails, and the others are cancelled
            raise failures.exceptions[0] from None
        finally:
            calls.close()
            self._prompts.left(handle.name)
            self._requests.left(handle.name)
            for request in self._ahead.left(handle.name):
                self._requests.put(request)
            counts = self._episodes.pop(handle.name, {})
            self._gone.update({LOST if name == "open" else name: num for name, num in counts.items()})
            self._wake()

    def _begin(self, handle: Handle, calls: OpenCalls) -> bool:
        """Begin a call for a request, if there is one that this worker may serve now."""
        if calls.over or not (requests := self._requests.take(handle)):
            return False
        self._ask(handle, calls, requests[0], self._requests.short(handle.name, requests[0]))
        return True

    def _begin_prompt(self, handle: Handle, group: asyncio.TaskGroup, calls: OpenCalls) -> bool:
        """Begin the call of one row, if this worker may begin episodes now."""
        if may := self._prompts.wanted(handle.name) and self._requests.may_begin(handle):
            self._requests.begin(handle.name, self._begins)
            calls.hold(group.create_task(self._fetch(handle, self._prompts.take(handle.name))))
        return may

    async def _fetch(self, handle: Handle, ids: list[int]) -> None:
        began_s = clock.now()
        try:
            prompts = await self._prompts.fetch(handle, ids)
        except BaseException:
            self._wake()  # another worker can fetch the prompts
            raise
        finally:
            self._requests.end(handle.name, self._begins)
        self._requests.begun(handle.name, self._ahead.members(ids), began_s)
        for prompt in prompts:  # the lanes go to the other agents of its group
            for request in self._ahead.requests(prompt) if isinstance(prompt, Prompt) else ():
                self._put(request)
        self._waits.progress(handle.name)
        self._pulse.fire()
        self._wake(handle.name)

    def _ask(self, handle: Handle, calls: OpenCalls, request: ScoreRequest, sent: ScoreRequest) -> None:
        done = partial(self._answered, handle, calls, request, calls.open(request))
        try:
            handle.call_then("answer", pack_request(sent), done=done)
        except MillraceError as error:
            done(None, error)

    def _answered(
        self,
        handle: Handle,
        calls: OpenCalls,
        request: ScoreRequest,
        call: int,
        packed: Any,
        error: Exception | None,
    ) -> None:
        """An environment has answered. If its worker has not what `short` left out, it gets all."""
        if calls.closed:
            return
        waiting, now_s, asked_s = deque([request]), clock.now(), calls.end(call)
        if packed is None and error is None:
            return self._ask(handle, calls, request, request)
        try:
            if error is not None:
                raise self._cause(handle, waiting, error) from None
            waiting.clear()
            self._average(now_s - asked_s)
            took_s = now_s - self._requests.since(request.trajectory_id, asked_s)
            self._finish(handle.name, request.trajectory_id, unpack_answer(packed), took_s)
        except Exception as failed:  # of the worker, or of what the run makes of the answer
            calls.fail(failed)
            if isinstance(error, TimeoutError):
                calls.close()  # its worker is killed, and the other calls are not the cause
        finally:
            self._end_call(handle.name, waiting)
            if calls.over or not calls:
                calls.ended.fire()

    async def _score(self, handle: Handle, requests: list[ScoreRequest]) -> None:
        """Raises: PlannedRestart: the worker is lost."""
        waiting, began_s, most_s = deque(requests), clock.now(), self._timeout_s + GRACE_S
        try:
            async with aclosing(handle.stream("score", requests)) as scores, asyncio.timeout(most_s) as limit:
                while waiting:
                    what = f"the reward of trajectory {waiting[0].trajectory_id}"
                    with self._waits.waiting(handle.name, what, bounded=True):
                        trajectory_id, score = await anext(scores)
                    waiting.popleft()
                    previous_s, began_s = began_s, clock.now()
                    self._average(began_s - previous_s)
                    if waiting:
                        limit.reschedule(began_s + most_s)
                    self._finish(handle.name, trajectory_id, score)
        except Exception as error:
            raise self._cause(handle, waiting, error) from None
        finally:
            self._end_call(handle.name, waiting)

    def _end_call(self, worker: str, waiting: Sequence[ScoreRequest]) -> None:
        """`waiting`: its requests without an answer. The first one may be the cause of an error."""
        self._requests.give_back(worker, waiting)
        if waiting or self._lanes == 1:
            self._wake()
        elif self._requests.waits_for(worker) or self._prompts.is_short:
            self._wake(worker)

    def _cause(self, handle: Handle, waiting: deque[ScoreRequest], error: Exception) -> Exception:
        """What the session raises after `error` of a call. If the first of `waiting` is the cause, it has
        failed, and leaves."""
        if isinstance(error, TimeoutError):  # or DeadlineExceeded: the worker noticed the deadline itself
            return self._late(handle, waiting.popleft(), str(error))
        if not isinstance(error, MillraceError) or not is_workers(error):
            return error
        if self._requests.died(handle.name, waiting[0].trajectory_id):
            failed = Failed(f"scoring killed its worker {DEATHS_MAX} times: {error}")
            self._finish(handle.name, waiting.popleft().trajectory_id, failed)
        if not isinstance(error, WorkerDied | OutOfMemory):
            return error
        return PlannedRestart(f"{handle.name}: lost while scoring: {error}")

    def _late(self, handle: Handle, request: ScoreRequest, why: str = "") -> PlannedRestart:
        """A reward has its deadline behind it: it has failed, and its worker is lost."""
        failed = Failed(f"the reward did not answer within {self._timeout_s:g} s")
        self._finish(handle.name, request.trajectory_id, failed)
        handle.kill()
        reason = f"{handle.name}: a reward took longer than {self._timeout_s:g} s"
        return PlannedRestart(": ".join(filter(None, (reason, why))))

    def _average(self, score_s: float) -> None:
        self.score_s = self.score_s + NEWEST * (score_s - self.score_s) if self.score_s else score_s

    def _finish(self, worker: str, trajectory_id: int, score: Score | Observed, took_s: float = 0.0) -> None:
        self._waits.progress(worker)
        self._requests.answered(worker, trajectory_id, score)
        self.took_s = took_s
        if not self._ahead.came(trajectory_id, Begun(score, worker, took_s)):
            self._on_score(trajectory_id, score)
