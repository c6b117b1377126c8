"""One call of a reward: where it runs, and its deadline."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from contextlib import aclosing
from pathlib import Path

import pytest

from millrace.config.tables import task as table
from millrace.core.errors import DeadlineExceeded, OutOfMemory, RewardError
from millrace.core.types import Failed, Score, Scored
from millrace.rewards.reward_calls import PLAIN, Calls, make_calls
from millrace.rewards.reward_process import TOGETHER_BYTES
from millrace.tasks.tasks import make_task

MAIN_THREAD = """
import asyncio, contextvars, os, signal, subprocess, sys, threading, time
from math_verify import parse, verify

IMPORTED = os.getpid()

def guarded(completion, answer):
    try:
        return float(verify(parse(answer), parse(completion)))
    except Exception:
        return 0.0

def alarmed(completion, answer):
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        return float(answer in completion)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)

def handled(completion, answer):
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.signal(signal.SIGUSR1, before)
    return 1.0

def looped(completion, answer):
    async def compare():
        await asyncio.sleep(0)
        return float(answer in completion)
    return asyncio.get_event_loop().run_until_complete(compare())

def run(completion, answer):
    async def compare():
        return float(answer in completion)
    return asyncio.run(compare())

def main_thread(completion, answer):
    return float(threading.current_thread() is threading.main_thread())

def of_process(completion, answer):
    return float(subprocess.run(["true"]).returncode == 0)

def awaitable(completion, answer):
    async def later():
        await asyncio.sleep(0)
        return 1.0
    return later()

def where(completion, answer):
    return {"reward": os.getpid() == IMPORTED, "pid": os.getpid()}

def waits(completion, answer):
    threading.Event().wait()

def leaves(completion, answer):
    raise SystemExit(3)

def forks(completion, answer, ends=lambda: None):
    child = os.fork()
    if child == 0:
        return ends()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"reward": float(answer in completion), "code": code}

def forks_and_leaves(completion, answer):
    return forks(completion, answer, lambda: sys.exit(3))

def forks_and_raises(completion, answer):
    return forks(completion, answer, lambda: 1 / 0)

def forks_and_answers(completion, answer):
    return forks(completion, answer)

async def forks_on_the_loop(completion, answer):
    return forks(completion, answer, lambda: sys.exit(3))

def cancelled(completion, answer):
    raise asyncio.CancelledError

def interrupted(completion, answer):
    raise KeyboardInterrupt

async def cancelled_on_the_loop(completion, answer):
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    await task

async def interrupted_on_the_loop(completion, answer):
    raise KeyboardInterrupt

def leaves_an_alarm(completion, answer):
    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    signal.alarm(60)
    return {"reward": 1.0, "left_s": left_s}

calls = 0

def counts(completion, answer):
    global calls
    calls += 1
    if completion == "no memory":
        raise MemoryError
    if completion == "hangs":
        threading.Event().wait()
    while completion.startswith("/") and not os.path.exists(completion):
        time.sleep(0.001)
    return {"reward": float(answer in completion), "calls": calls}

def keeps(completion, answer, row):
    row["seen"] = row.get("seen", 0) + 1
    return row["seen"]
"""
ROW = {"prompt": "1+1=", "answer": "2", "row": {"seen": 0}}


@pytest.fixture
def calls(tmp_path: Path):
    """Makes the calls of a function of the file above."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "own.py").write_text(MAIN_THREAD)
    task = make_task(table.FileTaskSection(path=str(tmp_path / "rows.jsonl")), None)

    def made(name: str, timeout_s: float = 600.0):
        path = f"{tmp_path / 'own.py'}:{name}"
        return make_calls(table.FunctionRewardSection(path=path, timeout_s=timeout_s), task, None)

    return made


def scores(calls, *completions: str) -> list[Score]:
    async def all_of_them() -> list[Score]:
        return [await calls.score(completion, "2", ROW) for completion in completions]

    return asyncio.run(all_of_them())


