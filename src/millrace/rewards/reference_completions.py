"""What a completion of a row would be that deserves full marks, by the row's reference answer."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from millrace.config.tables import task as table
from millrace.core.errors import DataError
from millrace.rewards.mathematics.final_answer import boxes
from millrace.rewards.references import ReferenceAnswers, json_value, to_json, unwrapped, written
from millrace.tasks.rows import Row, find_column

_TOKENS = re.compile(
    r"\\[bAZ]|[\^$]|(?P<space>\\s[*+?]?)|(?P<escaped>\\[\W_])|(?P<choice>[\\.*+?{}\[\]()|])|(?P<plain>.)",
    re.DOTALL,
)


class ReferenceCompletion(msgspec.Struct, frozen=True):
    """`full`: what the reward gives it at least; None: nobody knows. `member`: of a sum, whose value is
    meant."""

    text: str
    full: float | None = None
    member: str = ""


def reference_completions(
    reward: table.AnyReward, answer: Any, columns: Row
) -> Iterator[ReferenceCompletion]:
    """A completion for the reward, and of a sum for each member that has one. Without one whose worth is
    known it is the answer as text, if there is an answer.

    Raises: DataError: the reward cannot read the answer.
    """
    known = [
        ReferenceCompletion(text, full, name)
        for name, member in table.members_of(reward).items()
        for text, full in _known(member, answer, columns)
    ]
    yield from known
    if not known and answer is not None:
        yield ReferenceCompletion(plain(answer))


def told_references(reward: table.AnyReward, answer: Any, columns: Row) -> list[ReferenceCompletion]:
    """As `reference_completions`. Of an answer that the reward cannot read it is the text: the reward says
    why."""
    try:
        return list(reference_completions(reward, answer, columns))
    except DataError:
        return [ReferenceCompletion(plain(answer), full=1.0)]


def plain(answer: Any) -> str:
    """An answer as text, whatever it is."""
    answer = unwrapped(answer)
    try:
        return to_json(json_value(answer)) if isinstance(answer, list | dict) else written(answer)
    except DataError:
        return str(answer)


def _known(reward: table.OneReward, answer: Any, columns: Row) -> Iterator[tuple[str, float]]:
    match reward:
        case table.ExactRewardSection():
            references = ReferenceAnswers("exact match", reward.extract_answer, reward.answer_is)
            first = references.values(answer)[0]
            text = to_json(first) if reward.answer_is == "json" else written(first)
            if (framed := in_pattern(reward.extract, text)) is not None:
                yield framed, 1.0
        case table.MathRewardSection():
            text = ReferenceAnswers("math", reward.extract_answer, reward.answer_is).texts(answer)[0]
            is_solution = "####" in text or any(True for _ in boxes(text))
            yield text if is_solution else f"\\boxed{{{text}}}", 1.0
        case table.CodeRewardSection():
            if (program := reference_program(answer, columns)) is not None:
                yield program, 1.0
        case table.JsonRewardSection():
            json_text = _json(answer)
            if json_text is not None and (framed := in_pattern(reward.extract, json_text)) is not None:
                yield framed, 1.0


def _json(answer: Any) -> str | None:
    """JSON text of an answer that is a list or a table, or text of one; None: it is neither."""
    answer = unwrapped(answer)
    value = json_value(answer) if isinstance(answer, list | dict | str) else None
    if not isinstance(value, list | dict):
        return None
    return answer if isinstance(answer, str) else to_json(value)


def in_pattern(pattern: str | None, text: str) -> str | None:
    """A text in which the one group of a pattern finds `text`; None: this function finds none.

    What is literal around the group is written as it is. So `#### (.+)` and `<answer>(.*?)</answer>` are
    known.
    """
    if pattern is None:
        return text
    before, bracket, rest = re.sub(r"\(\?[aimsx]+\)", "", pattern).partition("(")
    around = [_literal(before), _literal(rest.rpartition(")")[2])]
    if not bracket or None in around:
        return None
    framed = f"{around[0]}{text}{around[1]}"
    found = re.findall(pattern, framed)
    return framed if found and found[-1].strip() == text else None


def _literal(pattern: str) -> str | None:
    """The text that a pattern without choices matches; None: it has choices."""
    written = []
    for token in _TOKENS.finditer(pattern):
        match token.lastgroup:
            case "space":
                written.append(" ")
            case "escaped" | "plain":
                written.append(token[0][-1])
            case "choice":
                return None
    return "".join(written)


_SOLUTIONS = ("canonical_solution", "reference_solution", "gold_standard_solution", "solution", "solutions")
PROGRAMS = (*_SOLUTIONS, "solution_code", "code", "completion")
"""Columns in which public data sets have a right program, where `task.answer` names none."""
PYTHON_3 = 3
"""The language in the solutions of CodeContests."""


def reference_program(answer: Any, columns: Row) -> str | None:
    """A completion that should pass all tests of a row: the right program of the row; None: it has none.

    A program is a text; or of a list, as data or as JSON, or of a table of CodeContests, the first that is
    Python 3: APPS has old ones. A body that goes on where the prompt ends is a program too, as in HumanEval.
    One of BigCodeBench goes on where `code_prompt` ends.
    """
    found = map(_program, (answer, *(find_column(columns, one) for one in PROGRAMS)))
    program = next(filter(None, found), None)
    return f"{columns.get('code_prompt') or ''}{program}" if program and program[0].isspace() else program


def _program(column: Any) -> str | None:
    if isinstance(column, str) and column.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            column = json.loads(column)
    if isinstance(column, Mapping) and {"language", "solution"} <= set(column):
        pairs = zip(column["language"], column["solution"], strict=False)
        column = [program for language, program in pairs if language in (PYTHON_3, "PYTHON3")]
    if isinstance(column, list | tuple):
        programs = [one for one in column if isinstance(one, str) and one.strip()]
        column = next(filter(_is_python, programs), next(iter(programs), None))
    return column if isinstance(column, str) and column.strip() else None


def _is_python(program: str) -> bool:
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        return bool(ast.parse(program))
    return False
