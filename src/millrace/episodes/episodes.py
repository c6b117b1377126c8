"""The episodes of one worker: answers turns, and repeats an episode that another process has begun."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from millrace.config.tables.task import EnvironmentRewardSection, Task
from millrace.conversations.call_forms import NO_STYLE, style_of
from millrace.conversations.call_reader import CallReader
from millrace.conversations.encoding import encodable
from millrace.core.completion.columns import token_array
from millrace.core.completion.forks import context, num_seen, num_shared
from millrace.core.errors import ConfigError, DeadlineExceeded
from millrace.core.turns.end_ids import end_ids
from millrace.core.turns.turn_bounds import ENVIRONMENT_S, NO_BOUNDS
from millrace.core.types import Abstain, Failed, Finish, Observed, Score, Scored, ScoreRequest
from millrace.episodes.bridge import Bridge, PlainBridge
from millrace.episodes.environment import (
    CONTEXT,
    Answer,
    Budgets,
    Done,
    Environment,
    EpisodeLost,
    Ids,
    Observation,
    OverBudget,
    SampledTurn,
    by_name,
    length,
    to_answer,
    to_begin,
)
from millrace.episodes.forms import Form, load_environment
from millrace.episodes.harmony import make_chat_bridge, turn_reader
from millrace.episodes.open_episodes import Cause, Episode, OpenEpisodes
from millrace.episodes.snapshots import TRAINING, EpisodeSnapshot, RecoveryError, Snapshots
from millrace.rewards.scores import finite, raised, to_score
from millrace.tasks.asked_row import own_copy
from millrace.tasks.chat import More, conversation, followed, is_messages
from millrace.tasks.rows import Row, find_column
from millrace.tasks.tasks import Task as Rows
from millrace.tasks.tasks import first_usable

T = TypeVar("T")


class OtherRequest(Exception):
    """An agent that is repeated asks something else than it did."""


THREADS = 64
"""Calls at once: as many as the controller sends (`controller.episode.LANES`)."""

LOST_MAX, UNREPEATED_LOST_MAX = THREADS // 8, THREADS // 2
"""So many calls over their deadline that still run end a worker. The kernel ends their threads, and other
workers repeat its episodes. The second number is of episodes that cannot be repeated, and would fail."""


class Episodes:
    """`begin` gives the messages that a row's conversation begins with; without chat a text.

    Each call of an environment has a thread, and so have up to `THREADS` agents that start ahead. A call
    over `timeout_s` fails, and its thread is lost until it ends. `LOST_MAX` lost threads end the worker, and
    before there are still `THREADS` others. In a `trial` every turn of an environment that can be restored
    begins with a restored one."""

    def __init__(
        self,
        kind: Callable[[], Environment],
        *,
        name: str,
        file: str | None,
        bridge: Bridge,
        decode: Callable[[list[int]], str],
        budgets: Budgets,
        snapshots: Snapshots,
        timeout_s: float,
        trial: bool = False,
        begin: Callable[[Row], str | list[dict[str, Any]]] = lambda row: "",
    ) -> None:
        self._kind, self._name, self._file, self._bridge, self._decode = kind, name, file, bridge, decode
        self._budgets, self._snapshots, self._timeout_s = budgets, snapshots, timeout_s
        self._trial, self._begin = trial, begin
        self._recovery = getattr(kind, "recovery", "replayed")
        self._lost_max = UNREPEATED_LOST_MAX if self._recovery == "failed" else LOST_MAX
        self._threads = ThreadPoolExecutor(2 * THREADS + self._lost_max, "environment")
        self._lost = list[Future[Any]]()
        self._starting: dict[int, Future[Episode]] = {}  # by trajectory, which did not ask for it yet
        self._starts = list[Future[Episode]]()
        self._wants_ids = getattr(kind, "wants_ids", False)
        self.schemas: Sequence[dict[str, Any]] = getattr(kind, "schemas", ())
        self.open = OpenEpisodes()

    async def answered(self, request: ScoreRequest, row: Row) -> Score | Observed:
        """As `answer`. Raises: DeadlineExceeded: too many environments are over their deadline."""
        late = partial(self.forget, [request.trajectory_id])
        return await self._in_time(partial(self.answer, request, row), late)

    async def answered_short(self, request: ScoreRequest) -> Score | Observed | None:
        """As `answered`, of a request that leaves out what is known. None: its episode is not here."""
        if (found := self.open.whole(request)) is None:
            return None
        return await self.answered(*found)

    async def begun(self, row: Row, members: Sequence[ScoreRequest] = ()) -> More | Ids | Failed:
        """What follows the prompt of a row. `members`: trajectories that go on with episodes which start
        now. The answer is the first one's, if that has token ids. Raises: as `answered`."""
        ids = [member.trajectory_id for member in members]
        self.forget(ids)
        self._starts = [one for one in self._starts if not one.done()]
        for trajectory_id in ids[1 : 1 + THREADS - len(self._starts)]:
            start = self._threads.submit(_of_one_process, partial(self._started, row, trajectory_id))
            self._starting[trajectory_id] = start
            self._starts.append(start)
        return await self._in_time(partial(self.first, row, *members[:1]), partial(self.forget, ids[:1]))

    def forget(self, trajectory_ids: list[int]) -> Future[None] | None:
        """These trajectories have ended, or begin again. A `close` that hangs takes a thread. Returns what
        removes their snapshots; None: they have none."""
        self.open.end_at_once(trajectory_ids)
        for trajectory_id in trajectory_ids:
            starting = self._starting.pop(trajectory_id, None)
            if starting is not None and starting.done():
                self._threads.submit(self._close_started, starting)
            elif starting is not None and not starting.cancel():
                starting.add_done_callback(self._close_started)  # in its thread
        for episode in self.open.forget(trajectory_ids):
            self._threads.submit(self.open.close, episode, Cause.FORGOTTEN)
        if self._recovery == "restored":
            return self._threads.submit(self._snapshots.forget, trajectory_ids)
        return None

    async def _in_time(self, call: Callable[[], T], late: Callable[[], object]) -> T | Failed:
        """`late`: what is done after a call that ends over its deadline."""
        future = self._threads.submit(_of_one_process, call)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            future.add_done_callback(lambda _: late())
            self._lost = [one for one in (*self._lost, future) if not one.done()]
        reason = f"{self._name} took longer than `reward.timeout_s` ({self._timeout_s:g} s)"
        if len(self._lost) >= self._lost_max:
            raise DeadlineExceeded(reason)
        return Failed(reason)

    def first(self, row: Row, member: ScoreRequest | None = None) -> More | Ids | Failed:
        """As `begun`."""
        return self._twice(partial(self._begun, row, member), again=True)

    def _begun(self, row: Row, member: ScoreRequest | None) -> More | Ids:
        episode = self._started(row, -1 if member is None else member.trajectory_id)
        begun = episode.begun
        if member is not None and isinstance(begun, Ids):
            member = replace(member, prompt=token_array(begun))
            self.open.keep(member, Observed(token_array(), begins=True), episode)
        else:
            self.open.close(episode, Cause.PROMPT)
        return begun

    def answer(self, request: ScoreRequest, row: Row) -> Score | Observed:
        """The answer to the last turn of the request. An exception of the environment becomes a Failed. An
        episode that is lost is repeated once, if it can be."""
        return self._twice(
            partial(self._answer, request, row), again=request.begins or self._recovery == "replayed"
        )

    def _twice(self, call: Callable[[], T], *, again: bool, words: str = "") -> T | Failed:
        """`again`: a call whose episode is lost is made once more."""
        try:
            return call()
        except EpisodeLost as lost:
            if again:
                return self._twice(call, again=False, words=", twice")
            return Failed(f"{self._name}: {lost}{words}")
        except RecoveryError as error:
            return Failed(f"{self._name}: {error}")
        except MemoryError:
            raise
        except BaseException as error:  # not even SystemExit may leave the thread
            return raised(self._name, error, self._file)

    def _answer(self, request: ScoreRequest, row: Row) -> Score | Observed:
        """Raises: EpisodeLost."""
        if request.begins:
            return self._begin_anew(request, row)
        if not request.turns:
            request = replace(request, turns=[(0, len(request.tokens), True)])
        turns, episode = len(request.turns[::2]), self.open.take(request)
        cause: Cause | None = Cause.FAILED
        try:
            if episode is None:
                again = self._again(request, row, turns - 1)
                if not isinstance(again, Episode):
                    return again
                episode = again
            episode.seconds = request.spent_s
            answer = self._step(episode, request, turns)
            score, cause = self._judge(request, row, episode, answer)
            return score
        finally:
            if episode is not None and cause is not None:
                self.open.close(episode, cause)

    def _begin_anew(
        self, request: ScoreRequest, row: Row, episode: Episode | None = None
    ) -> Observed | Failed:
        """Begin the episode of a trajectory, without what it had. Raises: as `_started`."""
        starting = self._starting.pop(request.trajectory_id, None)
        for earlier in self.open.forget([request.trajectory_id]):
            self._threads.submit(self.open.close, earlier, Cause.FORGOTTEN)
        try:
            if episode is None:
                start = partial(self._started, row, request.trajectory_id)
                episode = start() if starting is None else starting.result()
            self._follow(episode, row)
            observed = _own_prompt(request, episode.begun)
            room = request.room + num_seen(request.forks, len(request.tokens), len(request.prompt))
            if isinstance(episode.begun, Ids) and len(episode.begun) >= room:
                return Failed(
                    f"{self._name}: the first request of the agent has {len(episode.begun)} tokens, and a "
                    f"sequence has {room} (`rollout.max_sequence_tokens`)"
                )
            self.open.keep(request, observed, episode)
            episode = None
            return observed
        finally:
            if episode is not None:
                self.open.close(episode, Cause.FAILED)

    def _started(self, row: Row, trajectory_id: int) -> Episode:
        """An episode before its first turn. Raises: EpisodeLost. What the environment raises."""
        episode = self.open.open(self._kind, row, trajectory_id)
        try:
            self._reset(episode, row)
        except BaseException:
            self.open.close(episode, Cause.FAILED)
            raise
        return episode

    def _close_started(self, starting: Future[Episode]) -> None:
        if starting.exception() is None:
            self.open.close(starting.result(), Cause.FORGOTTEN)

    def _again(self, request: ScoreRequest, row: Row, turns: int) -> Episode | Observed | Failed:
        """The episode after so many turns, in this process. That of an agent that asks something else begins
        anew. Raises: RecoveryError. What the environment raises."""
        if turns and self._recovery == "failed":
            raise RecoveryError("the process of the episode is gone, and it cannot be repeated")
        if not turns and self._recovery == "restored":  # what is left of an earlier begin is of no use
            self._snapshots.forget([request.trajectory_id])
        episode = self.open.open(self._kind, row, request.trajectory_id)
        try:
            if turns and self._recovery == "restored":
                self._restore(episode, request, row, turns)
            else:
                self._repeat(episode, request, row, turns)
        except OtherRequest:
            if not episode.turns:
                return self._begin_anew(request, row, episode)
            self.open.close(episode, Cause.OTHER_TOKENS)
            return self._begin_anew(request, row)
        except BaseException:
            self.open.close(episode, Cause.FAILED)
            raise
        return episode

    def _restore(self, episode: Episode, request: ScoreRequest, row: Row, turns: int) -> None:
        snapshot = self._snapshots.find(request, row, turns)
        episode.environment.restore(own_copy(row), snapshot.data)
        episode.turns, episode.reward, episode.before = snapshot.turns, snapshot.reward, snapshot.before
        episode.rewards.update(snapshot.rewards)

    def _reset(self, episode: Episode, row: Row) -> None:
        episode.begun = to_begin(self._name, episode.environment.reset(own_copy(row)))

    def _follow(self, episode: Episode, row: Row) -> None:
        """Note what its conversation begins with."""
        if not isinstance(episode.begun, Ids):
            messages = self._begin(row)
            episode.before = () if isinstance(messages, str) else followed(messages, episode.begun)

    def _repeat(self, episode: Episode, request: ScoreRequest, row: Row, turns: int) -> None:
        """Raises: RecoveryError: the episode differs from the recorded one. OtherRequest: an agent's."""
        self._reset(episode, row)
        self._follow(episode, row)
        begun = episode.begun
        asked = context(request.prompt, request.tokens, request.forks, request.turns[0][0])
        if isinstance(begun, Ids) and request.prompt and token_array(begun) != asked:
            raise OtherRequest
        forks = {fork.start: fork for fork in request.forks}
        for number in range(1, turns + 1):
            answer = self._step(episode, request, number)
            start, stop, _ = request.turns[2 * number - 1]
            _, *follows = forks.get(start, (start, None, 0))
            recorded = [list(request.tokens[start:stop]), *follows]
            if not isinstance(answer, Observation) or self._appended(request, episode, answer) != recorded:
                if isinstance(begun, Ids):
                    raise OtherRequest
                raise RecoveryError(
                    f"the repeated episode differs from the recorded one after turn {number}: its "
                    "answers depend on more than the row and the actions\n"
                    '  Make them depend on these alone, or set `recovery` in the class to "restored" or '
                    '"failed".'
                )

    def _step(self, episode: Episode, request: ScoreRequest, number: int) -> Answer:
        """The answer to turn `number`, from 1 on."""
        began_s = time.monotonic()
        episode.turns += 1
        start, stop, _ = request.turns[2 * number - 2]
        action: Any = list(request.tokens[start:stop])
        if self._wants_ids:
            finish = request.finish if 2 * number > len(request.turns) else Finish.TURN
            action = SampledTurn(action, list(request.logprobs[start:stop]), finish)
        else:
            action = self._decode(action)
        answer = to_answer(self._name, episode.environment.step(action), episode.turns)
        episode.seconds += time.monotonic() - began_s
        rewards = by_name(answer.reward)
        episode.reward += sum(rewards.values())
        episode.rewards.update({name: value for name, value in rewards.items() if name})
        return answer

    def _judge(
        self, request: ScoreRequest, row: Row, episode: Episode, answer: Answer
    ) -> tuple[Score | Observed, Cause | None]:
        """What the answer means, and why the episode is closed; None: it is kept."""
        metrics = _finite(answer.metrics)
        if answer.reward is not None:
            metrics[f"turn_{episode.turns}"] = sum(by_name(answer.reward).values())
        metrics |= episode.rewards
        if self._budgets.episode_s is not None:
            metrics[ENVIRONMENT_S] = episode.seconds
        if isinstance(answer, Done):
            if answer.reward is None:
                return Abstain(f"{self._name} ended with a reward of None"), Cause.ENDED
            return self._end(episode, metrics, ""), Cause.ENDED
        budget = self._budgets.used_up(request, episode.turns, episode.seconds)
        if isinstance(answer, OverBudget):
            return self._end(episode, metrics, budget or answer.budget), Cause.ENDED
        room = _room(answer, request)
        if budget or not self._bridge.fits(length(answer.text), room):
            return self._end(episode, metrics, budget or CONTEXT), Cause.ENDED
        tokens, after, kept = self._appended(request, episode, answer)
        if kept + len(tokens) >= room:
            return self._end(episode, metrics, CONTEXT), Cause.ENDED
        if not tokens:  # the next turn could not be told from this one
            reason = f"{self._name} returned an observation without a token: a text that is not empty"
            return Failed(reason), Cause.FAILED
        bounds = answer.text.bounds if isinstance(answer.text, Ids) else NO_BOUNDS
        observed = Observed(token_array(tokens), metrics, after, kept, bounds)
        return observed, self._keep(request, row, episode, observed)

    def _keep(self, request: ScoreRequest, row: Row, episode: Episode, observed: Observed) -> Cause | None:
        """Until the next turn. Returns as `_judge`."""
        if self._recovery == "restored":
            data = episode.environment.snapshot()
            before = episode.before if isinstance(episode.before, str) else list(episode.before)
            snapshot = EpisodeSnapshot(episode.turns, episode.reward, dict(episode.rewards), data, before)
            self._snapshots.keep(request, row, list(observed.tokens), snapshot)
            if self._trial:
                return Cause.TRIAL
        self.open.keep(request, observed, episode)
        return None

    def _appended(self, request: ScoreRequest, episode: Episode, observation: Observation) -> list[Any]:
        """The ids of the answer to the last turn, and what they follow: `Observed.after` and
        `Observed.kept`."""
        after, text = _after(observation, request), observation.text
        if after == 0:
            ids = list(text) if isinstance(text, Ids) else self._bridge.whole(text)
            episode.before = () if isinstance(text, Ids) else text
            kept = num_shared(request.prompt, ids[:-1])
            return [ids[kept:], 0, kept]
        if isinstance(text, Ids):
            return [list(text), after, 0]
        start, stop, _ = request.turns[2 * (observation.after or episode.turns) - 2]
        turn = list(request.tokens[start:stop])
        try:
            ids = self._bridge.after(turn, text, episode.before)
        except ConfigError:  # the template would write such a begin anew: what the model saw of it stays
            ids = self._bridge.after(turn, text)
        return [ids, after, 0]

    def _end(self, episode: Episode, metrics: dict[str, float], budget: str) -> Score:
        """`budget`: what was used up; empty: the environment ended the episode."""
        if budget:
            episode.reward += getattr(episode.environment, "cut_off", float)()
        ended = {f"ended_by_{name}": float(name == budget) for name in self._budgets.names}
        everything: dict[str, Any] = {
            "reward": episode.reward,
            "turns": float(episode.turns),
            **metrics,
            **ended,
        }
        score = to_score(self._name, everything)
        if isinstance(score, Scored) and budget:
            return Scored(score.value, score.metrics, truncated=True)
        return score