@pytest.mark.parametrize(
    "name",
    ["guarded", "alarmed", "handled", "looped", "run", "main_thread", "of_process", "awaitable"],
)
def test_a_plain_function_may_do_what_only_a_main_thread_may(calls, name):
    assert scores(calls(name), "2", r"\boxed{2}") == [Scored(1.0), Scored(1.0)]


def test_one_function_may_leave_no_loop_behind_for_the_next(calls):
    assert scores(calls("run"), "2") == scores(calls("looped"), "2") == [Scored(1.0)]


def test_calls_of_a_function_are_of_one_process_and_not_of_this_one(calls):
    first, second = scores(calls("where"), "a", "b")
    assert isinstance(first, Scored) and first == second and first.value == 1.0
    assert first.metrics["pid"] != os.getpid()


def test_a_function_cannot_change_the_row_of_the_next_call(calls):
    assert scores(calls("keeps"), "a", "b") == [Scored(1.0), Scored(1.0)]


def test_a_function_that_leaves_has_failed_and_the_next_call_is_scored(calls):
    one = calls("leaves")
    assert [
        isinstance(score, Failed) and "SystemExit" in score.reason for score in scores(one, "a", "b")
    ] == [
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("forks_and_leaves", 3.0),
        ("forks_and_raises", 1.0),
        ("forks_and_answers", 0.0),
        ("forks_on_the_loop", 3.0),
    ],
)
def test_a_child_that_a_function_forks_never_answers_for_it(calls, name, code):
    wanted = [Scored(value, {"code": code}) for value in (1.0, 0.0, 1.0)]
    assert scores(calls(name), "2", "3", "2") == wanted


def test_an_alarm_that_a_function_leaves_does_not_ring_in_the_next(calls):
    assert scores(calls("leaves_an_alarm"), "2", "2") == [Scored(1.0, {"left_s": 0.0})] * 2


@pytest.mark.parametrize(
    "name", ["cancelled", "interrupted", "cancelled_on_the_loop", "interrupted_on_the_loop"]
)
def test_an_error_that_stops_programs_is_a_failure_of_its_call_alone(calls, name):
    for score in scores(calls(name), "a", "b"):
        assert isinstance(score, Failed) and f"{name} raised" in score.reason


def test_the_end_of_a_call_is_not_waited_for_beyond_its_deadline(calls):
    with pytest.raises(DeadlineExceeded, match=r"waits took longer than `reward.timeout_s` \(0.05 s\)"):
        scores(calls("waits", 0.05), "2")


def test_an_object_that_cannot_be_sent_is_a_failure_that_says_so(calls):
    async def run() -> Score:
        return await calls("main_thread").score("2", "2", {**ROW, "row": lambda: 1})

    failed = asyncio.run(run())
    assert isinstance(failed, Failed) and "cannot be sent to the process of the reward" in failed.reason


def test_an_error_of_making_it_is_told_as_it_is(calls):
    with pytest.raises(RewardError, match="has no `nowhere`"):
        calls("nowhere")


def test_the_process_ends_with_what_calls_it(calls):
    one = calls("where")
    [score] = scores(one, "a")
    assert isinstance(score, Scored)
    pid = int(score.metrics["pid"])
    os.kill(pid, 0)
    del one
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# ---------------------------------------------------------------- several calls together


def together(calls, *arguments: tuple[str, str, object]) -> list[object]:
    """The scores, and the error that ended them."""

    async def all_of_them() -> list[object]:
        scored = list[object]()
        async with aclosing(calls.scores(arguments)) as scores:
            try:
                while True:
                    scored.append(await anext(scores))
            except StopAsyncIteration:
                return scored
            except (DeadlineExceeded, OutOfMemory) as error:
                return [*scored, error]

    return asyncio.run(all_of_them())


