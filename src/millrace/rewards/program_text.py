"""The program in a completion: which part of the text is to be run.

Fences (of backticks or tildes) and tags such as <answer> cut a completion into parts. The program is the last
part that defines the function that the tests call. Without such a part, or without a function, it is the last
part that looks like Python. A part between tags comes before others, a block that is marked as Python before
others, one that reads input and does something with it before one that does not, and a part in a fence before
plain text. Other blocks come before the program if they define what it uses and lacks. Of plain text, the
words before and behind a program are left out. What the model wrote is searched here, and never parsed: this
process judges it.
"""

from __future__ import annotations

import builtins
import re
import textwrap
from dataclasses import dataclass, field

NESTED = 4
"""A fence that is so much deeper than the fence before it belongs to the text, as in Markdown."""
_MARKS = " \t>"
"""What may stand before a fence: space, and the marks of a quotation."""
_TAGS = r"(?:final_?)?(?:answer|solution|code|python|program)|pre|artifact|file"
_MARKED = "python|begin|code|solution|answer"
_OPENING = re.compile(rf"\s*(?:(?:<(?:{_TAGS})(?:\s[^<>]*)?>|\[(?:{_MARKED})\])\s*)+", re.IGNORECASE)
_CLOSING = re.compile(rf"(?:(?:</(?:{_TAGS})>|\[/(?:{_MARKED})\])\s*)+$", re.IGNORECASE)
_THINK = "<think>"
_THOUGHT = re.compile(r"(?<!['\"`])</think>(?!['\"\\{]|`(?!``))", re.IGNORECASE)
TAGS_MAX = 100
"""Characters of closing tags in a line."""
_TEXT = ("markdown", "md")
"""A fence around text, in which fences have their own meaning."""
_LANGUAGE = re.compile(r"[^A-Za-z]*([A-Za-z][\w+#]*)")
_PYTHON = re.compile(r"i?py(thon)?\d*", re.IGNORECASE)
_STATEMENT = re.compile(
    r"[ \t]*(?:(?:import|from|def|class|async|for|while|if|try|with)\b.*[\w:)]$"
    r"|@\w|[\w.\[\], *()]{1,200}[-+*/%|&^<>]{0,2}=(?!=)|[\w.]{1,200}\()",
)
_PROSE = re.compile(
    r"(?!.*(?:\"\"\"|'''))(?:[iI]?[pP](?:y|ython|YTHON)[\d.]*$|[A-Z][\w'’]*(?:[,!.]? [A-Za-z`]|[!,.:]$)"
    r"|[-*•] |\d+[.)] |#{2,} |\*\*[A-Z`]|[^\x00-\x7f].*[。：，！？:.!?]$"
    r"|</?[A-Za-z|][^<>]*>$|\[/?[A-Z]+\]$|(?:[-=_]{3}|\*\*\*).*$)",
    re.ASCII,
)
"""The beginning of a line that is no Python: words, a point of a list, a heading, the language of a fence, a
tag, a token of a chat, a rule."""


_DEFINITION = re.compile(
    r"^(?P<indent>[ \t]*)(?:(?:async[ \t]+)?(?:def|class)[ \t]+(?P<name>\w+)"
    r"|(?P<value>\w+)[ \t]*=(?!=)[ \t]*(?P<function>lambda)?"
    r"|(?:from[ \t]+[\w.]+[ \t]+)?import[ \t]+(?P<imports>\w[^#\n]*))",
    re.MULTILINE,
)
_USE = re.compile(r"(?<![\w.])([A-Za-z_]\w*)(?=[ \t]*[.(])|(?<![\w.])([A-Z][A-Z\d_]+)\b")
"""A name that is called, or has an attribute that is asked for; a constant."""
_READS = re.compile(r"\binput\(|\bstdin\b|\bopen\(0\b|\bread\(0\b|\bfileinput\b")
_ACTS = re.compile(r"^(?:[A-Za-z_]\w*\(|(?:if|for|while|try|with|print)\b)", re.MULTILINE)


