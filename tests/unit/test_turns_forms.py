"""Environments in each form act through a worker, and every bad one gives one failed trajectory."""

from __future__ import annotations

import asyncio
import json
import shutil
import string
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from millrace.conversations.tokenizer import END, load_tokenizer, make_character_tokenizer
from millrace.core.completion.columns import token_array
from millrace.core.errors import RewardError
from millrace.core.turns.packed import pack_request, unpack_answer
from millrace.core.types import BadPrompt, Failed, Finish, Observed, Prompt, Scored, ScoreRequest
from millrace.episodes.reward_worker import TaskRewardWorker

TOOL_TEMPLATE = (
    "{% if tools %}[{{ tools | map(attribute='function') | map(attribute='name') | join(',') }}]{% endif %}"
    "{% for m in messages %}{{ '<|assistant|>' if m.role == 'assistant' else m.role + ':' }}"
    "{{ m.content + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_character_tokenizer(directory, string.printable)
    return directory


class Play:
    """A worker with an environment, and one episode on it."""

    def __init__(
        self, model: Path, directory: Path, code: str, *, template: str = "", chat: Any = None, **more: Any
    ) -> None:
        """`chat`: messages as the prompt."""
        (directory / "own.py").write_text("from millrace import Done, Observation\n\n" + dedent(code))
        row = {"prompt": chat or "2*3=", "answer": "6"}
        (directory / "rows.jsonl").write_text(json.dumps(row))
        reward = {"kind": "environment", "path": f"{directory / 'own.py'}:Own", "timeout_s": 60}
        config = {
            "model": {"path": str(model)},
            "task": {
                "kind": "file",
                "path": str(directory / "rows.jsonl"),
                "chat": bool(template) and not chat,
            },
            "reward": reward | more,
            "rollout": {"max_sequence_tokens": 4096},
            "sampling": {"max_tokens": 1024},
        }
        tokenizer = load_tokenizer(model)
        if template:
            (directory / "model").mkdir()
            tokenizer.chat_template = template
            tokenizer.save_pretrained(directory / "model")
            config["model"] = {"path": str(directory / "model")}
        self.worker, self.tokenizer = TaskRewardWorker(config, limit_memory=False), tokenizer
        self.tokens: list[int] = []
        self.turns: list[tuple[int, int, bool]] = []

    def prompt(self) -> Prompt | BadPrompt:
        return asyncio.run(self.worker.prompts([0]))[0]

    def act(self, *texts: str) -> Any:
        """The answer to the last of the turns, and of an observation its text."""
        for text in texts:
            tokens = self.tokenizer.encode(text, add_special_tokens=False)
            answer = self._act([*tokens, self.tokenizer.eos_token_id])
            if isinstance(answer, Observed):
                self._add(list(answer.tokens), False)
        return answer

    def _act(self, tokens: list[int]) -> Any:
        self._add(tokens, True)
        room = 4096 - len(self.tokens)
        request = ScoreRequest(1, 0, token_array(self.tokens), Finish.TURN, [*self.turns], room)

        async def answered() -> Any:
            [answer] = [answer async for _, answer in self.worker.score([request])]
            return answer

        return asyncio.run(answered())

    def _add(self, tokens: list[int], sampled: bool) -> None:
        self.turns.append((len(self.tokens), len(self.tokens) + len(tokens), sampled))
        self.tokens += tokens

    def text(self, observed: Observed) -> str:
        return self.tokenizer.decode(list(observed.tokens))


# ---------------------------------------------------------------- forms

OWN_ASYNC = """
    import asyncio

    class Own:
        async def reset(self, row):
            self.lock, self.answer = asyncio.Lock(), row["answer"]
            return "?"

        async def step(self, action):
            async with self.lock:
                await asyncio.sleep(0)
            return Done(1.0) if action == self.answer else Observation(f"not {action}")
"""

TOOLS = '''
    import asyncio

    class Own:
        def reset(self, **row) -> str | None:
            self.row, self.reward = row, 0.0
            return " Use the tool."

        def multiply(self, a: int, b: float = 2.0) -> float:
            """Multiply two numbers.

            Args:
                a: The first number.
                b: The second number.
            """
            self.reward += 0.5
            return a * b

        async def look(self, what: list[str]) -> dict:
            """Look up.

            Args:
                what: What to look for.
            """
            await asyncio.sleep(0)
            if what == ["error"]:
                raise KeyError("nothing there")
            return {"a" * 40: b"x"} if what == ["bytes"] else {what[0]: True, "none": None}

        def load(self, size: int):
            """Load.

            Args:
                size: How much.
            """
            return b"x" * size if size % 2 else "x" * size

        def get_reward(self) -> float:
            return self.reward + 1.0
'''

SKYRL = """
    class Own:
        def __init__(self, env_config=None, extras={}):
            self.answer, self.turns_left = extras["answer"], extras["max_turns"]

        def init(self, prompt):
            prompt[-1]["content"] += " Guess."
            return prompt, {}

        def step(self, action):
            done = action == self.answer
            says = [] if done else [{"role": "user", "content": "no, " + str(self.turns_left)}]
            metadata = {"length": len(action)}
            return {"observations": says, "reward": float(done), "done": done, "metadata": metadata}

        def get_metrics(self):
            return {"right": 1.0, "note": "text"}
"""


def test_async_methods_share_one_loop_for_the_episode(model: Path, tmp_path: Path) -> None:
    play = Play(model, tmp_path, OWN_ASYNC)
    assert isinstance(prompt := play.prompt(), Prompt) and prompt.text == "2*3=?"
    assert play.text(play.act("5")) == "not 5"
    assert play.act("6").value == 1.0


def test_a_class_of_tools_is_shown_and_called_through_the_template(model: Path, tmp_path: Path) -> None:
    play = Play(model, tmp_path, TOOLS, template=TOOL_TEMPLATE)
    assert isinstance(prompt := play.prompt(), Prompt)
    assert prompt.text == "[load,look,multiply]user:2*3= Use the tool.<|end|><|assistant|>"
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 3}}</tool_call>'
    look = '<tool_call>\n{"name": "look", "arguments": "{\\"what\\": [\\"true\\"]}"}\n</tool_call>'
    observed = play.act(f"I think.{call}{look}")
    assert play.text(observed) == 'tool:6.0<|end|>tool:{"true": true, "none": null}<|end|><|assistant|>'
    end = play.act("The answer is 6")
    assert end.value == 1.5 and end.metrics["calls_multiply"] == end.metrics["calls_look"] == 1
    assert end.metrics["tool_errors"] == 0 and end.metrics["turns"] == 2


