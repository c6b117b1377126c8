"""Environments answer turns, and a lost episode is repeated exactly or fails."""

from __future__ import annotations

import asyncio
import string
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

from millrace.conversations.tokenizer import END, load_tokenizer, make_character_tokenizer
from millrace.core.completion.columns import token_array
from millrace.core.completion.forks import Fork
from millrace.core.errors import ConfigError, DeadlineExceeded, RewardError
from millrace.core.types import Abstain, Failed, Finish, Observed, Scored, ScoreRequest
from millrace.episodes import episodes as of_worker
from millrace.episodes.bridge import ChatBridge, PlainBridge
from millrace.episodes.environment import Budgets, Done, Ids, Observation
from millrace.episodes.episodes import Episodes
from millrace.episodes.forms import load_environment
from millrace.episodes.open_episodes import Cause
from millrace.episodes.snapshots import Snapshots


class Counter:
    """Ends after "stop". Observes how often it was asked."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.asked = 0

    def reset(self, row: dict[str, Any]) -> str | None:
        self.row = row
        return row.get("more")

    def step(self, action: str) -> Observation | Done | str:
        self.asked += 1
        if "stop" in action:
            return Done(1.0, {"asked": float(self.asked)})
        if "raise" in action:
            raise ValueError("no such action")
        if "none" in action:
            return Done(None)
        if "late" in action:
            return Observation("a", after=True if "true" in action else 2)
        if "empty" in action:
            return Observation("", after=1 if "after" in action else None)
        if "number" in action:
            return 7  # type: ignore[return-value]
        return Observation(f"<{self.asked}>", reward=0.25)


class Fickle(Counter):
    def step(self, action: str) -> Observation | Done | str:
        return Observation(f"<{type(self).made}>")


class Lasting(Counter):
    recovery = "failed"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_character_tokenizer(directory, string.ascii_letters + string.digits + " <|>\n")
    return load_tokenizer(directory)


def episodes(
    tokenizer: Any, kind: Any = Counter, turns: int = 8, timeout_s: float = 5.0, **budgets: Any
) -> Episodes:
    return Episodes(
        kind,
        name="env",
        file=None,
        bridge=PlainBridge(tokenizer),
        decode=lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
        budgets=Budgets(turns=turns, **budgets),
        snapshots=Snapshots(None, 0),
        timeout_s=timeout_s,
    )


def request(
    tokenizer: Any, *texts: str, room: int = 100, finish: Finish = Finish.TURN, spent_s: float = 0.0
) -> ScoreRequest:
    """`texts`: actions and observations in turns."""
    tokens: list[int] = []
    turns = []
    for index, text in enumerate(texts):
        start = len(tokens)
        tokens += tokenizer.encode(text, add_special_tokens=False)
        turns.append((start, len(tokens), index % 2 == 0))
    return ScoreRequest(4, 1, token_array(tokens), finish, turns, room, spent_s)


def ids(tokenizer: Any, text: str) -> Any:
    return token_array(tokenizer.encode(text, add_special_tokens=False))


def test_an_episode_of_three_turns(tokenizer: Any) -> None:
    some = episodes(tokenizer)
    made = Counter.made
    assert some.answer(request(tokenizer, "go"), {}) == Observed(ids(tokenizer, "<1>"), {"turn_1": 0.25})
    assert some.answer(request(tokenizer, "go", "<1>", "go"), {}) == Observed(
        ids(tokenizer, "<2>"), {"turn_2": 0.25}
    )
    end = some.answer(request(tokenizer, "go", "<1>", "go", "<2>", "stop"), {})
    assert isinstance(end, Scored) and end.value == 1.5 and not end.truncated
    assert end.metrics["turn_3"] == 1.0 and end.metrics["turns"] == 3 and end.metrics["asked"] == 3
    assert Counter.made == made + 1  # nothing was repeated


def test_another_worker_repeats_a_lost_episode(tokenizer: Any) -> None:
    asked = request(tokenizer, "go", "<1>", "go", "<2>", "stop")
    first, second = (episodes(tokenizer).answer(asked, {}) for _ in range(2))
    assert first == second and isinstance(first, Scored) and first.value == 1.5


def test_a_repeated_episode_that_differs_fails(tokenizer: Any) -> None:
    answer = episodes(tokenizer, Fickle).answer(request(tokenizer, "go", "<0>", "go"), {})
    assert isinstance(answer, Failed) and "after turn 1" in answer.reason and "recovery" in answer.reason


def test_an_episode_that_cannot_be_repeated_fails(tokenizer: Any) -> None:
    answer = episodes(tokenizer, Lasting).answer(request(tokenizer, "go", "<1>", "go"), {})
    assert isinstance(answer, Failed) and "cannot be repeated" in answer.reason
    assert isinstance(episodes(tokenizer, Lasting).answer(request(tokenizer, "go"), {}), Observed)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("raise", "ValueError: no such action"),
        ("number", "returned a int"),
        ("empty", "an observation without a token"),
        ("empty after", "an observation without a token"),
        ("late", "an observation after turn 2: 0 to 1, or None"),
        ("late true", "an observation after turn True: 0 to 1, or None"),
    ],
)
def test_a_broken_environment_fails_with_the_reason(tokenizer: Any, action: str, reason: str) -> None:
    answer = episodes(tokenizer).answer(request(tokenizer, action), {})
    assert isinstance(answer, Failed) and reason in answer.reason


def test_no_opinion_abstains(tokenizer: Any) -> None:
    assert isinstance(episodes(tokenizer).answer(request(tokenizer, "none"), {}), Abstain)


@pytest.mark.parametrize(
    ("budget", "changed"),
    [
        ("turns", {"turns": 1}),
        ("context", {"room": 3}),
        ("tokens", {"finish": Finish.LENGTH, "episode_tokens": 3}),
        ("sampled", {"episode_tokens": 2}),
        ("sampled", {"episode_tokens": 2, "finish": Finish.LENGTH}),
        ("seconds", {"episode_s": 60.0, "spent_s": 60.0}),
    ],
)
def test_each_budget_ends_an_episode_by_name(tokenizer: Any, budget: str, changed: dict[str, Any]) -> None:
    own = {name: changed[name] for name in changed.keys() & Budgets.__dataclass_fields__}
    others = {name: changed[name] for name in changed.keys() - own}
    score = episodes(tokenizer, **own).answer(request(tokenizer, "go", **others), {})
    assert isinstance(score, Scored) and score.truncated and score.value == 0.25
    assert [name for name, value in score.metrics.items() if name.startswith("ended_by") and value] == [
        f"ended_by_{budget}"
    ]


def test_a_chat_bridge_ends_the_message_and_begins_the_next_one(tokenizer: Any) -> None:
    bridge = ChatBridge(tokenizer, "user", {})
    end = tokenizer.eos_token_id
    appended = bridge.after([7, end], f"a {END} b")
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"},
         {"role": "user", "content": "a  b"}], add_generation_prompt=True, return_dict=False)  # fmt: skip
    head = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], return_dict=False
    )
    assert [appended[0], *appended[-2:]] == [whole[len(head)], *whole[-2:]]
    assert appended.count(end) == 1  # the observation's text cannot end the message
    assert bridge.after([5], "a")[0] == end  # a turn that a budget ended gets its end


def test_a_template_that_rewrites_history_is_refused(tokenizer: Any) -> None:
    class Rewriting:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
            return f"{len(messages)} messages: " + "".join(one["content"] for one in messages)

    with pytest.raises(ConfigError, match="rewrites earlier messages"):
        ChatBridge(Rewriting(), "user", {})


def test_environments_that_hang_take_no_thread_from_the_others(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_worker, "THREADS", 3)
    monkeypatch.setattr(of_worker, "LOST_MAX", 3)
    free, together = threading.Event(), threading.Barrier(3)

    class Hanging(Counter):
        def step(self, action: str) -> str:
            free.wait(60) if action == "hang" else together.wait(60)
            return "a"

    async def play() -> None:
        some = episodes(tokenizer, Hanging, timeout_s=0.1)
        hung = [some.answered(request(tokenizer, "hang"), {}) for _ in range(2)]
        assert all("took longer" in one.reason for one in await asyncio.gather(*hung))
        some._timeout_s = 60
        others = [some.answered(request(tokenizer, "go"), {}) for _ in range(3)]
        assert {type(one) for one in await asyncio.gather(*others)} == {Observed}
        some._timeout_s = 0.1
        with pytest.raises(DeadlineExceeded):
            await some.answered(request(tokenizer, "hang"), {})
        free.set()

    asyncio.run(play())


@pytest.mark.parametrize(("recovery", "most"), [("replayed", 2), ("failed", 3)])
def test_threads_end_a_worker_while_they_run_and_later_where_no_episode_can_be_repeated(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, recovery: str, most: int
) -> None:
    monkeypatch.setattr(of_worker, "LOST_MAX", 2)
    monkeypatch.setattr(of_worker, "UNREPEATED_LOST_MAX", 3)
    free = {name: threading.Event() for name in "ab"}

    class Slow(Counter):
        def step(self, action: str) -> str:
            free[action].wait(60)
            return "a"

    Slow.recovery = recovery  # type: ignore[attr-defined]

    async def play() -> None:
        some = episodes(tokenizer, Slow, timeout_s=0.1)
        for _ in range(2 * most):  # each ends after its deadline
            assert isinstance(await some.answered(request(tokenizer, "a"), {}), Failed)
            free["a"].set()
            wait(some._lost, timeout=60)
            free["a"].clear()
        for _ in range(most - 1):
            assert isinstance(await some.answered(request(tokenizer, "b"), {}), Failed)
        with pytest.raises(DeadlineExceeded):
            await some.answered(request(tokenizer, "b"), {})
        free["b"].set()

    asyncio.run(play())


def test_an_answer_after_its_deadline_leaves_no_environment_behind(tokenizer: Any) -> None:
    free, closed = threading.Event(), threading.Event()

    class Slow(Counter):
        def step(self, action: str) -> str:
            free.wait(60)
            return "a"

        def close(self) -> None:
            closed.set()

    some = episodes(tokenizer, Slow, timeout_s=0.1)
    assert isinstance(asyncio.run(some.answered(request(tokenizer, "a"), {})), Failed)
    free.set()
    assert closed.wait(60) and len(some.open) == 0


class Closing(Counter):
    closed: ClassVar[list[str]] = []

    def close(self) -> None:
        type(self).closed.append(str(self.asked))


def test_an_episode_that_begins_again_closes_the_one_before(tokenizer: Any) -> None:
    """Its trajectory lost its tokens: the next request has the first turn again, of equal or other tokens."""
    some = episodes(tokenizer, Closing)
    for text in "go", "go", "so":
        assert some.answer(request(tokenizer, text), {}).tokens == ids(tokenizer, "<1>")
    assert len(some.open) == 1 and some.open.closed == {Cause.OTHER_TOKENS: 2}
    assert some.answer(request(tokenizer, "so", "<1>", "stop"), {}).metrics["asked"] == 2
    assert len(some.open) == 0 and some.open.opened == 3 and some.open.closed[Cause.ENDED] == 1


def test_an_episode_of_as_many_turns_but_other_tokens_is_not_gone_on_with(tokenizer: Any) -> None:
    """Another worker answered the trajectory meanwhile, after it had begun again."""

    class Last(Counter):
        def step(self, action: str) -> Observation | Done | str:
            before, self.before = getattr(self, "before", ""), action
            return Observation(f"{before}{action}")

    some = episodes(tokenizer, Last)
    some.answer(request(tokenizer, "a"), {})
    assert some.answer(request(tokenizer, "b", "b", "c"), {}).tokens == ids(tokenizer, "bc")


@pytest.mark.parametrize("fails", ["make", "reset", "step", "restore", "snapshot", "close"])
def test_what_fails_or_ends_its_thread_is_closed(tokenizer: Any, fails: str) -> None:
    class Failing(Closing):
        recovery = "restored"

        def __getattribute__(self, name: str) -> Any:
            if name == fails:
                raise SystemExit
            return super().__getattribute__(name)

        def __init__(self) -> None:
            super().__init__()
            if fails == "make":
                raise SystemExit

        def snapshot(self) -> bytes:
            return b""

        def restore(self, row: dict[str, Any], snapshot: bytes) -> None:
            pass

    some = episodes(tokenizer, Failing)
    some.answer(request(tokenizer, "go"), {})
    some.answer(request(tokenizer, "go", "<1>", "stop"), {})
    some.forget([4])
    some._threads.shutdown()
    assert len(some.open) == 0


def test_a_begin_that_takes_too_long_fails_alone_and_is_closed(tokenizer: Any) -> None:
    free, closed = threading.Event(), threading.Event()

    class Slow(Counter):
        def reset(self, row: dict[str, Any]) -> None:
            self.slow = bool(row)
            if self.slow:
                free.wait(600)

        def close(self) -> None:
            if self.slow:
                closed.set()

    some = episodes(tokenizer, Slow, timeout_s=0.1)
    some.answer(request(tokenizer, "go"), {})
    failed = asyncio.run(some.begun({"slow": True}))
    assert isinstance(failed, Failed) and "took longer than `reward.timeout_s` (0.1 s)" in failed.reason
    free.set()
    assert closed.wait(600)
    some._threads.shutdown()
    assert len(some.open) == 1 and some.open.closed == {Cause.PROMPT: 1}
    answer = some.answer(request(tokenizer, "go", "<1>", "stop"), {})
    assert isinstance(answer, Scored) and answer.metrics["asked"] == 2


def test_the_agents_of_a_group_start_together_and_what_nobody_asks_for_is_closed(tokenizer: Any) -> None:
    together = threading.Barrier(4)

    class Agent(Counter):
        def reset(self, row: dict[str, Any]) -> Any:
            together.wait(60)
            if Counter.made % 4 == row.get("fails"):
                raise ValueError("no model")
            return Ids([7, 8])

    def begin(trajectory_id: int) -> ScoreRequest:
        asked = replace(request(tokenizer), trajectory_id=trajectory_id, begins=True)
        return replace(asked, prompt=token_array([7, 8]))

    some = episodes(tokenizer, Agent, timeout_s=60.0)
    group = [begin(trajectory_id) for trajectory_id in range(4)]
    assert asyncio.run(some.begun({}, group)) == (7, 8) and len(some.open) == 4
    assert some.answer(begin(1), {}) == Observed(token_array(), begins=True)
    some.forget([2])  # before it was asked for
    some.forget([0, 1])
    assert asyncio.run(some.begun({}, group)) == (7, 8)  # another time: what is left of the first is closed
    some.forget([0, 1, 2, 3])
    some._threads.shutdown()
    assert len(some.open) == 0 and some.open.closed == {Cause.FORGOTTEN: 8}


def test_agents_that_start_for_nobody_keep_no_thread_from_the_turns_of_others(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, honest = threading.Event(), Episodes.first

    class Agent(Counter):
        def reset(self, row: dict[str, Any]) -> None:
            if "slow" in row:
                free.wait(600)

    monkeypatch.setattr(Episodes, "first", lambda some, row, member=None: honest(some, {}, member))
    some = episodes(tokenizer, Agent, timeout_s=5.0)
    turns = [replace(request(tokenizer, "go"), trajectory_id=1000 + one) for one in range(of_worker.THREADS)]

    async def answers() -> list[Any]:
        for group in range(4):
            members = [replace(request(tokenizer), trajectory_id=100 * group + one) for one in range(100)]
            assert not await some.begun({"slow": True}, members)
            some.forget([member.trajectory_id for member in members])
        return await asyncio.gather(*(some.answered(turn, {}) for turn in turns))

    try:
        assert {type(answer) for answer in asyncio.run(answers())} == {Observed}
    finally:
        free.set()
    some.forget([turn.trajectory_id for turn in turns])
    some._threads.shutdown()
    assert len(some.open) == 0


def test_more_agents_than_threads_begin(tokenizer: Any) -> None:
    class Agent(Counter):
        def reset(self, row: dict[str, Any]) -> Any:
            return Ids([7, 8])

    some = episodes(tokenizer, Agent, timeout_s=60.0)
    group = [
        replace(request(tokenizer), trajectory_id=one, begins=True, prompt=token_array([7, 8]))
        for one in range(150)
    ]
    assert asyncio.run(some.begun({}, group)) == (7, 8)
    assert [some.answer(one, {}) for one in group[1:]] == [Observed(token_array(), begins=True)] * 149
    assert len(some.open) == 150
    some.forget([one.trajectory_id for one in group])
    some._threads.shutdown()
    assert len(some.open) == 0


def test_what_is_no_environment_is_named(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text("class Half:\n    def reset(self, row): ...\n\ndef f(): ...\n")
    with pytest.raises(RewardError, match="has the public methods reset: an environment is a class with"):
        load_environment(f"{tmp_path}/env.py:Half")
    with pytest.raises(RewardError, match="is a function: an environment is a class"):
        load_environment(f"{tmp_path}/env.py:f")


class Rewriting(Counter):
    """Its second answer follows the first turn, and its third stands in place of the prompt."""

    def step(self, action: str) -> Observation | Done | str:
        self.asked += 1
        return Observation(f"x{self.asked}", after={2: 1, 3: 0}.get(self.asked))


def test_an_answer_may_follow_an_earlier_turn_or_stand_in_place_of_the_prompt(tokenizer: Any) -> None:
    """A repeated episode has to fork in the same places."""
    prompt, texts = ids(tokenizer, "xy"), ("go", "x1", "go", "x2", "go")
    first = replace(request(tokenizer, *texts[:3]), prompt=prompt)
    answer = episodes(tokenizer, Rewriting).answer(first, {})
    assert answer == Observed(ids(tokenizer, "x2"), {}, after=2)  # tokens of the first turn
    forked = replace(request(tokenizer, *texts), prompt=prompt, forks=[Fork(6, 2)])
    answer = episodes(tokenizer, Rewriting).answer(forked, {})
    assert answer == Observed(ids(tokenizer, "3"), {}, after=0, kept=1)  # the prompt begins with x, too
    for forks in ([], [Fork(6, 4)]):
        failed = episodes(tokenizer, Rewriting).answer(replace(forked, forks=forks), {})
        assert isinstance(failed, Failed) and "differs from the recorded one after turn 2" in failed.reason


def test_a_sequence_of_its_own_has_the_room_of_a_prompt(tokenizer: Any) -> None:
    """What it follows counts, and what it leaves out does not."""
    full = replace(request(tokenizer, "go", "x1", "go", "x2", "go", room=1), prompt=ids(tokenizer, "xy"))
    score = episodes(tokenizer, Rewriting).answer(replace(full, forks=[Fork(6, 2)]), {})
    assert isinstance(score, Observed)


def test_chat_messages_in_place_of_the_prompt_are_what_the_template_writes(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": f"a {END}"}]
    found = ChatBridge(tokenizer, "user", {}).whole(messages)
    plain = [messages[0], {"role": "user", "content": "a Q"}]
    due = tokenizer.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    at = due.index(tokenizer.encode("Q", add_special_tokens=False)[0])
    assert found[:at] == due[:at] and found[len(found) - len(due[at + 1 :]) :] == due[at + 1 :]
    assert found.count(tokenizer.eos_token_id) == due.count(tokenizer.eos_token_id)  # the text ends nothing
