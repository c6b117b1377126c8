"""The reward of programs in a reward worker: a process with a memory limit, which may be killed."""

import asyncio
import json
import os
import signal
import string
import time
from pathlib import Path
from typing import Any

import pytest

from conformance import WAIT_S
from millrace.conversations.tokenizer import load_tokenizer, make_character_tokenizer
from millrace.core.errors import SandboxError
from millrace.core.types import Failed, Finish, Scored, ScoreRequest
from millrace.runtime.local.handle import LocalHandle
from millrace.runtime.local.local_runtime import LocalRuntime
from millrace_sandbox.sandbox import Sandbox

pytestmark = pytest.mark.usefixtures("warm")
TARGET = "millrace.episodes.reward_worker:TaskRewardWorker"
TESTS = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [2, 3]}
RIGHT, WRONG, HANGING = "def f(x): return x + 1", "def f(x): return x", "def f(x):\n while 1: pass"


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict[str, Any]:
    try:
        Sandbox().close()
    except SandboxError as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp("code")
    make_character_tokenizer(directory / "model", string.printable)
    rows = [{"prompt": "add one", "tests": TESTS}, {"prompt": "nothing", "tests": {}}]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": {"path": str(directory / "model")},
        "task": {"kind": "file", "path": str(directory / "rows.jsonl"), "answer": None},
        "reward": {"kind": "code", "memory_mb": 64, "program_cpu_s": 1, "timeout_s": 60},
    }


def with_worker(config: dict[str, Any], tmp_path: Path, work: Any) -> Any:
    async def run() -> Any:
        runtime = LocalRuntime(log_dir=tmp_path)
        try:
            return await work(await runtime.spawn("reward worker", TARGET, {"config": config}))
        finally:
            await runtime.close()

    return asyncio.run(run())


def requests(config: dict[str, Any], *completions: str, group: int) -> list[ScoreRequest]:
    tokenizer = load_tokenizer(config["model"]["path"])
    return [ScoreRequest(i, group, tokenizer.encode(text), Finish.STOP) for i, text in enumerate(completions)]


async def groups_of(worker: LocalHandle) -> tuple[int, int]:
    """Groups with the row that has tests, and with the row that has none."""
    prompts = await worker.call("prompts", [0, 1], timeout_s=WAIT_S)
    rows = {prompt.text: prompt.group_id for prompt in prompts}
    return rows["add one"], rows["nothing"]


def test_programs_are_scored_in_a_worker_and_a_row_without_tests_fails(config, tmp_path):
    async def work(worker: LocalHandle) -> None:
        good, bad = await groups_of(worker)
        programs = requests(config, RIGHT, WRONG, HANGING, group=good)
        scores = [score async for _, score in worker.stream("score", programs)]
        assert [score.value for score in scores if isinstance(score, Scored)] == [1.0, 0.0, 0.0]
        assert scores[2].metrics["timed_out"] == 1.0
        [(_, failed)] = [one async for one in worker.stream("score", requests(config, RIGHT, group=bad))]
        assert isinstance(failed, Failed)
        assert '"inputs" and "outputs"' in failed.reason

    with_worker(config, tmp_path, work)


def test_nothing_of_a_sandbox_outlives_a_worker_that_is_killed(config, tmp_path):
    async def work(worker: LocalHandle) -> set[int]:
        good, _ = await groups_of(worker)
        stream = worker.stream("score", requests(config, RIGHT, HANGING, group=good))
        await anext(stream)
        await asyncio.sleep(0.2)  # the second program computes, or is about to
        found = descendants(worker.pid)
        assert found
        os.kill(worker.pid, signal.SIGKILL)
        return found

    found = with_worker(config, tmp_path, work)
    deadline_s = time.monotonic() + WAIT_S
    while any(map(is_running, found)):
        assert time.monotonic() < deadline_s, "a process of the sandbox goes on"
        time.sleep(0.05)


def descendants(pid: int) -> set[int]:
    children = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        children |= set(map(int, path.read_text().split()))
    return children.union(*map(descendants, children)) if children else children


def is_running(pid: int) -> bool:
    """Whether the process is there, and no zombie that waits for somebody else."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