def test_a_row_of_messages_needs_no_key_to_be_a_chat(model: Path, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2*3="}]
    play = Play(model, tmp_path, SKYRL, template=TOOL_TEMPLATE, chat=messages)
    assert isinstance(prompt := play.prompt(), Prompt)
    assert prompt.text == "system:Be short.<|end|>user:2*3= Guess.<|end|><|assistant|>"
    assert play.text(play.act("5")) == "user:no, 8<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("multiply(2, b=4)", "8.0"),
        ("multiply(a=3)\nmultiply(4)", "6.0\n8.0\n"),
        ("multiply()", "Error: multiply: missing a required argument: 'a'"),
        ("multiply(1, 2, 3)", "Error: multiply: too many positional arguments"),
        ('multiply("2")', "Error: multiply: argument a: Expected `int`, got `str`"),
        ("multiply(True)", "Error: multiply: argument a: Expected `int`, got `bool`"),
        ("multiply(2", 'Error: a call is one line such as multiply(1, name="text")'),
        ("multiply(**{})", 'Error: a call is one line such as multiply(1, name="text")'),
        ("divide(2)", "Error: there is no tool divide: load, look, multiply"),
        ('look(["error"])', "Error: KeyError: 'nothing there'"),
        ('look(["bytes"])', "Error: the tool returned a dict: Object of type bytes is not JSON serializable"),
        ("<tool_call>{</tool_call>", "Error: the call is no JSON: Expecting property name"),
        ("<tool_call>[1]</tool_call>", 'Error: a call is {"name": ..., "arguments": {...}}'),
        ('<tool_call>{"name": "look", "arguments": 1}', "Error: the arguments of look are no object"),
        ('{"name": "multiply", "parameters": {"a": 2}}', "4.0"),
        ('[{"name": "multiply", "arguments": {"a": 2}}, {"name": "load"}]', "4.0\nError: load: missing"),
        ("load(200)", "x" * 32 + "\n[200 characters; the first 32 are above]"),
        ("load(33)", "x" * 32 + "\n[33 bytes; the first 32 characters are above]"),
        ("load(100000000)", "x" * 32 + "\n[100,000,000 characters; the first 32 are above]"),
    ],
)  # fmt: skip
def test_a_call_without_a_template_is_a_line_and_a_wrong_one_is_told(
    model: Path, tmp_path: Path, call: str, says: str
) -> None:
    play = Play(model, tmp_path, TOOLS, result_characters=32)
    observed = play.act(call)
    assert play.text(observed).startswith(says)
    assert observed.metrics["tool_errors"] == says.count("Error: ") - says.count("KeyError")
    assert observed.metrics.get("tool_results_cut", 0) == float("above]" in says)
    of_the_tool = call in ('look(["error"])', 'look(["bytes"])')
    assert observed.metrics["malformed"] == (0 if of_the_tool else observed.metrics["tool_errors"])


