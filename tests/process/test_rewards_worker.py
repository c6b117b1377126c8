"""Reward workers as processes: a hanging, a greedy and a dying reward."""

import asyncio
import json
import string
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from conformance import WAIT_S
from millrace.conversations.tokenizer import load_tokenizer, make_character_tokenizer
from millrace.core.errors import DeadlineExceeded, OutOfMemory, WorkerDied
from millrace.core.types import Finish, Prompt, Scored, ScoreRequest
from millrace.runtime.local.handle import LocalHandle
from millrace.runtime.local.local_runtime import LocalRuntime

pytestmark = pytest.mark.usefixtures("warm")
TARGET = "millrace.episodes.reward_worker:TaskRewardWorker"
CODE = """
import os, re, time

def reward(completion, answer):
    match completion:
        case "hang":
            time.sleep(600)
        case "bomb":
            return len(bytearray(1 << 34))
        case "leak":
            return len([bytearray(1 << 20) for _ in range(1 << 14)])
        case "die":
            os._exit(3)
        case "crash":
            os.kill(os.getpid(), 9)
        case "backtrack":
            re.match("(a+)+$", "a" * 60 + "b")
        case "import":
            import large_module  # 200 MB, under a limit of 64
            from large_module import VALUE
            return VALUE
        case "print":
            print("noise" * 100_000, flush=True)
    return completion == answer
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("rewards")
    make_character_tokenizer(directory / "model", string.ascii_lowercase + string.digits + " ")
    (directory / "rows.jsonl").write_text(json.dumps({"prompt": "2 2", "answer": "4"}) + "\n")
    (directory / "own.py").write_text(CODE)
    (directory / "large_module.py").write_text("KEPT = b'x' * 200_000_000\nVALUE = 0.5\n")
    return {
        "model": {"path": str(directory / "model")},
        "task": {"kind": "file", "path": str(directory / "rows.jsonl")},
        "reward": {
            "kind": "function",
            "path": f"{directory / 'own.py'}:reward",
            "memory_mb": 64,
            "timeout_s": 600.0,
        },
    }


def requests(config: dict[str, Any], *completions: str) -> list[ScoreRequest]:
    tokenizer = load_tokenizer(config["model"]["path"])
    return [ScoreRequest(i, i, tokenizer.encode(text), Finish.STOP) for i, text in enumerate(completions)]


@asynccontextmanager
async def environment(config: dict[str, Any], tmp_path: Any) -> AsyncIterator[LocalHandle]:
    runtime = LocalRuntime(log_dir=tmp_path)
    try:
        yield await runtime.spawn("reward worker", TARGET, {"config": config})
    finally:
        await runtime.close()


def test_a_worker_process_makes_prompts_and_scores_them(config, tmp_path):
    async def run():
        async with environment(config, tmp_path) as worker:
            prompts = await worker.call("prompts", [0, 1], timeout_s=WAIT_S)
            assert all(isinstance(prompt, Prompt) and prompt.text == "2 2" for prompt in prompts)
            scores = [pair async for pair in worker.stream("score", requests(config, "4", "5", "print"))]
            assert scores == [(0, Scored(1.0)), (1, Scored(0.0)), (2, Scored(0.0))]

    asyncio.run(run())


@pytest.mark.parametrize("greed", ["bomb", "leak"])
def test_a_reward_that_allocates_without_end_asks_for_another_worker(config, tmp_path, greed):
    async def run():
        async with environment(config, tmp_path) as worker:
            with pytest.raises(OutOfMemory, match="raised MemoryError"):
                async for _ in worker.stream("score", requests(config, greed, "4")):
                    pass

    asyncio.run(run())


def test_a_score_arrives_although_the_next_reward_holds_the_interpreter(config, tmp_path):
    reward = {"kind": "exact", "extract": "((?:a+)+|[45])$"}

    async def run():
        async with environment(config | {"reward": reward}, tmp_path) as worker:
            stream = worker.stream("score", requests(config, "4", "5", "a" * 60 + "b"))
            async with asyncio.timeout(WAIT_S):
                assert [await anext(stream), await anext(stream)] == [(0, Scored(1.0)), (1, Scored(0.0))]
            with pytest.raises(DeadlineExceeded):
                for _ in range(1000):
                    await worker.call("__ping__", timeout_s=0.5)
            worker.kill()
            with pytest.raises(WorkerDied):
                await anext(stream)

    asyncio.run(run())


@pytest.mark.parametrize("holding", ["hang", "backtrack"])
def test_a_worker_whose_reward_hangs_still_answers_and_can_be_killed(config, tmp_path, holding):
    async def run():
        async with environment(config, tmp_path) as worker:
            stream = worker.stream("score", requests(config, "4", holding))
            assert await anext(stream) == (0, Scored(1.0))
            assert len(await worker.call("prompts", [0], timeout_s=WAIT_S)) == 1
            worker.kill()
            with pytest.raises(WorkerDied):
                await anext(stream)

    asyncio.run(run())


def test_a_worker_ends_the_stream_at_the_deadline_of_its_reward(config, tmp_path):
    async def run():
        hasty = config | {"reward": config["reward"] | {"timeout_s": 8.0}}
        async with environment(hasty, tmp_path) as worker:
            stream = worker.stream("score", requests(config, "4", "hang", "4"))
            assert await anext(stream) == (0, Scored(1.0))
            with pytest.raises(DeadlineExceeded, match=r"longer than `reward.timeout_s` \(8 s\)"):
                await anext(stream)

    asyncio.run(run())


def test_closing_the_stream_leaves_the_worker_usable(config, tmp_path):
    async def run():
        async with environment(config, tmp_path) as worker:
            stream = worker.stream("score", requests(config, "4", "5", "4"))
            await anext(stream)
            await stream.aclose()
            again = [pair async for pair in worker.stream("score", requests(config, "4"))]
            assert again == [(0, Scored(1.0))]

    asyncio.run(run())


@pytest.mark.parametrize(("death", "says"), [("die", "code 3"), ("crash", "SIGKILL")])
def test_a_reward_that_ends_its_process_ends_the_stream(config, tmp_path, death, says):
    async def run():
        async with environment(config, tmp_path) as worker:
            with pytest.raises(WorkerDied, match=says):
                async for _ in worker.stream("score", requests(config, death)):
                    pass

    asyncio.run(run())


def test_what_a_reward_imports_does_not_count_and_its_limit_holds_on(config, tmp_path):
    async def run():
        async with environment(config, tmp_path) as worker:
            scores = [pair async for pair in worker.stream("score", requests(config, "import", "4"))]
            assert scores == [(0, Scored(0.5)), (1, Scored(1.0))]
            with pytest.raises(OutOfMemory):
                [pair async for pair in worker.stream("score", requests(config, "leak"))]

    asyncio.run(run())
