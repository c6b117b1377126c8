"""Programs that a prompt begins, and functions that have the names of others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from millrace.config.tables.task import CodeRewardSection
from millrace.core.errors import DataError, SandboxError
from millrace_sandbox.code_asserts import continued
from millrace_sandbox.code_reward import CodeReward

PROMPT = '''import math
from typing import List

LIMIT = 10

def poly(xs: List[float], x: float) -> float:
    """Evaluate."""
    return sum(each * math.pow(x, power) for power, each in enumerate(xs))


def find_zero(xs: List[float]) -> float:
    """Find a zero of the polynomial."""
'''
ZERO = (
    "def check(candidate):\n"
    "    for xs in ([-1, 1], [-4, 2]):\n"
    "        assert abs(poly(xs, candidate(xs))) < 1e-4\n"
)
FINDS = (
    "def find_zero(xs: List[float]) -> float:\n"
    "    assert abs(poly(xs, 0)) < LIMIT\n"
    "    return -xs[0] / xs[1]\n"
)


@pytest.fixture(scope="module")
def reward(sandboxes: dict[str, Any]) -> Iterator[CodeReward]:
    try:
        made = CodeReward(CodeRewardSection(timeout_s=30))
    except SandboxError as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        (f"```python\n{FINDS}```", 1.0),
        (f"```python\n{PROMPT}    return -xs[0] / xs[1]\n```", 1.0),
        ("    return -xs[0] / xs[1]\n", 1.0),
        (f"from __future__ import annotations\n{FINDS}", 1.0),
        (f"```python\n{FINDS.replace('-xs', 'xs')}```", 0.0),
        ("def poly(*_): return 0\ndef find_zero(xs): return 1", 0.0),
        ("def zero(xs): return 1", 0.0),
        ("", 0.0),
    ],
)
@pytest.mark.parametrize(
    "prompt",
    [
        PROMPT,
        f"Complete the function.\n```python\n{PROMPT}```\n",
        [{"role": "system", "content": "x"}, {"role": "user", "content": f"Complete:\n```\n{PROMPT}```"}],
    ],
    ids=["code", "block", "messages"],
)
def test_program_and_tests_have_the_code_of_the_prompt(
    reward: CodeReward, prompt: Any, completion: str, value: float
) -> None:
    if prompt is not PROMPT and completion.startswith("    "):
        value = 0.0  # only a prompt that is code can be continued
    row = {"prompt": prompt, "tests": ZERO, "entry_point": "find_zero"}
    assert reward(completion, None, row)["reward"] == value


BODY = "    y = -xs[0]\n    return y / xs[1]\n"


@pytest.mark.parametrize(
    ("prompt", "completion", "value"),
    [
        (PROMPT, BODY, 1.0),
        (PROMPT, BODY[1:], 1.0),  # a tokenizer of SentencePiece leaves out the first space
        (PROMPT, f"\n{BODY[1:]}\n\ndef other(): pass\n", 1.0),
        (PROMPT, BODY[1:].replace("-xs", "xs"), 0.0),
        (PROMPT, f"{BODY}\n\ndef find_zero_2(xs):\n    return 1\n", 1.0),
        (PROMPT, f"{BODY}\n\n{FINDS}", 1.0),  # the model begins anew
        (PROMPT, f"{BODY}\n\ndef find_zero(xs):\n    return 1\n", 0.0),
        (PROMPT, f"    {FINDS}".replace("\n", "\n    "), 1.0),
        (PROMPT, BODY[4:], 0.0),
        (f"{PROMPT}    ", BODY[4:], 1.0),
        (f"{PROMPT}    ", BODY, 1.0),
        (f"{PROMPT}    ", FINDS, 1.0),
        (f"{PROMPT}    ", f"{BODY[4:]}\n\ndef find_zero_2(xs):\n    return 1\n", 1.0),
        (f"{PROMPT}    if not xs:\n        xs = [0, 1]\n", BODY[1:], 1.0),
        (f"{PROMPT}    if not xs:\n        xs = [0, 1]\n        ", f"xs = list(xs)\n{BODY}", 1.0),
        (f"{PROMPT}    if not xs:\n        xs = [0, 1]\n", f"       xs = list(xs)\n{BODY}", 1.0),
    ],
)
def test_a_body_goes_on_where_the_prompt_ends(
    reward: CodeReward, prompt: str, completion: str, value: float
) -> None:
    row = {"prompt": prompt, "tests": ZERO, "entry_point": "find_zero"}
    assert reward(completion, None, row)["reward"] == value


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("def sum(a, b):\n    sum = 0\n    for i in range(1, b):\n        sum += a\n    return sum + a", 1.0),
        ("def sum(a, b): return a + b", 0.0),
        ("pass", 0.0),
        ("sum", 0.0),
    ],
)
def test_a_function_may_have_the_name_of_a_builtin_one(
    reward: CodeReward, completion: str, value: float
) -> None:
    row = {"prompt": "Multiply.", "tests": ["assert sum(3, 4) == 12", "assert sum(1, 5) == 5"]}
    assert reward(completion, None, row)["reward"] == value


def test_the_builtin_function_is_no_program(reward: CodeReward) -> None:
    for code in ("", "pass", "max", "x = max(1, 2)"):
        row = {"prompt": "The larger.", "tests": ["assert max(1, 2) == 2"]}
        assert reward(code, None, row)["reward"] == 0.0
    for tests in (["assert len(sorted([1]) ) == 1"], ["assert len(CONSTANT) == 1"]):
        with pytest.raises(DataError, match="name the one in `entry_point`"):
            reward("def f(): pass", None, {"prompt": "", "tests": tests})


def test_a_prompt_whose_code_cannot_run_is_a_failure_of_the_row(reward: CodeReward) -> None:
    row = {"prompt": f"import no_such_module\n{PROMPT}", "tests": ["assert find_zero([1, 1]) == -1"]}
    with pytest.raises(DataError, match=r"code of the prompt cannot be run.*no_such_module"):
        reward(FINDS, None, row)


def test_a_prompt_in_words_gives_no_code(reward: CodeReward) -> None:
    for prompt in ("Square", "square the number x", "print(1)", "", None, "def other(): 1 / 0\nother()"):
        row = {"prompt": prompt, "tests": ["assert f(2) == 4"]}
        assert reward("def f(x): return x * x", None, row)["reward"] == 1.0


SIGNATURES = {
    "alone": "import math\nLIMIT = 3\ndef f(x,\n      y=1):\n",
    "in a chat": "Add.\nBegin with:\n```\nimport math\nLIMIT = 3\ndef f(x, y=1):\n```",
    "with a text": 'import math\nLIMIT = 3\ndef f(x, y=1):\n    """Add."""\n',
}


@pytest.mark.parametrize("name", SIGNATURES, ids=[name.replace(" ", "-") for name in SIGNATURES])
def test_a_prompt_may_end_with_the_first_line_of_the_function(reward: CodeReward, name: str) -> None:
    """As `code_prompt` and `instruct_prompt` of BigCodeBench. Its tests use what the prompt imports."""
    row = {"prompt": SIGNATURES[name], "tests": "assert f(math.floor(2.5), LIMIT) == 5", "entry_point": "f"}
    whole = "```python\nimport math\nLIMIT = 3\ndef f(x, y=1):\n    return {}\n```"
    body = "    if x:\n        return {}\n    return y"
    for form in (whole, *[body] * (name != "in a chat")):
        assert reward(form.format("x + y"), None, row)["reward"] == 1
        assert reward(form.format("x - y"), None, row)["reward"] == 0


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_body_goes_on_where_a_prompt_ends_whatever_ends_its_lines(end: str) -> None:
    prompt = 'def f(x):\n    """Double."""\n    y = 2\n'.replace("\n", end)
    scope: dict[str, Any] = {}
    exec(continued("    return y * x\n", "f", prompt), scope)
    assert scope["f"](3) == 6
