"""What a line of prose says to be so: not what it denies, and not the check behind an answer. Pure."""

from __future__ import annotations

import re

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
    r"(?:\s*[,;(\u2013\u2014]\s*(?:and\s+|but\s+)?not|\s(?:and\s+not|rather\s+than|instead\s+of|as\s+opposed\s+to))"
    r"\s[^,;.()\n]{1,40}(?:\.\d+)?[).\s]*$"
    r"|\s*\((?:not|rather\s+than|instead\s+of)\s[^()\n]{1,60}\)[.\s]*$",
    re.IGNORECASE,
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
