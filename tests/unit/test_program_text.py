"""Which part of a completion is its program: a table of ways in which models write one."""

from __future__ import annotations

import pytest

from millrace.rewards.program_text import program_of

ADD = "def add(a, b):\n    return a + b\n"
DRAFT = "def add(a, b):\n    return a - b\n"
PRINTS = "a, b = map(int, input().split())\nprint(a + b)\n"
F = "```"

OF_A_FUNCTION = {
    "a block": f"Here:\n{F}python\n{ADD}{F}\n",
    "no fence": ADD,
    "no language": f"{F}\n{ADD}{F}",
    "another case": f"{F}Python3\n{ADD}{F}",
    "capitals": f"{F}PYTHON\n{ADD}{F}",
    "py": f"{F}py\n{ADD}{F}",
    "a space before the language": f"{F} python \n{ADD}{F}",
    "attributes": f'{F}python title="add.py"\n{ADD}{F}',
    "braces": f"{F}{{.python .numberLines}}\n{ADD}{F}",
    "a name of a file": f"{F}python:add.py\n{ADD}{F}",
    "the language of tools": f"{F}tool_code\n{ADD}{F}",
    "tildes": f"~~~python\n{ADD}~~~\n",
    "tildes alone": f"~~~\n{ADD}~~~\n",
    "a longer fence": f"{F}{F}python\n{ADD}{F}{F}\n",
    "a longer closing fence": f"{F}python\n{ADD}{F}`\n",
    "an indented block of a list": f"1. a\n\n   {F}python\n   def add(a, b):\n       return a + b\n   {F}\n",
    "a deeply indented block": f"    {F}python\n    def add(a, b):\n        return a + b\n    {F}\n",
    "a quotation": f"> {F}python\n> def add(a, b):\n>     return a + b\n> {F}\n",
    "line ends of Windows": f"Here:\r\n{F}python\r\ndef add(a, b):\r\n    return a + b\r\n{F}\r\n",
    "not closed": f"Here:\n{F}python\n{ADD}",
    "not closed, without an end of line": f"{F}python\n{ADD}".rstrip(),
    "closed in the last line": f"{F}python\n{ADD.rstrip()}{F}",
    "opened behind words": f"The program: {F}python\n{ADD}{F}",
    "the prompt opened the fence": f"{ADD}{F}\n",
    "the prompt opened the fence, and words follow": f"{ADD}{F}\nIt adds two numbers.\n",
    "words behind": f"{F}python\n{ADD}{F}\nThis works, since `+` adds.\n",
    "a block of output behind": f"{F}python\n{ADD}{F}\nIt prints\n{F}\n3\n{F}\n",
    "a block of a shell behind": f"{F}python\n{ADD}{F}\n{F}bash\npython add.py\n{F}\n",
    "an example of use behind": f"{F}python\n{ADD}{F}\nUse it:\n{F}python\nprint(add(1, 2))\n{F}\n",
    "an example of use that is not closed": f"{F}python\n{ADD}{F}\nUse it:\n{F}python\nprint(add(1, 2))\n",
    "a session behind": f"{F}python\n{ADD}{F}\n{F}python\n>>> add(1, 2)\n3\n{F}\n",
    "a draft before": f"{F}python\n{DRAFT}{F}\nNo. So:\n{F}python\n{ADD}{F}\n",
    "a draft that is not closed": f"{F}python\n{DRAFT}\nNo. So:\n{F}python\n{ADD}{F}\n",
    "two kinds of fences": f"~~~python\n{DRAFT}~~~\n{F}python\n{ADD}{F}\n",
    "thinking": f"<think>\nHm.\n{F}python\n{DRAFT}{F}\n</think>\n\n{F}python\n{ADD}{F}\n",
    "thinking that the prompt began": f"Hm.\n{F}python\n{DRAFT}{F}\n</think>\n{F}python\n{ADD}{F}\n",
    "thinking with a block that is not closed": f"Hm.\n{F}python\n{DRAFT}\n</think>\n{F}\n{ADD}{F}\n",
    "thinking, and no fence": f"<think>\n{F}python\n{DRAFT}{F}\n</think>\n{ADD}",
    "an answer": f"<answer>\n{ADD}</answer>",
    "an answer with a fence": f"<answer>\n{F}python\n{ADD}{F}\n</answer>",
    "an answer with a fence in one line": f"<answer>{F}python\n{ADD}{F}</answer>",
    "an answer behind a block": f"{F}python\n{DRAFT}{F}\n<answer>\n{ADD}</answer>",
    "an answer that is not closed": f"So:\n<answer>\n{ADD}",
    "an answer in words behind a block": f"{F}python\n{ADD}{F}\n<answer>The sum of both.</answer>",
    "PYTHON": f"[PYTHON]\n{ADD}[/PYTHON]\n[TESTS]\nassert add(1, 2) == 3\n[/TESTS]",
    "python": f"[python]\n{ADD}[/python]",
    "tags of a solution": f"<solution>\n{ADD}</solution>",
    "tags of code": f"BEGIN SOLUTION\n<code>\n{ADD}</code>\nEND SOLUTION",
    "words around it, and no fence": f"Sure!\n\nHere is the function:\n\n{ADD}\nThis function adds.\n",
    "words in Chinese around it": f"以下是代码：\n\n{ADD}\n这个函数把两个数相加。\n",
    "points of a list behind it, and no fence": f"{ADD}\n**Explanation**\n\n- It adds.\n1. First `a`.\n",
    "thinking, words, and no fence": f"Hm.\n</think>\nSure!\n\n{ADD}",
    "the prompt opened the fence, without its language": f"python\n{ADD}{F}\n",
    "an annotated name in a draft": f"{F}python\nadd: int = 0\n{F}\nNo:\n{F}python\n{ADD}{F}\n",
    "tags of Python": f"<python>\n{ADD}</python>",
    "tags with attributes": f'<answer language="python">\n{ADD}</answer>',
    "a final answer": f"<final_answer>\n{ADD}</final_answer>",
    "tags in tags": f"<solution><code>\n{ADD}</code></solution>",
    "HTML": f'<pre><code class="language-python">{ADD}</code></pre>',
    "a file": f"<file name='add.py'>\n{ADD}</file>",
    "tags that nobody knows": f"<result>\n{ADD}</result>",
    "BEGIN and DONE": f"[BEGIN]\n{ADD}[DONE]",
    "DONE": f"{ADD}[DONE]\n",
    "the end token of a text": f"{ADD}<|endoftext|>",
    "rules": f"---\n{ADD}---\n",
    "a heading of a page": f"=== Solution ===\n{ADD}",
    "Markdown in a fence": f"{F}`markdown\n{F}python\n{ADD}{F}\n{F}`",
    "a sentence with an exclamation mark": f"Sure! Here's the code:\n{ADD}\nHope this helps!",
    "an indented block of Markdown": "Here:\n\n    def add(a, b):\n        return a + b\n\nIt adds.",
    "not closed, and words behind": f"{F}python\n{ADD}\nThis function adds two numbers.\n",
    "the language on a line of its own": f"{F}\npython\n{ADD}{F}",
    "thinking, then an answer": f"<think>\n{DRAFT}</think>\n<answer>\n{F}python\n{ADD}{F}\n</answer>\n",
}


