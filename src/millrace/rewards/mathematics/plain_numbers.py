"""Numbers as people write them. Pure: no library reads the text.

A plain number is evaluated: `7 + 5`, `24/2` and `2^10` are none, because a question repeats them. The value
is exact.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

EXPONENT_MAX, DIGITS_MAX = 400, 1000
ROUNDED = 6
"""With so many decimals or more, a number may be the rounded form of the other."""

_SPACES = re.compile(r"(?<!\\)\\[!,;: ]|\\q?quad\b|~|[\u00a0\u2000-\u200a\u202f\u3000]")
_LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|tiny|small|normalsize|[lL]arge|LARGE|[hH]uge|bf|rm|it)\b\s*"
    r"|\\(?:color|textcolor|phantom|label)\s*(?:\[\w+\])?\s*\{[^{}]*\}\s*"
)
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e\u2189]")
_FRACTION = re.compile(
    r"\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d))|(\d+)\s*/\s*(\d+)"
)
_GROUPED = r"\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+"
DECIMAL = rf"(?:(?:{_GROUPED})(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_DECIMAL = re.compile(
    rf"({DECIMAL})\.?(?:[eE]([+-]?\d+)|\s*(?:\\times|\\cdot|×|·|\*)\s*10\s*\^\s*\{{?\s*([+-]?\d+)\s*\}}?)?"
)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?\s*(\d+)\s*\}?")
_CURRENCY = re.compile(r"(?:\\?\$|[€£¥₹]|\b(?:USD|EUR|GBP|Rs\.?)(?![A-Za-z]))\s*")
_WRAPPED = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|up|normal)?|math(?:rm|bf|it|sf|tt|normal)|mbox|operatorname|underline|ensuremath|bold(?:symbol)?|bm)"
    r"\s*\{([^{}]*)\}"
)
_LETTERS = r"(?:[^\W\d_\u0370-\u03ff]|[\u0900-\u0dff\u0e31-\u0e4eµμΩ])"
"""Of a unit, in any script, with its vowel signs. Greek letters are variables."""
_UNIT = re.compile(
    r"(?:\s*(?:/|\bper\b|\^\s*\{?\s*-?\d\s*\}?|[²³°'′″]|\^\s*\{?\s*\\circ\s*\}?|\\(?:circ|degree)|\\?cdot|[·-]|"
    rf"{_LETTERS}++\.?))*+\s*"
)
_ATTACHED = re.compile(
    r"(?:[mckdµμn]?m|[kmµμ]?g|lbs?|oz|[km]?[Ll]|[mnµμ]?s|min|hrs?|h|[kM]?W|kWh|[kM]?J|[kM]?Pa|[kMG]?Hz|k?N|[mk]?V|m?A|ft|in|mi|yd|mph|km/h"
    r"|st|nd|rd|th|°|º|\^\s*\{?\s*\\circ|\\circ|['′″])"
)  # fmt: skip
_BRACKETED = re.compile(rf"\s+\(((?:{_LETTERS}|[\s.-])+)\)\s*")
_OPERATOR = re.compile(r"\s*(?:[-·²³]|\\?cdot|\^(?!\s*\{?\s*\\circ))")
_SINGLE = frozenset("mgshLNJWVAKCF")
NO_UNITS = frozenset(
    {"or", "and", "plus", "minus", "times", "over", "divided", "to", "mod", "choose", "if", "not",
    "sqrt", "pi", "of", "is", "equals", "than", "more", "less", "squared", "cubed", "factorial"}
)  # fmt: skip
_NO_UNIT_SIGNS = re.compile("[或和至到]|以上|以下|未満|から")
_MULTIPLIERS = {
    **{"dozen": 12, "hundred": 10**2, "thousand": 10**3},
    **{"million": 10**6, "billion": 10**9, "trillion": 10**12},
    **{"百": 10**2, "千": 10**3, "万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8},
    **{"만": 10**4, "억": 10**8, "mil": 10**3, "mille": 10**3, "tausend": 10**3},
    **{"millón": 10**6, "millones": 10**6, "millionen": 10**6},
    **{"тысяч": 10**3, "тысячи": 10**3, "миллион": 10**6, "миллиона": 10**6, "миллионов": 10**6},
    **{"lakh": 10**5, "crore": 10**7, "milliard": 10**9, "milliarden": 10**9},
}  # fmt: skip
_PERCENT = re.compile(r"\s*(?:\\?%|percent\b|per cent\b|percentage points?\b)")


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """`decimals`: digits behind the point; 0 for a fraction. `is_percent`: `value` is of a hundred."""

    value: Fraction
    decimals: int = 0
    is_percent: bool = False


def same_number(one: PlainNumber, other: PlainNumber) -> bool:
    """50 % is 0.5, and 50 with the sign left out. A number with six decimals or more may be the rounded
    other."""
    if one.is_percent == other.is_percent:
        return _close(one, other)
    percent, plain = (one, other) if one.is_percent else (other, one)
    share = PlainNumber(percent.value / 100, percent.decimals + 2 * (percent.decimals > 0))
    return _close(PlainNumber(percent.value, percent.decimals), plain) or _close(share, plain)


def _close(one: PlainNumber, other: PlainNumber) -> bool:
    if one.value == other.value:
        return True
    rounded = [number.decimals for number in (one, other) if number.decimals >= ROUNDED]
    return bool(rounded) and abs(one.value - other.value) < Fraction(1, 10 ** min(rounded))


def tidy(text: str) -> str:
    """One way to write spaces, digits, signs and fractions, without commands of LaTeX that only set the
    layout."""
    text = _VULGAR.sub(
        lambda found: " " + unicodedata.normalize("NFKC", found[0]).replace("\u2044", "/"), text
    )
    text = "".join(
        str(unicodedata.decimal(one)) if not one.isascii() and one.isdecimal() else one for one in text
    )
    text = text.replace("{,}", ",").replace("\u2212", "-").replace("\\%", "%")
    text = re.sub(r"(?<!\\)\\!", "", text)
    text = _LAYOUT.sub("", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"(?<=\d)\\[!,;:](?=\d{3})", ",", text) if re.search(r"\d\\[!,;:]\d{3}", text) else text
    return _SPACES.sub(" ", text).strip()


def unwrapped_text(text: str) -> str:
    """The words in `\\text{...}` and the like without it."""
    previous = None
    while previous != text:
        previous, text = text, _WRAPPED.sub(r" \1 ", text)
    return text


def read_number(text: str) -> PlainNumber | None:
    """The plain number that the whole text is, with a currency, a percent sign or a unit around it; None: it
    is none."""
    text = tidy(text)
    if len(text) > DIGITS_MAX:
        return None
    text = _without_frame(unwrapped_text(text))
    sign, text = _sign(text)
    found = _mixed(text) or _fraction(text) or _repeating(text) or _decimal(text)
    if found is None:
        return None
    number, rest = found
    if factor := re.match(r"\s*([百千万萬亿億만억])|\s+([^\W\d_]+)", rest.lower()):
        word = factor[1] or factor[2]
        scale = _MULTIPLIERS.get(word, _MULTIPLIERS.get(word.removesuffix("s")))
        if scale is not None:
            number, rest = PlainNumber(number.value * scale), rest[factor.end() :]
    percent = _PERCENT.match(rest)
    rest = rest[percent.end() :] if percent else rest
    if not _is_unit(rest, attached=not percent):
        return None
    return PlainNumber(sign * number.value, number.decimals, bool(percent))


def _without_frame(text: str) -> str:
    """Without marks of Markdown and of formulas, the full stop, and parentheses around all of it."""
    previous = None
    while previous != text:
        previous = text
        text = text.strip().strip("`*_\"'“”").removeprefix("\\(").removesuffix("\\)").strip()
        text = re.sub(r"(?<!\\)\$$", "", text).strip()
        text = re.sub(r"(?<=[\w)}%$°])[.,;]$", "", text)
        for left, right in (("(", ")"), ("\\{", "\\}"), ("{", "}")):
            inner = text[len(left) : -len(right)]
            if text.startswith(left) and text.endswith(right) and not set(inner) & set("(){},"):
                text = inner
    return text


def _sign(text: str) -> tuple[int, str]:
    """The sign, and the text without it and without a currency on either side of it."""
    text = _CURRENCY.sub("", text, count=1) if _CURRENCY.match(text) else text
    sign = -1 if text.startswith(("-", "\u2013")) else 1
    text = text[1:].lstrip() if text[:1] in ("-", "\u2013", "+") else text
    return sign, _CURRENCY.sub("", text, count=1) if _CURRENCY.match(text) else text


def _mixed(text: str) -> tuple[PlainNumber, str] | None:
    """3 1/2"""
    whole = re.match(r"(\d+)(?:\s+(?=\d+\s*/)|\s*(?=\\frac))", text)
    part = whole and _FRACTION.match(text, whole.end())
    if not whole or not part:
        return None
    share = _ratio(part)
    return (PlainNumber(int(whole[1]) + share), text[part.end() :]) if share and 0 < share < 1 else None


def _fraction(text: str) -> tuple[PlainNumber, str] | None:
    found = _FRACTION.match(text)
    share = _ratio(found) if found else None
    if found is None or share is None or share.denominator == 1:  # a division that nobody has done
        return None
    return PlainNumber(share), text[found.end() :]


def _ratio(found: re.Match[str]) -> Fraction | None:
    top, bottom = (int(one) for one in found.groups() if one is not None)
    return Fraction(top, bottom) if bottom else None


def _repeating(text: str) -> tuple[PlainNumber, str] | None:
    """0.1\\overline{6}"""
    found = _REPEATING.match(text)
    if not found:
        return None
    start, period = found[1] + found[2], found[3]
    share = Fraction(int(start + period) - int(start or "0"), 10 ** len(found[2]) * (10 ** len(period) - 1))
    return PlainNumber(share), text[found.end() :]


def _decimal(text: str) -> tuple[PlainNumber, str] | None:
    found = _DECIMAL.match(text)
    if not found:
        return None
    digits = re.sub(r"[ ,]", "", found[1])
    exponent = int(found[2] or found[3] or 0)
    if abs(exponent) > EXPONENT_MAX:
        return None
    decimals = max(0, len(digits.partition(".")[2]) - exponent)
    return PlainNumber(Fraction(digits) * Fraction(10) ** exponent, decimals), text[found.end() :]


def _is_unit(rest: str, *, attached: bool) -> bool:
    """Whether what follows a number is a unit, or nothing. `42x` is no number, and `42 or 43` is none. A unit
    may be in parentheses: `9 (apples)`."""
    rest = _BRACKETED.sub(lambda found: " " + found[1].replace(" of ", " "), _CURRENCY.sub("", rest))
    if not rest.strip():
        return True
    if not _UNIT.fullmatch(rest) or _OPERATOR.match(rest):
        return False
    words = re.findall(rf"{_LETTERS}+", rest.replace("\\circ", "").replace("\\degree", ""))
    if NO_UNITS & {word.lower() for word in words} or (
        words and len(words[0]) == 1 and words[0] < "\u0400" and words[0] not in _SINGLE
    ):
        return False
    if _NO_UNIT_SIGNS.search(rest):
        return False
    return not attached or rest[0].isspace() or rest[0] >= "\u0400" or _ATTACHED.match(rest) is not None
