"""The environment worker within this process: prompts, and scores that never raise."""

import asyncio
import json
import shutil
import string

import pytest

from millrace.conversations.tokenizer import load_tokenizer, make_character_tokenizer
from millrace.core.errors import ConfigError, DataError, OutOfMemory, RewardError
from millrace.core.types import Abstain, BadPrompt, Failed, Finish, Prompt, Scored, ScoreRequest
from millrace.episodes import reward_worker
from millrace.episodes.reward_worker import TaskRewardWorker


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_character_tokenizer(path, string.digits + string.ascii_letters + string.punctuation + " \n")
    return path


class Setup:
    """A worker over lines of a file with a reward function, and the tokenizer to talk to it."""

    def __init__(self, model, directory, /, *, code=None, lines=None, timeout_s=60.0, **sections):
        self.tokenizer = load_tokenizer(model)
        rows = directory / "rows.jsonl"
        rows.write_text("\n".join(lines or [json.dumps({"prompt": "2 + 2 =", "answer": "4"})]) + "\n")
        reward = {"kind": "exact"}
        if code is not None:
            (directory / "own.py").write_text(code)
            path = f"{directory / 'own.py'}:reward"
            reward = {"kind": "function", "path": path, "timeout_s": timeout_s}
        config = {
            "model": {"path": str(model)},
            "task": {"kind": "file", "path": str(rows)},
            "reward": reward,
        }
        self.worker = TaskRewardWorker(config | sections, limit_memory=False)

    def prompts(self, *group_ids):
        return asyncio.run(self.worker.prompts(list(group_ids)))

    def requests(self, *completions):
        return [
            ScoreRequest(100 + i, i, [*self.tokenizer.encode(text), 1], Finish.STOP)
            for i, text in enumerate(completions)
        ]

    def scores(self, *completions):
        async def collect():
            return [pair async for pair in self.worker.score(self.requests(*completions))]

        return asyncio.run(collect())


# ---------------------------------------------------------------- prompts


def test_prompts_come_in_the_order_asked_for_and_are_the_same_in_every_worker(model, tmp_path):
    lines = [json.dumps({"prompt": f"{i} =", "answer": str(i)}) for i in range(20)]
    first, second = (Setup(model, tmp_path, lines=lines) for _ in range(2))
    prompts = first.prompts(3, 1, 23)
    assert [prompt.group_id for prompt in prompts] == [3, 1, 23]
    assert prompts == second.prompts(3, 1, 23)
    assert all(first.tokenizer.decode(prompt.tokens) == prompt.text for prompt in prompts)
    assert {prompt.text for prompt in first.prompts(*range(20))} == {f"{i} =" for i in range(20)}


def test_the_special_tokens_of_chat_messages_are_the_templates_alone(model, tmp_path, monkeypatch):
    row = json.dumps({"prompt": [{"role": "user", "content": "2"}], "answer": "4"})
    setup = Setup(model, tmp_path, lines=[row])
    monkeypatch.setattr(reward_worker, "encode_prompt", lambda *_: pytest.fail("special tokens were added"))
    [prompt] = setup.prompts(0)
    assert setup.tokenizer.decode(prompt.tokens) == prompt.text == "<|user|>2<|end|><|assistant|>"


def test_rows_that_cannot_be_prompts_come_back_with_the_reason(model, tmp_path):
    lines = ["{", *(json.dumps({"prompt": text, "answer": ""}) for text in ("fine", "  \n", "x" * 25))]
    rollout, sampling = {"max_sequence_tokens": 32}, {"max_tokens": 8}
    setup = Setup(model, tmp_path, lines=lines, rollout=rollout, sampling=sampling)
    prompts = {prompt.row_id.rsplit(":", 1)[1]: prompt for prompt in setup.prompts(*range(4))}
    assert isinstance(prompts["2"], Prompt)
    for line, message in (
        ("1", "rows.jsonl:1 is not JSON"),
        ("3", "empty"),
        ("4", "has 25 tokens, there is room for 24"),
    ):
        assert isinstance(prompts[line], BadPrompt) and message in prompts[line].reason


def test_a_prompt_with_a_token_that_the_model_lacks_is_skipped_and_ends_no_run(model, tmp_path):
    """Somebody added tokens to the tokenizer, and did not resize the embeddings."""
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    tokenizer = load_tokenizer(directory)
    vocab = len(tokenizer)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"vocab_size": vocab}))
    lines = [json.dumps({"prompt": text, "answer": ""}) for text in ("fine", "<think>2")]
    kinds = {type(prompt): prompt for prompt in Setup(directory, tmp_path, lines=lines).prompts(0, 1)}
    assert kinds.keys() == {Prompt, BadPrompt}
    assert f"has '<think>', token {vocab}, and the model has {vocab}" in kinds[BadPrompt].reason