@pytest.mark.parametrize("name", OF_A_FUNCTION)
def test_the_program_is_the_last_part_that_defines_the_function(name: str) -> None:
    assert program_of(OF_A_FUNCTION[name], "add").replace("\r", "").strip() == ADD.strip()


THAT_PRINTS = {
    "a block": f"{F}python\n{PRINTS}{F}",
    "no fence": PRINTS,
    "not closed": f"Here:\n{F}\n{PRINTS}",
    "output behind": f"{F}\n{PRINTS}{F}\nFor 1 2 it prints\n{F}\n3\n{F}\n",
    "words as output behind": f"{F}python\n{PRINTS}{F}\n{F}text\nprint(3)\n{F}\n",
    "the prompt opened the fence": f"{PRINTS}{F}\nIt reads two numbers.",
    "a formula behind": f"{F}python\n{PRINTS}{F}\nThe time is\n{F}\nT(n) = O(n)\n{F}\n",
    "a block of comments behind": f"{F}python\n{PRINTS}{F}\n{F}python\n# Output: 3\n{F}\n",
    "words around it, and no fence": f"Here it is:\n\n{PRINTS}\nThis reads two numbers.\n",
    "a draft before": f"{F}python\nprint(3)\n{F}\nNo:\n{F}python\n{PRINTS}{F}\n",
    "a shell behind": f"{F}python\n{PRINTS}{F}\n{F}sh\necho 1 2 | python a.py\n{F}\n",
    "thinking": f"<think>{F}python\nprint(3)\n{F}\n</think>{F}python\n{PRINTS}{F}\n",
}


@pytest.mark.parametrize("name", THAT_PRINTS)
def test_without_a_function_the_program_is_the_last_part_that_looks_like_python(name: str) -> None:
    assert program_of(THAT_PRINTS[name]).strip() == PRINTS.strip()


HELPER = "def double(x):\n    return 2 * x\n"
USES = "def add(a, b):\n    return double(a) + LIMIT\n"
SOLVE = "def solve():\n    print(double(int(input())))\n"


