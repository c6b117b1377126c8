"""What a completion takes as its answer. Pure, and it does not know the reference.

The last box that is not empty; else the last `<answer>`; else what follows the last "answer is", "Answer:"
or `####`; else the end of the last line that has a number or a formula. Reasoning up to `</think>` does not
count where text follows it. What prose denies is no answer, nor is a check behind the answer.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from millrace.rewards.mathematics.plain_numbers import (
    DECIMAL,
    NO_UNITS,
    PlainNumber,
    read_number,
    same_number,
    tidy,
    unwrapped_text,
)

_BRACES = re.compile(
    r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\(?:boxed|fbox)\s+(?P<bare>\w+)|\\.|(?P<left>\{)|(?P<right>\})",
    re.DOTALL,
)
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_SAID = re.compile(
    r"####|\b(?:answer|result|solution|option|choice)\**\s*(?:\([^()\n]{1,40}\)\s*)?"
    r"(?:(?:is|(?:should|must|would|will)\s+be)\b(?:\s+(?:therefore|thus|hence)\b,?)?|[:=])+[\s:*]*"
    r"|(?:答案|答え|정답|\b(?:respuesta|réponse|antwort|resposta|risposta|ответ))\**\s*"
    r"(?:(?:es|est|ist|é|è)\b|[是为為は:：])+[\s:：*]*|故选[\s:：]*",
    re.IGNORECASE,
)
_SAID_IN_TEXT = re.compile(rf"\\[tm]\w+\s*\{{([^{{}}]{{0,80}}(?:{_SAID.pattern})[^{{}}]{{0,80}})\}}", re.I)
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$((?:[^$\\]|\\.)+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_SIDES = re.compile(r"(?<![<>!:\\])=|\\approx\b|≈|\\equiv\b")
_VARIABLE = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?\s*(?:\([^()=]*\))?'?")
_QUANTITY = re.compile(r"(?=(?:.*?[A-Za-z]){2})[A-Za-z\d\s+\-*/^_{}()|.']+")
"""What is no single unknown: `m + n` and `AB`, where `2x` would be an equation that nobody has solved."""
_PROSE = re.compile(r"(?<![\\A-Za-z])(?!(?:sin|cos|tan|log|exp|max|min|gcd|lcm|mod)\b)[A-Za-z]{3,}")
_TOKEN = re.compile(
    rf"(?<![A-Za-z\d\u0370-\u03ff.^_{{\\])(?:\d+\s+\d+\s*/\s*\d+|\d*\s*\\frac\s*(?:\{{-?\d+\}}|\d)\s*(?:\{{-?\d+\}}|\d)|\d+\s*/\s*\d+|(?:{DECIMAL})"
    rf"(?:[eE][+-]?\d+|\s*(?:\\times|\\cdot|×|·|\*)\s*10\s*\^\s*\{{?\s*[+-]?\d+\s*\}}?)?)(?:\s*\\?%)?"
)
_ITEM = re.compile(rf"{_FORMULA.pattern}|(?P<number>{_TOKEN.pattern})", re.DOTALL)
_OR = r"(?:\b(?:or|oder|ou|o|или)\b|\\text\s*\{\s*or\s*\}|或)"
_AND = r"(?:\b(?:and|und|et|y|и)\b|\\text\s*\{\s*and\s*\}|和)"
_HEDGE = r"(?:\s+(?:maybe|perhaps|possibly|even|also)\b)?"
_OR_BETWEEN = re.compile(rf"\s*,?\s*{_OR}\s*")
_BETWEEN = re.compile(rf"\s*[,;，、；]?\s*(?:({_OR})|({_AND}))?{_HEDGE}\s*")
"""Between two answers, if it is not empty."""
_BEFORE = re.compile(
    rf"(.*?)([-+*/×÷^·]|\\times|\\cdot|\\div|(?:{_OR}|{_AND}){_HEDGE}|[,，、])?\s*$", re.DOTALL
)
_BEHIND = re.compile(
    r"(?!\s+a [a-z]{2}|/[A-Za-z]{2})\s*(?:[+*/×÷^·]|!(?=\S)|-\s*[\d(\\]|\\(?:times|cdot|div|pi|sqrt|frac)"
    r"|[a-zA-Z](?![a-zA-Z&])|[百千万萬亿億만억])"
)
_RELATION = re.compile(r"(?:\\(?:neq?|leq?|geq?|lt|gt)\b|!=|[≠≤≥]|(?<![-=])[\w)}]\s*[<>]=?)\s*$")
_WORD = r"[^\W\d_]+"
ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[^{}]*\}(?:\s*\{[clr|\s]*\})?")
_MARKUP = re.compile(r"</?[A-Za-z][^<>]*>")
LENGTH_MAX = 200
"""Characters of an arithmetic expression that is checked."""
POWER_MAX = 64
PHRASE_MAX = 1000
"""Characters of prose that are looked at."""
NEIGHBOURS = 80
"""Characters before a number in prose that are looked at."""


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """`is_whole`: the completion marks exactly this text as its answer, so nothing in it is prose."""

    text: str
    is_whole: bool


def final_answer(completion: str) -> FinalAnswer | None:
    """None: the completion has no answer."""
    behind = completion.rpartition("</think>")[2]
    text = behind if behind.strip() else completion
    for box in reversed(list(boxes(text))):
        if unwrapped_text(tidy(box)).strip(" {}$"):
            return FinalAnswer(box, True)
    for tag in reversed(_TAG.findall(text)):
        if tag.strip():
            return _asserted(tag) if _has_prose(tag) else FinalAnswer(_phrase(tag), True)
    return _asserted(text)


def _asserted(text: str) -> FinalAnswer | None:
    phrase = without_contrast(_phrase(text))
    last = [*_FORMULA.finditer(phrase)] or [*_TOKEN.finditer(phrase)]
    is_none = not phrase or (last and is_denied(phrase, *last[-1].span()))
    return None if is_none else FinalAnswer(phrase, False)


def boxes(text: str) -> Iterator[str]:
    """The contents of the boxes that are closed, by their ends. Of nested boxes it is the inner one."""
    opened, inner = list[int](), -1
    for found in _BRACES.finditer(text):
        match found.lastgroup:
            case "box" | "left":
                opened.append(found.end() if found["box"] else -1)
            case "right" if opened:
                start = opened.pop()
                if start > inner:
                    yield text[start : found.start()]
                    inner = start
            case "bare":
                yield found["bare"]


def _phrase(text: str) -> str:
    """What follows the last "answer is" and the like; else the last line that has a number; else the last
    line."""
    text = _SAID_IN_TEXT.sub(r"\1 ", text)
    said = list(_SAID.finditer(text))
    for found in reversed(said):
        lines = text[found.end() :].splitlines()
        if behind := next((line.strip() for line in lines if re.search(r"[^\W_]", line)), ""):
            return behind[:PHRASE_MAX]
    lines = without_checks([line.strip() for line in text.splitlines() if line.strip()])
    numbered = [line for line in lines if re.search(r"\d|\$|\\[(\[]", line)]
    return (numbered or lines or [""])[-1][-PHRASE_MAX:]


# ------------------------------------------------------------------ numbers


def number_of(answer: FinalAnswer) -> PlainNumber | None:
    """The plain number that an answer is, also behind a variable (`x = 42`), or behind a sum (`7 + 5 = 12`)
    that is true. None: it is none, or an arithmetic expression that nobody has evaluated."""
    given = [] if answer.is_whole else answers(answer.text)
    several = given[-1] if given else _OR_BETWEEN.split(answer.text.strip(" .$"))
    if len(several) > 1:
        numbers = [_last_side(one) for one in several]
        equal = all(one and numbers[-1] and same_number(one, numbers[-1]) for one in numbers)
        if equal or given:
            return numbers[-1] if equal else None
    for text in [*(" ".join(one) for one in reversed(given)), answer.text]:
        if not is_true(text):
            return None
        number = _last_side(text)
        if number is None and not answer.is_whole and text is answer.text:
            number = _last_number(text)
        if number is not None:
            return number
    return None


def answers(text: str) -> list[list[str]]:
    """The contents of `$...$` and the like, without what is denied, and what is prose between two signs of a
    currency. Those with only "or", "and" or a comma between them are several answers in one, also with a
    number in place of one."""
    found = list[list[re.Match[str]]]()
    for item in _ITEM.finditer(text):
        if item["number"] is None and is_denied(text, *item.span()):
            continue
        if found and _go_together(found[-1][-1], item):
            found[-1].append(item)
        else:
            found.append([item])
    all_answers = [[*map(_content, items)] for items in found if any(not one["number"] for one in items)]
    return [one for one in all_answers if not all(map(_has_prose, one))]


def _content(item: re.Match[str]) -> str:
    return next(filter(None, item.groups()))


def _go_together(one: re.Match[str], other: re.Match[str]) -> bool:
    """`$x = 1$, $x = 2$` do, and `$x = 1$, $y = 2$` do not. With "or" any two do."""
    between = one.string[one.end() : other.start()]
    found = _BETWEEN.fullmatch(between) if between.strip() else None
    if found is None or found[1]:
        return found is not None
    left, right = ([*map(str.strip, _SIDES.split(_content(each)))][:-1] for each in (one, other))
    return left == right and (found[2] is not None or not (one["number"] or other["number"]))


def _has_prose(text: str) -> bool:
    bare = re.sub(r"\\[a-zA-Z]+(?:\{[^{}]*\})?", "", ENVIRONMENT.sub("", text))
    return _PROSE.search(bare) is not None


def sides(text: str) -> list[str]:
    return [side.strip() for side in _SIDES.split(text)]


def is_true(text: str) -> bool:
    """Whether no two neighbouring sides of an equation are numbers that differ: `3 = 4` is no answer."""
    values = [_value(side) for side in sides(tidy(unwrapped_text(text)))]
    return all(one is None or other is None or _about(one, other) for one, other in pairwise(values))


def _last_side(text: str) -> PlainNumber | None:
    """The number of the last side of an equation that is one. The other sides are variables and
    arithmetic."""
    *others, last = sides(text)
    number = read_number(last)
    if number is None and others and _value(last) is not None:  # 12 = 7 + 5
        *others, last = [*others[:-1], last, others[-1]]
        number = read_number(last)
    return number if all(map(_is_quantity, others)) else None


def _is_quantity(side: str) -> bool:
    """Whether a side of an equation may stand before its number. Nothing: `= 42`."""
    side = side.strip("$ ")
    if re.search(r"[,;]|\b(?:or|and)\b", re.sub(r"\([^()]*\)|\{[^{}]*\}", "", unwrapped_text(side))):
        return False  # it has another answer in it
    if not side or _VARIABLE.fullmatch(side) or _value(side) is not None or "\\" in side:
        return True
    words = set(re.findall(r"[a-z]+", side.lower()))
    return _QUANTITY.fullmatch(side) is not None and not words & NO_UNITS


def _last_number(text: str) -> PlainNumber | None:
    """The last number in prose, unless it is a part of something longer."""
    text = (
        tidy(unwrapped_text(text)).replace("$", " ").replace("\\(", " ").replace("\\)", " ").replace("**", "")
    )
    tokens = list(_TOKEN.finditer(text))
    if not tokens:
        return None
    token = tokens[-1]
    before = _BEFORE.fullmatch(text[max(0, token.start() - NEIGHBOURS) : token.start()])
    left, sign = (before[1], before[2]) if before else ("", None)
    has_operand = re.search(r"[\w)}]\s*$", left) is not None
    match sign:
        case None:
            is_alone = True
        case "-" | "+":
            is_alone = not has_operand
        case _:  # a word or a comma between two answers
            unit = re.match(rf"\s*\(?({_WORD})", text[token.end() :])
            other = rf"\d\s*(?:\(?{unit[1] if unit else _WORD}\)?)?\s*$"
            other = r"\d[^\d.;:!?]{0,40}$" if re.match(_OR, sign) else other
            is_alone = sign[0] not in "*/×÷^·\\" and re.search(other, left) is None
    if not is_alone or _BEHIND.match(text, token.end()) or _RELATION.search(_MARKUP.sub(" ", left)):
        return None
    return read_number(("-" if sign == "-" else "") + token[0])


# ------------------------------------------------------------------ arithmetic

_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _value(side: str) -> Fraction | None:
    """The value of a side that is a number or an arithmetic expression; None: it is neither."""
    if number := read_number(side):
        return number.value / 100 if number.is_percent else number.value
    text = tidy(side).strip("$ .")
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"((\1)/(\2))", text)
    for written, meant in (
        ("\\times", "*"),
        ("\\cdot", "*"),
        ("\\div", "/"),
        ("×", "*"),
        ("÷", "/"),
        ("·", "*"),
        ("^", "**"),
    ):
        text = text.replace(written, meant)
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text.replace("{", "(").replace("}", ")"))
    if len(text) > LENGTH_MAX or not re.fullmatch(r"[\d\s.+\-*/()]+", text):
        return None
    try:
        return _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluated(node: ast.expr) -> Fraction:
    """Raises: ValueError, ZeroDivisionError: not plain arithmetic."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return Fraction(str(value))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_evaluated(inner)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, power = _evaluated(left), _evaluated(right)
            if power.denominator != 1 or abs(power) > POWER_MAX or abs(base) > 10**6:
                raise ValueError("too large")
            return Fraction(base ** int(power))
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_evaluated(left), _evaluated(right))
    raise ValueError("not arithmetic")