def _own_prompt(request: ScoreRequest, begun: More | Ids) -> Observed:
    """How the prompt of an episode that begins differs from its group's."""
    if not isinstance(begun, Ids):
        return Observed(token_array(), begins=True)
    if token_array(begun) == request.prompt:
        return Observed(token_array(), bounds=begun.bounds, begins=True)
    kept = num_shared(request.prompt, begun[:-1])
    return Observed(token_array(begun[kept:]), {}, 0, kept, begun.bounds, begins=True)


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The finite numbers."""
    numbers = ((encodable(str(key)), finite(value)) for key, value in metrics.items())
    return {key: value for key, value in numbers if value is not None}


def _after(observation: Observation, request: ScoreRequest) -> int | None:
    """How many tokens of the trajectory an observation follows; None: all that there are."""
    return observation.after and request.turns[2 * observation.after - 2][1]


def _room(observation: Observation, request: ScoreRequest) -> int:
    """How many tokens an observation may have, with those of the prompt that it begins with."""
    seen = partial(num_seen, request.forks, num_prompt=len(request.prompt))
    after = _after(observation, request)
    if after is None:
        return request.room
    return request.room + seen(stop=len(request.tokens)) - (seen(stop=after) if after else 0)


def _of_one_process(call: Callable[[], T]) -> T:
    """The result of a call. A process that an environment forked ends here: it would answer twice."""
    process = os.getpid()
    try:
        return call()
    finally:
        if os.getpid() != process:
            os._exit(1)


def make_episodes(
    config: EnvironmentRewardSection,
    task: Task,
    rows: Rows,
    tokenizer: Any,
    run_dir: Path | None,
    model_path: str,
    stream: str = TRAINING,
) -> Episodes:
    """The bridge is of chat if the first row is. `run_dir` None: a trial. `stream`: see `Snapshots`.

    Raises: ConfigError, RewardError: the environment cannot be loaded, or the chat template is none that
        turns can be appended to. DataError: the model's files are damaged."""
    kind, file = load_environment(config.path)
    chat = task.chat or is_messages(find_column(first_usable(rows), rows.prompt))
    style = style_of(tokenizer, dict(task.chat_arguments)) if chat else NO_STYLE
    shown = style.shows_tools
    reader = CallReader(style.form, plain=not shown, is_opened=style.opens_thinking)
    form = Form(kind, config.path, config, prompt=rows.prompt, reader=reader, shown=shown)
    bridge: Bridge = PlainBridge(tokenizer)

    def begin(row: Row) -> str | list[dict[str, Any]]:
        return conversation(task, tokenizer, row, find_column(row, rows.prompt), "the row")

    if chat:
        ends = end_ids(model_path, tokenizer)
        bridge = make_chat_bridge(tokenizer, config.role, dict(task.chat_arguments), form.schemas, ends)
    return Episodes(
        form,
        name=config.path,
        file=file,
        bridge=bridge,
        decode=turn_reader(tokenizer),
        budgets=Budgets.of(config),
        snapshots=Snapshots(run_dir, config.snapshot_bytes, stream),
        timeout_s=config.timeout_s,
        trial=run_dir is None,
        begin=begin,
    )