def test_thinking_about_a_call_is_no_call_and_other_text_ends_the_episode(
    model: Path, tmp_path: Path
) -> None:
    for text in ("<think>multiply(2)</think>6", "f(x) = 2", "I would multiply(2).", "[6]", ""):
        assert isinstance(Play(model, tmp_path, TOOLS).act(text), Scored)


def test_the_reward_of_tools_counts_when_a_budget_ends_the_episode(model: Path, tmp_path: Path) -> None:
    score = Play(model, tmp_path, TOOLS, turns=1).act("multiply(2)")
    assert score.truncated and score.value == 1.5 and score.metrics["ended_by_turns"] == 1


def test_the_call_after_the_last_of_a_budget_ends_the_episode(model: Path, tmp_path: Path) -> None:
    play = Play(model, tmp_path, TOOLS, tool_calls=3)
    assert isinstance(play.act("multiply(2)"), Observed)
    assert isinstance(play.act("multiply()"), Observed)  # a wrong one counts
    score = play.act("multiply(4)\nmultiply(5)")
    assert score.truncated and score.metrics["ended_by_tool_calls"] == 1
    assert score.metrics["calls_multiply"] == 3 and score.value == 2.0  # without the last call
    assert play.tokens and Play(model, tmp_path, TOOLS, tool_calls=1).act("6").value == 1.0


def test_tools_are_restored_with_their_counts(model: Path, tmp_path: Path) -> None:
    restoring = """
        recovery = "restored"

        def snapshot(self):
            return str(self.reward).encode()

        def restore(self, row, snapshot):
            self.row, self.reward = row, float(snapshot)
    """
    play = Play(model, tmp_path, dedent(TOOLS) + dedent(restoring).replace("\n", "\n    "), tool_calls=3)
    observed = play.act("multiply(2)", "multiply()", "snapshot()")
    assert play.text(observed) == "Error: there is no tool snapshot: load, look, multiply\n"
    score = play.act("multiply(4)")
    assert score.metrics["ended_by_tool_calls"] == 1 and score.metrics["calls_multiply"] == 2
    assert score.value == 1.5 and score.metrics["malformed"] == score.metrics["tool_errors"] == 2


def test_a_budget_of_calls_needs_tools(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="is no class of tools, so nothing counts calls"):
        Play(model, tmp_path, SKYRL, tool_calls=3)


def test_the_reward_of_tools_may_be_an_attribute(model: Path, tmp_path: Path) -> None:
    code = TOOLS.replace("def get_reward", "def _get_reward")
    assert Play(model, tmp_path, code).act("multiply(2)", "4").value == 0.5
    failed = Play(model, tmp_path, code.replace("self.reward", "self._reward")).act("4")
    assert isinstance(failed, Failed) and "neither a method `get_reward` nor an attribute" in failed.reason


@pytest.mark.parametrize("reset", ["self", "self, **kwargs"])
def test_a_tool_may_be_called_step(model: Path, tmp_path: Path, reset: str) -> None:
    code = TOOLS.replace("self, **row", reset).replace("self.row", "_").replace("multiply", "step")
    assert (
        Play(model, tmp_path, code.replace("_, self.reward = row, 0.0", "self.reward = 0.0"))
        .act("step(2)", "4")
        .value
        == 1.5
    )


def test_a_reward_with_a_parameter_gets_the_last_text(model: Path, tmp_path: Path) -> None:
    code = TOOLS.replace("def get_reward(self)", "def get_reward(self, text)")
    play = Play(model, tmp_path, code.replace("self.reward + 1.0", "float(text == self.row['answer'])"))
    assert play.act("multiply(2, 3.0)", "6").value == 1.0