def _about(one: Fraction, other: Fraction) -> bool:
    """Equal, or equal after rounding: a share of a hundred is written as a percentage or a decimal."""
    return one == other or (
        abs(one - other) <= Fraction(1, 50) * abs(other) and (one.denominator != 1 or other.denominator != 1)
    )


# ---------------------------------------------------------------- what prose asserts


LOOKED_AT = 80
"""Characters on either side of a number or a formula."""
_NOT = r"(?:\bnot|n['’]t|\b(?:cannot|never|neither|nor|no\s+longer))"
_DENIED = re.compile(
    rf"(?:{_NOT}(?:\s+(?:be|been|equal|equals|to|exactly|simply|just|really|actually|the|an?|answer|number|value|is))*"
    r"|\b(?:rather|other|more|less|greater|fewer|larger|smaller)\s+than"
    r"|\b(?:instead\s+of|excluding|except(?:\s+for)?|(?:rule|rules|ruled|ruling)\s+out)"
    r"|\bno\s+(?:es|son|puede\s+ser)|\bnicht|\bkein\w*|\bpas|\bnon\s+[èe]|\bnão\s+[ée]|\bне(?:\s+рав\w+)?"
    r"|不(?:是|等于|可能是)|(?:wrong|incorrect|impossible)\s+(?:if|that)\s+(?:it|that|this)\s+(?:is|was|be))"
    r"[\s:]*$",
    re.IGNORECASE,
)
"""Before a number: it is denied, or a bound."""
_WRONG = (
    r"(?:wrong|incorrect|impossible|invalid|false|mistaken|ruled\s+out|a\s+mistake|too\s+(?:large|small|high|low|big)"
    r"|not\s+(?:(?:the|an?)\s+)?(?:\w+\s+)?(?:right|correct|answer|valid|solution|possible|it|true))\b"
)
_REFUTED = re.compile(
    rf"\s*(?:(?:is|was|isn['’]t\s+(?:the\s+)?(?:right|correct|answer))\s+{_WRONG}"
    r"|isn['’]t\s+(?:(?:the|an?)\s+)?(?:\w+\s+)?(?:right|correct|answer|valid|solution|possible)\b"
    r"|(?:does\s+not|doesn['’]t|cannot|can['’]t|can\s+not|won['’]t|will\s+not)\s+(?:work|be|fit|hold|satisfy)\b"
    r"|では(?:な|あり)|じゃない|[은는이가]?\s*아니|不对|是错"
    rf"|[^.\d\n]{{0,20}}[,;.]\s*(?:but|which|and|however,?)?\s*(?:that|this|it)?\s*(?:['’]s|\bis|\bwas)\s+{_WRONG})",
    re.IGNORECASE,
)
"""Behind a number: it is said to be wrong."""
_CONTRAST = re.compile(
    r"(?i)(?:\s*[,;(\u2013\u2014]\s*(?:and\s+|but\s+)?not|\s(?:and\s+not|rather\s+than|instead\s+of|as\s+opposed\s+to))"
    r"\s[^,;.()\n]{1,40}(?:\.\d+)?[).\s]*$"
    r"|\s*\((?:not|rather\s+than|instead\s+of)\s[^()\n]{1,60}\)[.\s]*$",
)
"""`, not 6` behind an answer."""
_CHECKS = r"(?:(?:sanity|double)[\s-]*)?(?:check|checking|verify|verifying|verification|proof)"
_CHECK = re.compile(
    rf"\W*(?:(?:let\s*(?:me|us|['’]s)|we|to)\s+)?(?:{_CHECKS})\b[^:\d]{{0,20}}:", re.IGNORECASE
)
_CHECK_BEHIND = re.compile(
    rf"(?<=[.;!?)\d])\s+\(?(?:(?:let\s*(?:me|us|['’]s)|we|to)\s+)?(?:{_CHECKS})\b[^:\d]{{0,20}}:.*$"
    r"|(?<=\S)\s+\([\d\s+\-*/×÷.,$]+=[\d\s+\-*/×÷.,=$]+\)\W*$",
    re.IGNORECASE | re.DOTALL,
)


def without_checks(lines: list[str]) -> list[str]:
    """The lines that are no check of an answer; all of them, if there is no other. A line that announces a
    check and ends has it in the next line."""
    kept, announced = list[str](), False
    for line in lines:
        is_check = announced or _CHECK.match(line) is not None
        announced = not announced and is_check and not line[line.find(":") :].strip(" :*_")
        if not is_check:
            kept.append(line)
    return kept or lines


def without_contrast(phrase: str) -> str:
    """`5` of `5, not 6` and of `5. Check: 2 + 3 = 5`; the phrase, if nothing else is in it."""
    for pattern in (_CHECK_BEHIND, _CONTRAST):
        phrase = pattern.sub("", phrase, count=1).strip() or phrase
    return phrase


def is_denied(text: str, start: int, end: int) -> bool:
    """Whether the text says that what it has there is not so."""
    before = re.sub(r"[$*`]|\\[(\[]", " ", text[max(0, start - LOOKED_AT) : start])
    behind = re.sub(r"[$*`]|\\[)\]]", " ", text[end : end + LOOKED_AT])
    return _DENIED.search(before) is not None or _REFUTED.match(behind) is not None
