"""The reward of mathematics."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from millrace.core.errors import DataError
from millrace.rewards.mathematics.final_answer import (
    ENVIRONMENT,
    FinalAnswer,
    answers,
    boxes,
    final_answer,
    is_true,
    number_of,
    sides,
)
from millrace.rewards.mathematics.plain_numbers import (
    NO_UNITS,
    PlainNumber,
    same_number,
    tidy,
    unwrapped_text,
)
from millrace.rewards.references import ReferenceAnswers
from millrace.tasks.rows import Row

CACHED = 1024
PROSE_MAX = 200
"""Characters of a formula that nothing marks."""
FORMULA_MAX = 4000
"""Characters of a formula. A longer one is no answer."""
FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan",
    "log", "exp", "max", "min", "gcd", "lcm", "mod", "sqrt", "det", "dim", "ker", "deg", "and", "infty"}
)  # fmt: skip
_NO_UNITS = NO_UNITS | {"i", "e", "for", "when", "with", "where", "even", "odd", "only", "all", "any", "in"}
_COMMANDS = re.compile(rf"{ENVIRONMENT.pattern}|\\[a-zA-Z]+")
_LETTERS = re.compile(r"[^\W\d_]+")
_OPTION = re.compile(
    r"(?s)(?:(?i:option\s+|choice\s+)?(?:\(([A-J])\)[.:]?|([A-J])[).:]"
    r"|([A-J])(?= (?:because|since)\b|, | \(| [-–—] (?![A-J]\b)|$))(?=\s|,|$)"
    r"|((?i:yes|no|true|false))(?=[,;:.]\s| [-–—] )(?!(?i:.*\b(?:yes|no|true|false)\b\W*(?:[,.;!]|$))))"
    r"(?!.*(?:\b[A-J][).:]|\([A-J]\)))(?!.*(?:\bor|\band|,)\s+\(?[A-J]\b)",
)
"""The letter of one option, or a truth value, before its text."""
_OPTIONS = re.compile(r"\(?[A-J]\)?(?:(?:\s*[,;&、]\s*(?:and\s+)?|\s+and\s+|\s*)\(?[A-J]\)?)+")
"""Letters of several options."""
_UNIT_BEHIND = re.compile(
    r"(?<=[\d}\w])\s*\\(?:text|mbox|mathrm)\s*\{\s*([A-Za-z]+\.?(?: [A-Za-z]+\.?)?)\s*\}"
    r"\s*(?:\^\s*\{?\d\}?)?\s*$"
)
_SEVERAL = re.compile(r"[,;]|\\(?:pm|mp|cup)\b")
"""In a reference that may be several answers."""
_UNEQUAL = re.compile(r"\\neq?\b|≠|!=")
_UPRIGHT = re.compile(r"\\math(?:(?:rm|it|sf)\s*\{\s*([ie])|bf\s*\{\s*([A-Za-z]))\s*\}")
_SET = re.compile(r"\\?\{\s*[A-Za-z]\s*(?:\\mid\b|\||:)([^{}]*?)\\?\}")
_ENDS = " \t\n.,;:!?。，．،।\"'“”‘’`*_$"


@dataclass(frozen=True, slots=True)
class Words:
    """A reference that is compared as text."""

    text: str


@dataclass(frozen=True, slots=True)
class Formula:
    """A reference that math-verify compares. `parsed` is what math-verify made of it."""

    text: str
    parsed: tuple[Any, ...]


Reference = PlainNumber | Words | Formula


class MathReward:
    """1 if the final answer of a completion is the reference; else 0.

    A reference that is a plain number takes a plain number, words take the same words, and math-verify
    compares anything else. math-verify gets the final answer alone. Its own time limits are off: some answers
    (towers of powers) never end in C code, and the caller's deadline ends the process.
    """

    name, is_async = "math", False
    file: str | None = None

    def __init__(self, extract_answer: str | None = None, answer_is: Any = "one") -> None:
        import math_verify  # before the process's memory is limited, and before the first deadline

        # math-verify would warn, once per process, that its limits are off.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._verify = math_verify.verify
        self._references = ReferenceAnswers(self.name, extract_answer, answer_is)
        _parsed("x + 1")  # the parser takes long for its first formula

    def __call__(self, completion: str, answer: Any, columns: Row) -> float:
        """Raises: DataError: the row has no reference that can be read."""
        references = [read_reference(text) for text in self._references.texts(answer)]
        given = final_answer(completion)
        return float(given is not None and any(self._is_right(given, one) for one in references))

    def _is_right(self, given: FinalAnswer, reference: Reference) -> bool:
        match reference:
            case PlainNumber():
                number = number_of(given)
                return number is not None and same_number(number, reference)
            case Words(text):
                return any(plain_words(one) == text for one in _wordings(given.text))
            case Formula(text, parsed):
                return any(self._equal(one, text, parsed) for one in _formulations(given, text))

    def _equal(self, given: str, text: str, parsed: tuple[Any, ...]) -> bool:
        is_other = bool(_UNEQUAL.search(given)) is not bool(_UNEQUAL.search(text))
        if is_other or len(given) > FORMULA_MAX or not is_true(given):
            return False
        given = as_formula(given)
        if given == text:
            return True
        if _are_several(given) and not _SEVERAL.search(text):
            return False
        found = _parsed(given)
        return bool(found) and self._verify(
            list(parsed), list(found), timeout_seconds=None, raise_on_error=True
        )


@lru_cache(CACHED)
def read_reference(text: str) -> Reference:
    """Raises: DataError: it is neither a number, nor words, nor a formula that math-verify can read."""
    marked = [box for box in boxes(text) if box.strip()]
    text = marked[-1] if marked else text.rpartition("####")[2] if "####" in text else text
    whole = FinalAnswer(text.strip(), True)
    number = number_of(whole)
    if number is not None:
        return number
    if is_words(text):
        words = plain_words(text)
        if words:
            return Words(words)
    formula = as_formula(text)
    parsed = _parsed(formula)
    if not parsed:
        raise DataError(
            f"the reference answer {text!r} is neither a number, nor words, nor mathematics that math-verify "
            "can read"
        )
    return Formula(formula, parsed)


def _are_several(formula: str) -> bool:
    """Whether a comma or a semicolon stands outside of all brackets, and is no separator of thousands."""
    before = None
    while before != formula:
        before, formula = formula, re.sub(r"[(\[{][^()\[\]{}]*[)\]}]", "", formula)
    return re.search(r",(?!\d{3}(?!\d))|;", formula) is not None


def normal_answer(completion: str) -> str:
    """The final answer, written so that equal numbers are equal texts; empty: there is none. Equal formulas
    may be different texts."""
    given = final_answer(completion)
    if given is None:
        return ""
    number = number_of(given)
    if number is not None:
        return f"{number.value}%" if number.is_percent else str(number.value)
    text = given.text if given.is_whole else ", ".join((answers(given.text) or [[given.text]])[-1])
    return plain_words(text) if is_words(text) else re.sub(r"\s+", "", as_formula(text))


def is_words(text: str) -> bool:
    """Whether a text is compared as text: letters alone, or something with a word of a language. A date, a
    time, a number to another base and a pictograph are text too."""
    text = _without_unit(tidy(text))
    if re.search(r"\d{4}-\d\d-\d\d|\d\s*:\s*\d|^\w+_\{?\d+\}?$|^[☀-➿㈀-㏿🌀-🫿]+$", text):
        return True
    bare = _COMMANDS.sub(" ", unwrapped_text(text))
    letters = _LETTERS.findall(bare)
    if re.search(r"\b[a-zA-Z]!|\)!", bare):  # a factorial
        return False
    if letters and not re.search(r"[\d+*/^=<>|&\\(\[{_]", re.sub(r"^[(\[]\w[)\]]$", "", bare.strip(_ENDS))):
        return "\\" not in unwrapped_text(text) and not (len(letters) == 1 and _is_greek(letters[0]))
    return any(_is_word(one) for one in letters)


def _is_word(letters: str) -> bool:
    """`xyz` and `abc` beside digits and signs are products. A word has four letters or more, with a vowel
    among them."""
    if not letters.isascii():
        return len(letters) > 1 and not _is_greek(letters)
    return len(letters) > 3 and letters.lower() not in FUNCTIONS and bool(set(letters.lower()) & set("aeiou"))


def _is_greek(letters: str) -> bool:
    return all("\u0370" <= one <= "\u03ff" for one in letters)


def plain_words(text: str) -> str:
    """Words without layout, in small letters; a single letter keeps its case, as B and b are two points."""
    text = re.sub(r"\\\s|\\[()\[\]]", " ", unwrapped_text(tidy(text)))
    text = re.sub(r"\b([ap])\.\s?m\b\.?", r"\1m", text, flags=re.IGNORECASE)
    text = re.sub(r"_\{(\w+)\}", r"_\1", text)
    text = re.sub(r"\s*:\s*", ":", re.sub(r"\s+", " ", text)).strip(_ENDS)
    if re.fullmatch(r"\(\w\)|\[\w\]", text):
        text = text[1:-1]
    if _OPTIONS.fullmatch(text):
        letters = re.findall(r"[A-J](?![a-z])", text)
        if letters == sorted(letters) or not text.isalpha():  # `BA` is no pair of options
            return ",".join(sorted(letters))
    return text if len(text) == 1 else text.casefold()


def _wordings(text: str) -> list[str]:
    """The whole phrase, its formulas if these are no different words, and what follows the last "is" or
    ":"."""
    behind = re.split(r"[:：=]", text)[-1]
    last = re.split(r"\b(?:is|es|est|ist)\b|是(?=.)", behind)[-1]
    options = [
        _OPTION.match(one.replace("**", "").strip(_ENDS)) for one in (unwrapped_text(tidy(text)), last)
    ]
    inside = [", ".join(one) for one in answers(text)]
    if len({plain_words(one) for one in inside if is_words(one)}) > 1:
        inside = []
    return [text, *inside, behind, last, *(one[one.lastindex or 1] for one in options if one)]


def _formulations(given: FinalAnswer, reference: str) -> list[str]:
    """The formula of an answer. Prose is none: it has letters that the reference has not."""
    if given.is_whole:
        return [given.text]
    if inside := answers(given.text):
        return [", ".join(inside[-1])]
    phrase = given.text.strip().rstrip(".")
    last = re.split(r"(?<![\\{A-Za-z])(?:[A-Za-z]{4,}|is|are|be|get)\b[\s:]*|:\s", phrase)[-1] or phrase
    unknown = set(_letters(sides(last)[-1])) - set(_letters(reference))
    return [] if unknown or len(last) > PROSE_MAX else [last]


def _letters(text: str) -> str:
    return "".join(_LETTERS.findall(_COMMANDS.sub(" ", text)))


def as_formula(text: str) -> str:
    """A formula without layout, with "or" and "and" as commas."""
    text = re.sub(r"(?<!\\)\$", "", tidy(text)).strip()
    text = re.sub(r"^\\[(\[]|\\[)\]]$", "", text).strip()
    text = re.sub(r",?\s*(?:\\(?:text|mbox|mathrm)\s*\{\s*,?\s*(?:or|and)\s*\}|\b(?:or|and)\b)", ",", text)
    text = _without_unit(text.replace("\\varnothing", "\\emptyset"))
    text = re.sub(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi", text)
    return re.sub(r"\.$", "", text.replace("infinity", "\\infty")).strip()


def _without_unit(text: str) -> str:
    """A formula such as `24\\pi \\text{ square units}` without the unit behind it."""
    unit = _UNIT_BEHIND.search(text)
    if unit is None or "\\text" in text[: unit.start()] or "\\" not in text[: unit.start()]:
        return text
    return text if set(unit[1].lower().split()) & _NO_UNITS else text[: unit.start()]


@lru_cache(CACHED)
def _parsed(formula: str) -> tuple[Any, ...]:
    """What math-verify makes of exactly this text, or of the condition of a set {x | condition}. It loses an
    upright i or e and bold letters, and cannot compare `\\neq`: it gets plain letters and an equation.
    Empty: nothing."""
    import math_verify

    latex = (math_verify.LatexExtractionConfig(),)
    formula = _UNEQUAL.sub("=", _UPRIGHT.sub(r" \1\2 ", formula))
    formula = re.sub(r"(?<=\d)\s+i(?![A-Za-z])", "i", formula)  # else it would be a variable
    for text in (formula, _SET.sub(r"\1", formula)) if _balanced(formula) else ():
        if found := math_verify.parse(f"\\boxed{{{text}}}", latex, "no_fallback", parsing_timeout=None):
            return tuple(found)
    return ()


def _balanced(text: str) -> bool:
    depth = 0
    for one in re.findall(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(one, 0)
        if depth < 0:
            return False
    return depth == 0