def test_calls_that_are_sent_together_are_scored_one_after_the_other(calls):
    long = "x" * (TOGETHER_BYTES // 3)
    completions = ["2", long, "3", long, long, long + "2", "2"] * 3
    scored = together(calls("counts"), *((one, "2", ROW) for one in completions))
    assert scored == [
        Scored(float("2" in one), {"calls": float(number)}) for number, one in enumerate(completions, 1)
    ]
    assert together(calls("counts")) == []


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


@pytest.mark.parametrize(
    ("value", "said"), [(lambda: 1, "cannot be sent"), (Unreadable(), "cannot read the row")]
)
def test_of_calls_that_are_sent_together_one_with_a_row_that_cannot_cross_fails_alone(calls, value, said):
    rows = ROW, {**ROW, "row": value}, ROW
    first, failed, last = together(calls("counts"), *(("2", "2", row) for row in rows))
    assert (first, last) == (Scored(1.0, {"calls": 1.0}), Scored(1.0, {"calls": 2.0}))
    assert isinstance(failed, Failed) and said in failed.reason


@pytest.mark.parametrize(("last", "error"), [("hangs", DeadlineExceeded), ("no memory", OutOfMemory)])
def test_a_call_that_ends_its_process_takes_no_score_before_it(calls, last, error):
    one = calls("counts", 3.0 if last == "hangs" else 600.0)
    *scored, ended = together(one, *((text, "2", ROW) for text in ("2", "3", last, "2")))
    assert scored == [Scored(1.0, {"calls": 1.0}), Scored(0.0, {"calls": 2.0})]
    assert isinstance(ended, error)


def test_who_closes_leaves_out_the_calls_that_have_not_begun(calls, tmp_path):
    one, goes_on = calls("counts"), tmp_path / "goes on"

    async def run() -> Score:
        async with aclosing(
            one.scores([(text, "2", ROW) for text in ("2", str(goes_on), *"2222")])
        ) as scores:
            await anext(scores)
        goes_on.touch()
        return await one.score("2", "2", ROW)

    score = asyncio.run(run())
    assert isinstance(score, Scored) and score.metrics["calls"] in (2.0, 3.0)  # one may have begun


def test_calls_at_the_same_time_take_turns(calls):
    one = calls("counts")

    async def run() -> list[Score]:
        return await asyncio.gather(*(one.score("2", "2", ROW) for _ in range(4)))

    for begun in (0, 4):
        assert asyncio.run(run()) == [Scored(1.0, {"calls": begun + n}) for n in (1.0, 2.0, 3.0, 4.0)]


# ---------------------------------------------------------------- on the loop


class Reward:
    """Takes `takes_s` of the loop's clock, which it moves on itself."""

    name, file, is_async = "own", None, False

    def __init__(self, takes_s: float) -> None:
        self.takes_s, self.passed_s = takes_s, 0.0

    def __call__(self, *_: object) -> float:
        self.passed_s += self.takes_s
        return 1.0


def score(reward: Reward, timeout_s: float) -> object:
    async def run() -> object:
        loop = asyncio.get_running_loop()
        now = loop.time
        loop.time = lambda: now() + reward.passed_s  # type: ignore[method-assign]
        return await Calls(reward, timeout_s).score("", None, {})

    return asyncio.run(run())


def test_a_call_on_the_loop_that_takes_longer_than_its_deadline_fails() -> None:
    assert score(Reward(1990.0), 2000.0) == Scored(1.0)
    failed = score(Reward(2010.0), 2000.0)
    assert failed == Failed("own took longer than `reward.timeout_s` (2000 s)")


def test_only_what_is_short_and_what_waits_runs_on_the_loop() -> None:
    kinds = set(table.OneReward.__args__) - set(PLAIN)
    assert {kind.__name__ for kind in kinds} == {
        "ExactRewardSection",
        "PatternRewardSection",
        "JudgeRewardSection",
        "EnvironmentRewardSection",
    }