def test_a_prompt_may_use_all_of_its_room(model, tmp_path):
    lines = [json.dumps({"prompt": "x" * 24, "answer": ""})]
    setup = Setup(
        model, tmp_path, lines=lines, rollout={"max_sequence_tokens": 32}, sampling={"max_tokens": 8}
    )
    assert isinstance(setup.prompts(0)[0], Prompt)


def test_a_prompt_of_megabytes_is_skipped_before_it_is_tokenized(model, tmp_path, monkeypatch):
    lines = [json.dumps({"prompt": text, "answer": ""}) for text in ("fine", "x" * 2**22)]
    setup = Setup(model, tmp_path, lines=lines)
    tokenizer = setup.worker._tokenizer
    monkeypatch.setattr(type(tokenizer), "encode", lambda self, text, **_: [1] if len(text) < 99 else 1 / 0)
    kinds = {type(prompt): prompt for prompt in setup.prompts(0, 1)}
    assert kinds.keys() == {Prompt, BadPrompt} and "4,194,304 characters" in kinds[BadPrompt].reason


def test_a_prompt_with_half_a_character_is_skipped_in_words(model, tmp_path):
    lines = [json.dumps({"prompt": text, "answer": ""}) for text in ("fine", "ab\ud800c")]
    kinds = {type(prompt): prompt for prompt in Setup(model, tmp_path, lines=lines).prompts(0, 1)}
    assert kinds.keys() == {Prompt, BadPrompt}
    assert "the prompt: character 2 is half a character ('\\ud800')" in kinds[BadPrompt].reason


def test_whatever_goes_wrong_with_one_row_is_that_row_s(model, tmp_path):
    lines = [json.dumps({"prompt": "fine", "answer": ""}), '{"prompt": ' + "[" * 99_999]
    setup = Setup(model, tmp_path, lines=lines)
    assert sorted(type(prompt).__name__ for prompt in setup.prompts(0, 1)) == ["BadPrompt", "Prompt"]
    setup.worker._tokenizer.encode = lambda *args, **kwargs: 1 / 0
    assert "ZeroDivisionError" in setup.prompts(0)[0].reason + setup.prompts(1)[0].reason


# ---------------------------------------------------------------- scores


def test_scores_come_in_order_with_their_trajectory(model, tmp_path):
    scores = Setup(model, tmp_path).scores("4", "5", " 4 ")
    assert scores == [(100, Scored(1.0)), (101, Scored(0.0)), (102, Scored(1.0))]


def test_a_function_sees_the_text_without_special_tokens(model, tmp_path):
    code = "def reward(completion, answer, prompt):\n"
    code += "    return [completion, answer, prompt] == ['4 , x', '4', '2 + 2 =']\n"
    assert Setup(model, tmp_path, code=code).scores("4 , x") == [(100, Scored(1.0))]


def test_an_exception_fails_only_its_own_trajectory_and_names_the_line(model, tmp_path):
    code = "def reward(completion):\n    return helper(int(completion))\ndef helper(n):\n    return 1 / n\n"
    (_, good), (_, bad), (_, worse), (_, last) = Setup(model, tmp_path, code=code).scores("1", "0", "x", "2")
    assert (good, last) == (Scored(1.0), Scored(0.5))
    assert "ZeroDivisionError: division by zero at" in bad.reason and "own.py:4 `return 1 / n`" in bad.reason
    assert (
        "ValueError: invalid literal" in worse.reason
        and "own.py:2 `return helper(int(completion))`" in worse.reason
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return 'yes'", "returned 'yes' (str)"),
        ("return float('nan')", "returned nan (float)"),
        ("raise SystemExit(3)", "raised SystemExit: 3"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
        ("raise StopIteration", "raised StopIteration"),
        ("return reward(completion)", "raised RecursionError"),
        ("import asyncio; raise asyncio.CancelledError", "raised CancelledError"),
    ],
)
def test_whatever_a_plain_function_does_is_a_failure_and_the_worker_goes_on(model, tmp_path, body, reason):
    setup = Setup(
        model, tmp_path, code=f"def reward(completion):\n    if completion == 'ok': return 1\n    {body}\n"
    )
    (_, failed), (_, scored) = setup.scores("bad", "ok")
    assert isinstance(failed, Failed) and reason in failed.reason
    assert scored == Scored(1.0)