@dataclass(frozen=True)
class _Fence:
    """A line with a fence. `lead` is what stands before the fence, `info` what stands behind it."""

    indent: int
    lead: str
    run: str
    info: str

    @property
    def language(self) -> str:
        found = _LANGUAGE.match(self.info)
        return found[1] if found else self.info

    @property
    def is_python(self) -> bool:
        return _PYTHON.fullmatch(self.language) is not None


@dataclass
class _Part:
    """A part of a completion. `fence` opens it; None: plain text. `is_answer`: it is between tags."""

    fence: _Fence | None = None
    is_answer: bool = False
    lines: list[str] = field(default_factory=list)
    has_statement: bool = False

    def add(self, line: str) -> None:
        self.lines.append(line)
        self.has_statement = self.has_statement or _STATEMENT.match(line) is not None

    @property
    def text(self) -> str:
        indent = self.fence.indent if self.fence else 0
        lines = [line[min(indent, len(line) - len(line.lstrip(_MARKS))) :] for line in self.lines]
        return "".join(f"{line}\n" for line in _without_prose(lines))

    @property
    def may_be_python(self) -> bool:
        return self.fence is None or self.fence.is_python or not self.fence.info

    @property
    def rank(self) -> tuple[bool, bool, bool]:
        return self.is_answer, self.may_be_python, self.fence is not None

    @property
    def is_marked(self) -> bool:
        """Whether it is a block of Python that is more than comments."""
        is_code = any(line.strip(_MARKS) and not line.lstrip(_MARKS).startswith("#") for line in self.lines)
        return self.fence is not None and self.fence.is_python and is_code

    @property
    def is_complete(self) -> bool:
        """Whether it reads input, and does so without being called."""
        return _READS.search(self.text) is not None and _ACTS.search(self.text) is not None

    def defines(self, function: str) -> bool:
        name = re.escape(function)
        pattern = (
            rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{name}\b|^{name}[ \t]*(?::[^\n=]*)?=|^class[ \t]+{name}\b"
        )
        return re.search(pattern, self.text, re.MULTILINE) is not None

    def looks_like_python(self) -> bool:
        return self.is_marked or (self.may_be_python and self.has_statement)


def program_of(completion: str, function: str | None = None) -> str:
    """The program in a completion (see above); all of the completion where it has one part alone.

    The thinking is left out: thinking that does not end is no program. A block that is not closed ends
    with the completion. A lone fence without a language may close a block that the prompt has opened. A
    block in another language than Python is run only if it defines `function`.
    """
    scan = _Scan()
    for line in completion.split("\n"):
        scan.take(line)
    if not scan.has_thought and completion.lstrip().lower().startswith(_THINK):
        return ""
    if len(scan.parts) == 1 and not scan.has_thought and scan.parts[0].fence is None:
        whole = scan.parts[0]
        text = _flush(whole.text) if function and whole.defines(function) else whole.text
        return text if whole.has_statement and text.strip() != completion.strip() else completion
    parts = sorted((part for part in scan.parts if part.text.strip()), key=lambda part: part.rank)
    defining = [part for part in parts if function and part.defines(function)]
    written = [part for part in parts if part.looks_like_python()]
    written.sort(key=lambda part: (part.is_answer, part.is_marked, function is None and part.is_complete))
    found = defining or written or parts
    text = _with_what_it_lacks(found[-1], scan.parts) if found else ""
    return _flush(text) if defining else text


def _flush(text: str) -> str:
    """A program without the indent that all its lines have. Else an indented text goes on in a function."""
    return textwrap.dedent(text) if text[:1].isspace() else text


def _with_what_it_lacks(program: _Part, parts: list[_Part]) -> str:
    """The program, behind the blocks that define what it uses and does not define. A block behind it is a use
    of it, unless it has definitions alone."""
    texts, is_behind = [program.text], True
    lacks = _used(program.text) - _defined(program.text, inside=True)
    for part in reversed(parts):
        is_behind = is_behind and part is not program
        if part is program or part.fence is None or not part.may_be_python or part.is_complete:
            continue
        block = part.text
        if not lacks & _defined(block) or (is_behind and _ACTS.search(block)):
            continue
        texts.append(block)
        lacks = (lacks | _used(block)) - _defined(block, inside=True)
    return "".join(reversed(texts))


