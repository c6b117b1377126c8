"""The reward worker: prompts for group ids, and scores for completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import cached_property
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from millrace.config.schema import Config
from millrace.config.tables import task as table
from millrace.config.tables.task import EnvironmentRewardSection
from millrace.conversations.tokenizer import check_characters, encode, encode_prompt, load_dated_tokenizer
from millrace.core.completion.columns import token_array
from millrace.core.errors import DataError, DeadlineExceeded, OutOfMemory, needing_memory
from millrace.core.turns.packed import PackedRequest, pack_answer, unpack_request
from millrace.core.types import BadPrompt, Failed, Finish, Observed, Prompt, Score, Scored, ScoreRequest
from millrace.episodes.environment import Ids
from millrace.episodes.episodes import Episodes, make_episodes
from millrace.episodes.snapshots import TRAINING
from millrace.placement.model_directory import vocab_size
from millrace.rewards.limits import limit_process_memory
from millrace.rewards.mathematics.math_reward import normal_answer
from millrace.rewards.program_text import program_of
from millrace.rewards.references import Extract
from millrace.rewards.reward_calls import PlainCalls, make_calls
from millrace.rewards.reward_process import Arguments
from millrace.rewards.scores import shortened
from millrace.tasks.asked_row import asked_columns, row_digest
from millrace.tasks.chat import More, Tools, find_reference
from millrace.tasks.order import permuted
from millrace.tasks.parts import Part, Parts, made
from millrace.tasks.rows import Row, find_column
from millrace.tasks.tasks import Task

T = TypeVar("T")
_ADVICE = "Raise `reward.memory_mb`, or look for what keeps so much."

Inputs = Arguments | Failed | OutOfMemory
"""What a reward is called with, or the reason why it is missing."""

Scorable = tuple[Part, Inputs]


class TaskRewardWorker:
    """Role `millrace.episodes.reward_worker:TaskRewardWorker` (a core.protocols.RewardWorker).

    The worker keeps no state but its running episodes: every other answer is a function of the configuration
    and the request. So any worker can serve any group, and a new worker can replace a killed worker. A thread
    makes rows and tokens, and a process calls plain reward functions in its main thread. So the loop can
    answer while they run.

    Args:
        config: a dumped `Config`.
        limit_memory: bound this process's memory by `reward.memory_mb`; False if others use the process too.
        answers: give with each score the answer of the completion.
        wrong_gold: score each row as another row (see `WrongGold`).
        stream: who asks, if an environment answers (see `episodes.snapshots.Snapshots`).
        run_dir: the directory of the run, which keeps what a judge said; None: there is no run.
    Raises:
        ConfigError, DataError, RewardError: tokenizer, task or reward cannot be made as configured.
    """

    def __init__(
        self,
        config: dict[str, Any],
        limit_memory: bool = True,
        answers: bool = False,
        run_dir: str | None = None,
        wrong_gold: bool = False,
        stream: str = TRAINING,
    ) -> None:
        self._config = Config.model_validate(config)
        self._tokenizer = load_dated_tokenizer(self._config.model.path, self._config.model.date)
        self._vocab = vocab_size(Path(self._config.model.path))
        directory = None if run_dir is None else Path(run_dir)
        self._parts = Parts(self._config, self._tokenizer)
        parts = {part.name: part for part in self._parts.all}
        self._episodes, self._calls, self._answers = None, {}, {}
        if isinstance(reward := self._config.reward, EnvironmentRewardSection):
            part = self._parts.all[0]
            shared = reward, part.config.one_task, part.task, self._tokenizer
            if reward.agent is None:
                self._episodes = make_episodes(*shared, directory, self._config.model.path, stream)
            else:
                from millrace.episodes.gateway.agent_environment import make_agent_episodes

                self._episodes = make_agent_episodes(
                    *shared, self._config.sampling, directory, self._config.model.path
                )
        else:
            self._calls = made(
                parts,
                lambda part: make_calls(part.config.reward, part.task, directory, limit_memory=limit_memory),
            )
            if answers:
                self._answers = made(parts, lambda part: make_answer(part.config.reward))
        if wrong_gold:
            self._parts.wrap(WrongGold)
        self._rows = ThreadPoolExecutor(1, "rows")
        if limit_memory:
            limit_process_memory(self._config.reward.memory_mb)

    async def prompts(
        self, group_ids: list[int], members: Sequence[Sequence[int]] = ()
    ) -> list[Prompt | BadPrompt]:
        """The prompts of these groups, in order; an unusable row comes with the reason. `members`: the
        trajectories of each group. Their agents start together. The first one's request is the prompt.
        Without members no agent starts, and the prompt is empty: each episode begins with one of its own.

        Raises: OutOfMemory: this process is at its limit.
        """
        with needing_memory("a reward worker", "prompts", _ADVICE):
            if self._episodes is not None:
                begun = zip(group_ids, members or [()] * len(group_ids), strict=True)
                return [await self._begun(self._episodes, *of_group) for of_group in begun]
            return await self._in_rows(lambda: [self._prompt(group_id) for group_id in group_ids])

    async def row_ids(self, group_ids: list[int]) -> list[str]:
        located = (self._parts.locate(group_id) for group_id in group_ids)
        return [part.row_id(row) for part, row in located]

    async def forget(self, trajectory_ids: list[int]) -> dict[str, int]:
        """These trajectories have ended, and their ends are recorded, or they begin again. Returns when
        their snapshots are gone: the counts of `OpenEpisodes`."""
        if self._episodes is None:
            return {}
        if (removal := self._episodes.forget(trajectory_ids)) is not None:
            await asyncio.wrap_future(removal)
        return self._episodes.open.counts()

    async def score(self, requests: list[ScoreRequest]) -> AsyncIterator[tuple[int, Score | Observed]]:
        """(trajectory id, score) in the order of the requests, each as soon as it is known.

        Plain functions run one after the other. Each call begins when the score before it was sent. So if a
        call ends this process, or blocks its interpreter, the caller waits for exactly that call. Async
        functions all start at once. Closing the iterator cancels calls that have not begun.

        Raises:
            OutOfMemory: this process is at its limit; another process may compute the next score.
            DeadlineExceeded: the plain function of the next score; its process was killed, and another
                worker has one.
        """
        if self._episodes is not None:
            for request in requests:
                yield request.trajectory_id, await self._answered(self._episodes, request)
            return
        inputs = await self._in_rows(lambda: [self._inputs(request) for request in requests])
        pairs = list(zip((request.trajectory_id for request in requests), inputs, strict=True))
        if not any(self._calls[part.name].is_async for part, _ in inputs):
            async with aclosing(self._in_order(inputs)) as scores:
                for request in requests:
                    yield request.trajectory_id, await anext(scores)
            return
        exhausted = None
        async with asyncio.TaskGroup() as group:
            started = [
                group.create_task(self._attempt(one)) if self._calls[one[0].name].is_async else None
                for one in inputs
            ]
            try:
                for (trajectory_id, one), task in zip(pairs, started, strict=True):
                    result = await (task or self._attempt(one))
                    if isinstance(result, OutOfMemory | DeadlineExceeded):
                        exhausted = result
                        break
                    yield trajectory_id, result
            except GeneratorExit:  # leave the group normally: it would wrap the exception
                pass
            for task in filter(None, started):
                task.cancel()
        if exhausted is not None:
            raise exhausted

    async def answer(self, packed: PackedRequest) -> Any:
        """What an environment answers, packed. None: the request leaves out what this worker has not.

        Raises: DeadlineExceeded: too many environments are over their deadline."""
        assert self._episodes is not None
        request = unpack_request(packed)
        if request.known is None:
            return pack_answer(await self._answered(self._episodes, request))
        answer = await self._episodes.answered_short(request)
        return pack_answer(answer and self._embeddable(self._episodes, request, answer))

    async def _answered(self, episodes: Episodes, request: ScoreRequest) -> Score | Observed:
        part, row = self._parts.locate(request.group_id)
        try:
            columns = await self._in_rows(lambda: asked_columns(part, row, request.row_digest))
        except DataError as error:
            episodes.forget([request.trajectory_id])
            return Failed(str(error))
        return self._embeddable(episodes, request, await episodes.answered(request, columns))

    def _embeddable(
        self, episodes: Episodes, request: ScoreRequest, answer: Score | Observed
    ) -> Score | Observed:
        """The answer, if the model has embeddings for its tokens; otherwise why the trajectory fails."""
        part, row = self._parts.locate(request.group_id)
        try:
            if isinstance(answer, Observed) and answer.tokens:
                self._check_vocab(f"{part.row_id(row)}: an answer of the environment", answer.tokens)
        except DataError as error:
            episodes.forget([request.trajectory_id])
            return Failed(str(error))
        return answer

    async def _attempt(self, inputs: Scorable) -> Score | OutOfMemory | DeadlineExceeded:
        """The score. What ends this process is returned, because the task group would wrap an error."""
        try:
            return await self._score(inputs)
        except (OutOfMemory, DeadlineExceeded) as error:
            return error

    async def _in_order(self, inputs: Sequence[Scorable]) -> AsyncGenerator[Score, None]:
        """The scores. Calls of a plain function, one after the other, go to its process together."""
        for (name, is_call), run in groupby(inputs, lambda one: (one[0].name, isinstance(one[1], tuple))):
            calls = self._calls[name]
            if not is_call or not isinstance(calls, PlainCalls):
                for scorable in run:
                    yield await self._score(scorable)
                continue
            together: list[Any] = list(run)
            async with aclosing(calls.scores([arguments for _, arguments in together])) as scores:
                for part, (completion, *_) in together:
                    yield await self._finished(part, await anext(scores), completion)

    async def _score(self, scorable: Scorable) -> Score:
        part, inputs = scorable
        match inputs:
            case Failed():
                return inputs
            case OutOfMemory():
                raise inputs
            case completion, answer, columns:
                score = await self._calls[part.name].score(completion, answer, columns)
                return await self._finished(part, score, completion)

    async def _finished(self, part: Part, score: Score, completion: str) -> Score:
        """With the metrics of its part, and the answer if answers are wanted."""
        score, find = self._parts.measured(part, score), self._answers.get(part.name)
        if find is None or not isinstance(score, Scored):
            return score
        return replace(score, answer=await self._in_rows(lambda: find(completion)))

    def _inputs(self, request: ScoreRequest) -> Scorable:
        part, row = self._parts.locate(request.group_id)
        try:
            with needing_memory("a reward worker", "a completion and its row", _ADVICE):
                text = self._tokenizer.decode(
                    list(request.tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
                columns = asked_columns(part, row, request.row_digest)
                answer = None if part.task.answer is None else find_reference(columns, part.task.answer)
                return part, (text, answer, columns)
        except DataError as error:
            return part, Failed(str(error))
        except OutOfMemory as error:
            return part, error

    async def _begun(self, episodes: Episodes, group_id: int, members: Sequence[int]) -> Prompt | BadPrompt:
        """The prompt with what the environment adds. Of a bad prompt no episode is left."""
        part, row = self._parts.locate(group_id)
        try:
            columns = await self._in_rows(lambda: asked_columns(part, row, ""))
            asked = [ScoreRequest(member, group_id, token_array(), Finish.TURN) for member in members]
            if self._config.own_prompts and not asked:
                return Prompt(group_id, part.row_id(row), token_array(), "", row_digest=row_digest(columns))
            more = await episodes.begun(columns, asked)
        except DataError as error:
            return BadPrompt(group_id, part.row_id(row), str(error))
        if isinstance(more, Ids):
            prompt = await self._in_rows(lambda: self._of_ids(group_id, more))
        elif isinstance(more, Failed):
            prompt = BadPrompt(group_id, part.row_id(row), f"{part.row_id(row)}: {more.reason}")
        else:
            prompt = await self._in_rows(lambda: self._prompt(group_id, more, episodes.schemas))
        if isinstance(prompt, BadPrompt):
            episodes.forget([*members])
        return prompt

    def _of_ids(self, group_id: int, ids: Ids) -> Prompt | BadPrompt:
        """The prompt that the first request of an agent has."""
        part, row = self._parts.locate(group_id)
        row_id = part.row_id(row)
        text = self._tokenizer.decode(list(ids))
        try:
            self._check_tokens(row_id, text, ids)
        except DataError as error:
            return BadPrompt(group_id, row_id, str(error))
        digest = row_digest(part.task.columns(row))
        return Prompt(group_id, row_id, token_array(ids), text, ids.bounds, digest)

    def _prompt(
        self, group_id: int, more: More = "", tools: Sequence[dict[str, Any]] = ()
    ) -> Prompt | BadPrompt:
        part, row = self._parts.locate(group_id)
        row_id = part.row_id(row)
        try:
            text = part.task.prompt_text(row, more, tools)
            self._check_characters(row_id, text)
            check_characters(f"{row_id}: the prompt", text)
            if part.task.is_chat(row):  # a chat template writes its own special tokens
                tokens = encode(self._tokenizer, text)
            else:
                tokens = encode_prompt(self._tokenizer, text)
            self._check_tokens(row_id, text, tokens)
            digest = row_digest(part.task.columns(row))
        except DataError as error:
            return BadPrompt(group_id, row_id, str(error))
        except MemoryError:
            raise
        except Exception as error:  # a row, a template or a tokenizer may raise anything
            return BadPrompt(group_id, row_id, f"{row_id}: {type(error).__name__}: {shortened(error)}")
        return Prompt(group_id, row_id, token_array(tokens), text, row_digest=digest)

    @property
    def _room(self) -> int:
        """The most tokens of a prompt."""
        return self._config.rollout.max_sequence_tokens - self._config.sampling.max_tokens

    @cached_property
    def _characters_per_token(self) -> int:
        """The most characters of a token in the vocabulary. A normalizer that drops characters allows
        more."""
        return max(len(token) for token in self._tokenizer.get_vocab())

    def _check_characters(self, row_id: str, text: str) -> None:
        """Refuse a long text before tokenization, which takes seconds for some megabytes."""
        if len(text) > self._room and len(text) > self._room * self._characters_per_token:
            raise DataError(
                f"{row_id}: the prompt has {len(text):,} characters, more than {self._room} tokens can hold "
                "(`rollout.max_sequence_tokens` - `sampling.max_tokens`)"
            )

    def _check_vocab(self, what: str, tokens: Sequence[int]) -> None:
        if (largest := max(tokens)) >= self._vocab:
            token = self._tokenizer.convert_ids_to_tokens(largest)
            raise DataError(
                f"{what} has {token!r}, token {largest}, and the model has {self._vocab} "
                "(`vocab_size` in config.json): resize its embeddings"
            )

    def _check_tokens(self, row_id: str, text: str, tokens: Sequence[int]) -> None:
        room = self._room
        if not text.strip() or not tokens:
            raise DataError(f"{row_id}: the prompt is empty")
        if len(tokens) > room:
            raise DataError(
                f"{row_id}: the prompt has {len(tokens)} tokens, there is room for {room} "
                "(`rollout.max_sequence_tokens` - `sampling.max_tokens`)"
            )
        self._check_vocab(f"{row_id}: the prompt", tokens)

    async def _in_rows(self, make: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._rows, make)


TRIED = 64


class WrongGold:
    """A Task. Prompts are those of `task`. All other columns are another row's, so every kind of reward takes
    the wrong gold: an answer, tests, or what a gym scores by.

    The other row follows from the row alone, and its gold differs. A row without such another is broken.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self.rows, self.prompt, self.answer = task.rows, task.prompt, task.answer

    def row_id(self, row: int) -> str:
        return f"canary/{self._task.row_id(row)}"

    def columns(self, row: int) -> Row:
        """Raises: DataError: no row that was tried has another gold."""
        own = self._task.columns(row)
        for turn in range(min(TRIED, self.rows)):
            other = permuted((row + turn) % self.rows, self.rows, "wrong-gold")
            columns = self._task.columns(other)
            if other != row and self._gold(columns) != self._gold(own):
                return {**columns, self.prompt: find_column(own, self.prompt)}
        raise DataError(f"{self.row_id(row)}: no other row has another gold answer, so none can be wrong")

    def prompt_text(self, row: int, more: More = "", tools: Tools = ()) -> str:
        self.columns(row)
        return self._task.prompt_text(row, more, tools)

    def is_chat(self, row: int) -> bool:
        return self._task.is_chat(row)

    def _gold(self, columns: Row) -> object:
        if self.answer is not None:
            return str(find_column(columns, self.answer)).strip()
        return {name: value for name, value in columns.items() if name != self.prompt}


LONGEST = 80
"""The most characters. Of a longer answer, the beginning and a digest are kept."""


def make_answer(config: table.Reward) -> Callable[[str], str]:
    """A function that gives the answer of a completion; empty: there is none. With a judge or a user's
    reward function the answer is the whole completion. A sum has the answer of its first member."""
    match config:
        case table.SumRewardSection():
            return make_answer(config.members[0].reward)
        case table.MathRewardSection():
            return lambda completion: short_answer(normal_answer(completion))
        case table.GymRewardSection() | table.ExactRewardSection() | table.JsonRewardSection():
            extract = Extract(config.extract)
        case table.CodeRewardSection():
            return lambda completion: short_answer(program_of(completion, config.function).strip())
        case table.PatternRewardSection() | table.JudgeRewardSection() | table.FunctionRewardSection():
            extract = Extract(None)
    return lambda completion: short_answer(extract(completion) or "")


def short_answer(answer: str) -> str:
    if len(answer) <= LONGEST:
        return answer
    return f"{answer[:40]}... {blake2b(answer.encode(errors='replace'), digest_size=8).hexdigest()}"