def test_none_abstains_and_a_dict_carries_metrics(model, tmp_path):
    code = (
        "def reward(completion):\n    return {'reward': 1, 'length': len(completion)} if completion else None"
    )
    (_, scored), (_, abstained) = Setup(model, tmp_path, code=code).scores("four", "")
    assert scored == Scored(1.0, {"length": 4.0}) and isinstance(abstained, Abstain)


def test_printing_breaks_nothing(model, tmp_path, capfd):
    code = "def reward(completion):\n    print('noise' * 10_000)\n    return 1\n"
    assert Setup(model, tmp_path, code=code).scores("x") == [(100, Scored(1.0))]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_worker_without_memory_says_so_and_scores_no_more(model, tmp_path, kind):
    code = f"{kind} reward(completion):\n    if completion == 'ok': return 1\n    raise MemoryError\n"
    setup = Setup(model, tmp_path, code=code)

    async def collect():
        found = []
        with pytest.raises(OutOfMemory, match=r"raised MemoryError.*own.py:3.*reward\.memory_mb"):
            async for trajectory_id, _ in setup.worker.score(setup.requests("ok", "greedy", "ok")):
                found.append(trajectory_id)
        return found

    assert asyncio.run(collect()) == [100]


def test_the_loop_turns_between_rewards_on_it_that_take_long(model, tmp_path):
    setup = Setup(model, tmp_path, reward={"kind": "exact", "extract": "((?:a+)+)$"})
    turns = []

    async def turn():
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    async def collect():
        turning = asyncio.create_task(turn())
        scores = setup.worker.score(setup.requests(*["a" * 18 + "b"] * 3))
        seen = [len(turns) async for _ in scores]
        turning.cancel()
        return seen

    first, second, third = asyncio.run(collect())
    assert first < second < third


# ---------------------------------------------------------------- async functions


def test_async_functions_run_together(model, tmp_path):
    code = (
        "import asyncio\ntogether = asyncio.Barrier(3)\n"
        "async def reward(completion):\n    await together.wait()\n    return float(completion)\n"
    )
    scores = Setup(model, tmp_path, code=code).scores("3", "2", "1")
    assert [score.value for _, score in scores] == [3.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("await asyncio.sleep(60)", "took longer than `reward.timeout_s` (1 s)"),
        ("raise TimeoutError('the judge')", "raised TimeoutError: the judge"),
        ("raise SystemExit(3)", "raised SystemExit: 3"),
        ("return [1]", "returned [1] (list)"),
        ("return 1 / 0", "own.py:4 `return 1 / 0`"),
    ],
)
def test_whatever_an_async_function_does_is_a_failure_and_the_others_go_on(model, tmp_path, body, reason):
    code = f"import asyncio\nasync def reward(completion):\n    if completion == 'ok': return 1\n    {body}\n"
    setup = Setup(model, tmp_path, code=code, timeout_s=1.0 if "sleep" in body else 60.0)
    (_, failed), (_, scored) = setup.scores("bad", "ok")
    assert isinstance(failed, Failed) and reason in failed.reason
    assert scored == Scored(1.0)


def test_a_plain_function_may_return_a_coroutine(model, tmp_path):
    code = "async def judge(text): return float(text)\nreward = lambda completion: judge(completion)\n"
    assert Setup(model, tmp_path, code=code).scores("3") == [(100, Scored(3.0))]


def test_closing_the_stream_early_ends_quietly(model, tmp_path):
    code = "import asyncio\nasync def reward(completion):\n"
    code += "    await asyncio.sleep(0 if completion == 'ok' else 60)\n    return 1\n"
    setup = Setup(model, tmp_path, code=code)

    async def first_only():
        stream = setup.worker.score(setup.requests("ok", "slow", "slow"))
        first = await anext(stream)
        await stream.aclose()
        return first, len(asyncio.all_tasks())

    assert asyncio.run(first_only()) == ((100, Scored(1.0)), 1)


# ---------------------------------------------------------------- construction


def test_a_wrong_configuration_is_refused_when_the_worker_starts(model, tmp_path):
    with pytest.raises(RewardError, match="needs `solution`"):
        Setup(model, tmp_path, code="def reward(completion, solution): pass\n")
    with pytest.raises(DataError, match="none of the first 1 rows"):
        Setup(model, tmp_path, lines=["{"])
    with pytest.raises(ConfigError, match=r"reward\.extract"):
        Setup(model, tmp_path, reward={"kind": "exact", "extract": "("})
    with pytest.raises(DataError, match="no model directory"):
        Setup(model, tmp_path, model={"path": "nowhere"})