def test_an_environment_of_skyrl_gym(model: Path, tmp_path: Path) -> None:
    play = Play(model, tmp_path, SKYRL, turns=5)
    assert isinstance(prompt := play.prompt(), Prompt) and prompt.text == "2*3= Guess."
    observed = play.act("5")
    assert play.text(observed) == "no, 5" and observed.metrics == {"length": 1.0, "turn_1": 0.0}
    end = play.act("6")
    assert end.value == 1.0 and end.metrics["right"] == 1.0 and "note" not in end.metrics


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("Own = 5", "of type int, not a function"),
        ("def Own(): ...", "is a function: an environment is a class"),
        ("class Own:\n    def run(self): ...", r"the public methods run: an environment is a class with"),
        ("class Own:\n    def reset(self, row): ...", "the public methods reset: an environment is a class"),
        ("class Own:\n def reset(self): ...\n def act(self, a): 'Act.'", "act cannot be a tool: Argument a"),
        ("class Own:\n def reset(self): ...\n def act(self): ...", "act cannot be a tool: .* docstring"),
        ("class Own:\n def reset(self): ...\n def act(self, *a): 'Act.'", "any number of arguments"),
        ("class Own:\n recovery = 1\n def reset(self, row): ...\n def step(self, a): ...", "is 1: use"),
    ],
)  # fmt: skip
def test_what_has_no_form_is_refused_by_name(model: Path, tmp_path: Path, code: str, says: str) -> None:
    with pytest.raises(RewardError, match=says):
        Play(model, tmp_path, code)


# ---------------------------------------------------------------- bad environments


def own(step: str = "return 'more'", reset: str = "pass") -> str:
    return f"""
    import os, sys, time

    class Own:
        def reset(self, row):
            {reset}

        def step(self, action):
            {step}
    """


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ("time.sleep(1.2)", "took longer than `reward.timeout_s`"),
        ("sys.exit(3)", "raised SystemExit: 3"),
        ("return 7", "returned a int: `step` returns a text"),
        ("return ('a', 1.0, True, False, {})", "returned a tuple: `step` returns a text"),
        ("return None", "returned a NoneType"),
        ("return iter(int, 1)", "returned a callable_iterator"),
        ("return Observation(b'text')", "an observation of type bytes"),
        ("return Observation([{'role': 'user'}])", "an observation of type list"),
        ("return Observation([{'role': '<|end|>', 'content': ''}])", "an observation of type list"),
        ("return Done('1')", "a reward of type str"),
        ("return Done(float('nan'))", "a reward of type float"),
        ("return Done({'right': '1'})", "a reward right of type str"),
        ("return Done({})", "a dict of rewards with the names []"),
        ("return Done({'turn_1': 1.0})", "a dict of rewards with the names ['turn_1']"),
        (
            "import collections; return collections.namedtuple('Observation', 'text')('a')",
            "a Observation: `step`",
        ),
        ("return Done(1.0, metrics=[1])", "metrics of type list"),
        ("raise RuntimeError(action)", "raised RuntimeError: go"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
        ("return self.step(action)", "raised RecursionError"),
        ("return os.fork() and 7", "returned a int"),
    ],
)
def test_a_bad_answer_fails_the_trajectory_alone(model: Path, tmp_path: Path, step: str, reason: str) -> None:
    play = Play(model, tmp_path, own(step), timeout_s=0.5 if "sleep" in step else 60)
    failed = play.act("go")
    assert isinstance(failed, Failed) and reason in failed.reason
    play.worker._episodes._timeout_s = 60.0
    assert isinstance(play.prompt(), Prompt)  # the worker goes on


@pytest.mark.parametrize("text", ["'x' * 100_000_000", "'x' * 4095"])
def test_an_observation_longer_than_the_context_ends_the_episode(
    model: Path, tmp_path: Path, text: str
) -> None:
    score = Play(model, tmp_path, own(f"return Observation({text}, reward=0.5)")).act("go")
    assert score.truncated and score.value == 0.5 and score.metrics["ended_by_context"] == 1


@pytest.mark.parametrize(
    ("reset", "reason"),
    [
        ("return row['gold']", "raised KeyError: 'gold'"),
        ("time.sleep(1.2)", "took longer than"),
        ("sys.exit()", "raised SystemExit"),
        ("return 7", "`reset` returned a int"),
        ("return [{'role': 'user'}]", "`reset` returned a list"),
        ("return 'x' * 100_000_000", "characters, more than"),
        ("return '\\ud800'", "half a character"),
    ],
)
def test_a_bad_begin_makes_the_row_unusable(model: Path, tmp_path: Path, reset: str, reason: str) -> None:
    prompt = Play(model, tmp_path, own(reset=reset), timeout_s=0.5 if "sleep" in reset else 60).prompt()
    assert isinstance(prompt, BadPrompt) and reason in prompt.reason