def _used(text: str) -> set[str]:
    return {name for pair in _USE.findall(text) for name in pair} - {*dir(builtins), ""}


def _defined(text: str, *, inside: bool = False) -> set[str]:
    """The names that functions, classes, imports and constants have; `inside`: those in functions too, and of
    all variables."""
    names = set[str]()
    for found in _DEFINITION.finditer(text):
        is_constant = found["value"] is None or found["value"].isupper() or found["function"]
        if inside or (is_constant and not found["indent"]):
            each = (found["imports"] or found["name"] or found["value"]).split(",")
            names |= {one.split()[-1].strip("()").partition(".")[0] for one in each if one.strip("() ")}
    return names


def _without_prose(lines: list[str]) -> list[str]:
    """Plain text without the words before and behind a program."""
    is_left_out = [
        not line.strip() or (_PROSE.match(line.rstrip()) is not None and not _STATEMENT.match(line))
        for line in lines
    ]
    kept = [place for place, is_out in enumerate(is_left_out) if not is_out]
    return lines[kept[0] : kept[-1] + 1] if kept else []


class _Scan:
    """The parts of a completion, which is taken line by line."""

    def __init__(self) -> None:
        self.parts, self.has_thought = [_Part()], False

    def take(self, line: str) -> None:
        part = self.parts[-1]
        if (thought := self._thought(line, part)) is not None:
            self.parts, self.has_thought = [_Part()], True
            line, part = thought, self.parts[-1]
        if part.fence is None and (tag := _OPENING.match(line)):
            self.parts.append(part := _Part(is_answer=True))
            line = line[tag.end() :]
        end = line.rstrip()[-TAGS_MAX:]
        closes = _CLOSING.search(end) if part.is_answer else None
        if closes:
            line = line.rstrip()[: closes.start() - len(end)]
        self._cut(line, part)
        if closes:
            self.parts.append(_Part())

    def _thought(self, line: str, part: _Part) -> str | None:
        """What follows the end of the thinking in this line; None: it does not end here."""
        match = None if self.has_thought else _THOUGHT.search(line)
        if match is None:
            return None
        is_whole = not line[: match.start()].strip() or not line[match.end() :].strip()
        return line[match.end() :] if part.fence is None or is_whole else None

    def _cut(self, line: str, part: _Part) -> None:
        fence = _fence_in(line)
        if fence is not None and part.fence is None and fence.language.lower() in _TEXT:
            return
        if fence is None or not _counts(fence, part):
            return part.add(line)
        if fence.lead.strip(_MARKS):
            part.add(fence.lead)
        opens = part.fence is None or bool(fence.info)
        self.parts.append(_Part(fence if opens else None, part.is_answer))


def _fence_in(line: str) -> _Fence | None:
    body = line.lstrip(_MARKS)
    at = 0 if body.startswith("~~~") else body.find("```")
    if at < 0:
        return None
    rest = body[at:]
    info = rest.lstrip(rest[0])
    if "`" in info:  # a code in one line
        return None
    indent = len(line) - len(body)
    return _Fence(indent, line[: indent + at], rest[: len(rest) - len(info)], info.strip())


def _counts(fence: _Fence, part: _Part) -> bool:
    """Whether a fence opens a block, or closes the one of `part`. A fence in a text of a program does
    neither."""
    block, has_lead = part.fence, bool(fence.lead.strip(_MARKS))
    if block is None:
        return fence.is_python if has_lead else fence.indent < NESTED or not part.has_statement
    if fence.run[0] != block.run[0] or len(fence.run) < len(block.run):
        return False
    if has_lead:  # `return x` and the fence in one line
        return not fence.info and not set(fence.lead) & set("'\"#")
    return fence.indent < block.indent + NESTED