def block(code: str) -> str:
    return f"{F}python\n{code}{F}\n"


@pytest.mark.parametrize(
    ("completion", "function", "program"),
    [
        (block(HELPER) + block("LIMIT = 1\n") + block(USES), "add", HELPER + "LIMIT = 1\n" + USES),
        (block("import math\n") + block("def add(a, b): return math.pi\n"), "add", None),
        (block(f"LIMIT = 1\n{USES}") + "where\n" + block(HELPER), "add", f"{HELPER}LIMIT = 1\n{USES}"),
        (block(HELPER) + block(SOLVE) + "Then:\n" + block("solve()\n"), None, f"{HELPER}{SOLVE}solve()\n"),
        (block(HELPER + DRAFT) + "Mended:\n" + block(ADD + "print(double(1))\n"), "add", None),
    ],
)
def test_blocks_that_define_what_the_program_lacks_come_before_it(
    completion: str, function: str | None, program: str | None
) -> None:
    whole = "".join(part.partition("python\n")[2] for part in completion.split(F))
    assert program_of(completion, function) == (program or whole)


@pytest.mark.parametrize(
    ("program", "behind", "function"),
    [
        (ADD, "nums = [1]\nprint(add(*nums, 2))\n", "add"),
        (ADD.replace("a + b", "math.fsum((a, b))"), "import math\nprint(add(1, 2))\n", "add"),
        (f"{HELPER}{SOLVE}solve()\n", "print(double(3))\n", None),
        (f"{HELPER}print(double(int(input())))\n", "def test_double():\n    assert double(1) == 2\n", None),
    ],
)
def test_a_use_of_the_program_behind_it_is_no_part_of_it(
    program: str, behind: str, function: str | None
) -> None:
    assert program_of(block(program) + "For example:\n" + block(behind), function) == program


def test_an_earlier_program_that_reads_the_input_is_a_draft() -> None:
    draft = "import math\nLIMIT = 1\nprint(int(input()))\n"
    program = "print(math.sqrt(int(input())) + LIMIT)\n"
    assert program_of(block(draft) + block(program)) == program


INSIDE = [
    "N, M = 1, 2\ndef add(a, b):\n    return a + b\n",
    'def add(a, b):\n    return a + b\nprint("""A sum\nOf two numbers.\nThe End""")\n',
    "X: int = 1\nadd = lambda a, b: a + b\nA, B = 1, 2\n",
    'def add(a, b):\n    """Add.\n\n    ```python\n    add(1, 2)\n    ```\n    """\n    return a + b\n',
    'def add(a, b):\n    return f"```{a}```"\n',
    "def add(a, b):\n    return a.split('</think>')[-1] + \"</think>\\n\" + '</answer>'\n",
    'def add(a, b):\n    return "<answer>" + a + "~~~" * 2\n',
    "def add(a, b):  # `+`\n    return ~~~a\n",
    'def add(a, b):\n    return """\n<html>\n[DONE]\n---\n"""\n',
    "E, V = 1, 2\ndef add(a, b):\n    return a + b\nX: int = 1\n",
]


@pytest.mark.parametrize("program", INSIDE)
def test_a_fence_or_a_tag_in_a_text_of_the_program_does_not_cut_it(program: str) -> None:
    assert program_of(f"Here:\n{F}python\n{program}{F}\nDone.", "add") == program
    assert program_of(f"<answer>\n{F}python\n{program}{F}\n</answer>", "add") == program
    assert program_of(program, "add") == program


def test_a_last_program_that_is_cut_counts_and_no_draft_in_its_place() -> None:
    cut = "def add(a, b):\n    return (a +"
    assert program_of(f"{F}python\n{ADD}{F}\nBetter:\n{F}python\n{cut}", "add").strip() == cut


def test_thinking_that_does_not_end_is_no_program() -> None:
    assert program_of(f"<think>\nHm.\n{F}python\n{ADD}{F}\nBut", "add") == ""


def test_a_completion_without_a_program_stays_what_it_is() -> None:
    assert program_of("") == ""
    assert program_of("I cannot.") == "I cannot."
    assert program_of(f"{F}\n{F}") == ""


@pytest.mark.parametrize(
    "piece", [" ", "`", "~", "> ", "```", "<answer>\n", "a=", "</think>\n", "\n```\n", "</answer> ", "<a>\n"]
)
def test_a_long_hostile_completion_is_searched_in_linear_time(piece: str) -> None:
    """The work is bounded: a quadratic search of so much text would not end within the test's limit."""
    program_of(piece * 20_000 + "x", "add")