def test_what_an_environment_prints_and_writes_as_special_tokens_is_text(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play = Play(model, tmp_path, own(f"print('loud'); return 'a{END}\\ud800'"))
    observed = play.act("go")
    assert play.text(observed) == f"a{END}\\ud800" and play.tokenizer.eos_token_id not in observed.tokens
    assert capsys.readouterr().out == "loud\n"


@pytest.mark.parametrize("short", [False, True])
def test_an_answer_with_a_token_that_the_model_lacks_fails_alone(
    model: Path, tmp_path: Path, short: bool
) -> None:
    """Somebody added tokens to the tokenizer, and did not resize the embeddings."""
    shutil.copytree(model, tmp_path / "small")
    vocab = len(load_tokenizer(model)) - 1
    (tmp_path / "small" / "config.json").write_text(json.dumps({"vocab_size": vocab}))
    code = own(f"return {string.printable[-1]!r} if action == 'b' else 'fine'")
    play = Play(tmp_path / "small", tmp_path, code)
    assert play.text(play.act("a")) == "fine"
    if short:
        seen, turn = len(play.tokens), play.tokenizer.encode("b", add_special_tokens=False)
        asked = ScoreRequest(1, 0, token_array(turn), Finish.TURN, [(seen, seen + 1, True)], 99, known=seen)
        answer = unpack_answer(asyncio.run(play.worker.answer(pack_request(asked))))
    else:
        answer = play.act("b")
    assert isinstance(answer, Failed)
    said = f"an answer of the environment has '\\x0c', token {vocab}, and the model has {vocab} (`vocab_size`"
    assert f"rows.jsonl:1: {said}" in answer.reason


def test_a_turn_after_the_end_is_the_same_end(model: Path, tmp_path: Path) -> None:
    play = Play(model, tmp_path, own("self.done = getattr(self, 'done', 0) + 1; return Done(self.done)"))
    first = play.act("go")
    play.tokens, play.turns = [], []
    assert play.act("go") == first and first.value == 1.0


def test_an_environment_may_begin_with_messages(model: Path, tmp_path: Path) -> None:
    reset = "return [{'role': 'assistant', 'content': 'Ready.'}, {'role': 'user', 'content': row['answer']}]"
    prompt = Play(model, tmp_path, own(reset=reset)).prompt()
    assert isinstance(prompt, Prompt) and prompt.text == "2*3=Ready.\n6"
    prompt = Play(model, tmp_path, own(reset=reset), template=TOOL_TEMPLATE).prompt()
    assert isinstance(prompt, Prompt)
    assert prompt.text == "user:2*3=<|end|><|assistant|>Ready.<|end|>user:6<|end|><|assistant|>"


def test_rewards_by_name_add_up_over_the_turns(model: Path, tmp_path: Path) -> None:
    step = (
        "return Done({'right': 1, 'short': 0.5}) if action == 'end' else Observation('a', {'short': -0.25})"
    )
    play = Play(model, tmp_path, own(step))
    assert play.act("go").metrics == {"turn_1": -0.25, "short": -0.25}
    end = play.act("end")
    assert end.value == 1.25 and end.metrics["turn_2"] == 1.5
    assert (end.metrics["right"], end.metrics["short"]) == (1.0, 0.25)


def test_an_observation_that_episodes_share_is_not_changed(model: Path, tmp_path: Path) -> None:
    step = "return shared"
    code = own(step) + "\n    shared = Observation([{'role': 'user', 'content': 'a <|end|>'}], 0.5)\n"
    play, other = (Play(model, tmp_path, code) for _ in range(2))
    first = play.act("go")
    assert play.act("go").tokens == first.tokens == other.act("go").tokens


def test_a_forked_process_answers_nothing(model: Path, tmp_path: Path) -> None:
    step = "child = os.fork(); return 'forked ' + str(os.waitpid(child, 0)[1] if child else 0)"
    play = Play(model, tmp_path, own(step))
    assert play.text(play.act("go")) == "forked 256"  # its exit code is 1


def test_a_missing_column_of_tools_is_named(model: Path, tmp_path: Path) -> None:
    code = TOOLS.replace("reset(self, **row)", "reset(self, gold)")
    prompt = Play(model, tmp_path, code).prompt()
    assert isinstance(prompt, BadPrompt) and "missing 1 required positional argument: 'gold'" in prompt.reason
