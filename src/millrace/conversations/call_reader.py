"""The parts of a turn: its reasoning, its content, and its calls of the tools on offer."""

from __future__ import annotations

import re
from typing import NamedTuple

from millrace.conversations.grammars import (
    BareJsonCalls,
    Grammar,
    JsonCalls,
    PythonCalls,
    Schemas,
    python_call,
)
from millrace.conversations.tool_calls import (
    LINE_CHARACTERS_MAX,
    Calls,
    Malformed,
    ToolCall,
    TurnParts,
    TurnText,
)

BEGINS_OF_THINKING = (
    r"<think>|\[THINK\]|<seed:think>|<\|START_THINKING\|>|◁think▷|<\|channel>thought"
    "|Here are my reasoning steps:"
)
BEGIN_OF_THINKING = re.compile(rf"\s*({BEGINS_OF_THINKING})")
END_OF_THINKING = re.compile(
    r"</think>|\[/THINK\]|</seed:think>|<\|END_THINKING\|>|◁/think▷|<channel\|>|\[BEGIN FINAL RESPONSE\]"
)
BARE_MAX = 100
"""A call without an opening mark begins at one of so many lines."""
_LINE = re.compile(r"\s*([A-Za-z_]\w*)(\(.*)")


class CallForm(NamedTuple):
    """`section`, `opens`, `closes`, `ends`: patterns, before the first call, before and behind each, and
    behind the last. An empty `opens`: a call begins a line."""

    grammar: Grammar
    opens: str = ""
    closes: str = ""
    section: str = ""
    ends: str = ""

    def find(self, text: str, tools: Schemas) -> list[tuple[int, int, Calls]]:
        """Where calls begin and end, and the calls."""
        found, at = list[tuple[int, int, Calls]](), 0
        opens = re.compile(self._begin(), re.MULTILINE)
        skipped = re.compile(rf"(?:\s*(?:{self.closes}))?(?:\s*(?:{self.ends}))?")
        tried = 0
        while (begin := opens.search(text, at)) and tried < BARE_MAX:
            tried += not self.opens
            read = self.grammar.read(text, begin.end(), tools)
            if read is None:
                at = max(begin.end(), begin.start() + 1)
                continue
            stop = max(read.stop, begin.end())
            if isinstance(read.calls[-1], Malformed):  # it ends where it is closed
                closed = re.compile(self.closes).search(text, stop) if self.closes else None
                again = opens.search(text, stop) if self.opens else None
                stop = min(
                    (one.end() if one is closed else one.start() for one in (closed, again) if one),
                    default=len(text),
                )
            skip = skipped.match(text, stop)
            at = max(skip.end() if skip else stop, begin.start() + 1)
            found.append((begin.start(), at, tuple(read.calls)))
        return found if self.opens else _at_end(found, text)

    def _begin(self) -> str:
        if not self.opens:
            return r"^[ \t]*(?=[\w{\[])"
        return rf"(?:(?:{self.section})\s*)?(?:{self.opens})" if self.section else f"(?:{self.opens})"


def _at_end(found: list[tuple[int, int, Calls]], text: str) -> list[tuple[int, int, Calls]]:
    """Those with nothing but calls behind them: without a mark, others are part of an answer."""
    first, begin = len(found), len(text)
    while first and not text[found[first - 1][1] : begin].strip():
        first -= 1
        begin = found[first][0]
    return found[first:]


MARKS = "<tool_call>", "<|tool_call|>", "[TOOL_CALLS]", "functools[", "<|tool_call_start|>"
KNOWN_MARKS = CallForm(
    JsonCalls(),
    opens=r"<tool_call>|<\|tool_call\|>|\[TOOL_CALLS\]|functools(?=\[)",
    closes=r"</tool_call>|<\|/tool_call\|>",
)
"""Of a template that writes no calls: the marks that families tell their models in texts."""


class CallReader:
    """Reads the turns of one model.

    Args:
        form: how calls are written; None: the template writes none, so the known marks count, and bare JSON.
        plain: calls may also be lines `name(1, b="text")`, because nothing shows tools to the model.
        is_opened: the prompt of a turn ends with the begin of thinking.
    """

    def __init__(self, form: CallForm | None = None, *, plain: bool = False, is_opened: bool = False) -> None:
        self._forms = DEFAULT_FORMS if form is None else (form,)
        self._plain, self._is_opened = plain, is_opened

    def read(self, text: str, tools: Schemas, *, is_cut: bool = False) -> TurnParts:
        """`tools`: those on offer; without them there are no calls. `is_cut`: the turn has ended by its
        length, so thinking without an end goes on to there."""
        if isinstance(text, TurnText) and text.parts is not None:
            return text.parts if tools else TurnParts(text.parts.reasoning, text.parts.content)
        reasoning, rest = self._thought(str(text), tools, is_cut)
        thought, marked = self._thought(getattr(text, "marked", str(text)), tools, is_cut)
        if thought and not reasoning and thought in rest:  # its marks are special tokens
            reasoning, rest = thought, rest.partition(thought)[2].strip()
        firsts = list[tuple[int, str, Calls]]()
        for form in self._forms if tools else ():
            of_form = marked if form.opens else rest
            if found := form.find(of_form, tools):
                calls = tuple(call for _, _, several in found for call in several)
                firsts.append((found[0][0], of_form, calls))
        if firsts:
            start, of_form, calls = min(firsts, key=lambda one: one[0])
            return TurnParts(reasoning, self._before(of_form[:start], rest), calls)
        calls = tuple(plain_calls(rest, tools)) if self._plain and tools else ()
        return TurnParts(reasoning, rest, calls)

    def _before(self, begin: str, rest: str) -> str:
        """The text before the first call, without special tokens."""
        shared = 0
        while shared < min(len(begin), len(rest)) and begin[shared] == rest[shared]:
            shared += 1
        return rest[:shared].strip() if begin.strip() else ""

    def _thought(self, text: str, tools: Schemas, is_cut: bool) -> tuple[str, str]:
        """(reasoning, the rest). An end of thinking in an argument of a call is text, unless the turn began
        with thinking."""
        begin = BEGIN_OF_THINKING.match(text)
        after = begin.end() if begin else 0
        calls = list[tuple[int, int]]()
        if begin is None and not self._is_opened and tools:
            calls = [
                (start, stop)
                for form in self._forms
                for start, stop, several in form.find(text, tools)
                if all(isinstance(one, ToolCall) for one in several)
            ]
        for end in END_OF_THINKING.finditer(text, after):
            if not any(start <= end.start() < stop for start, stop in calls):
                return text[after : end.start()].strip(), text[end.end() :].strip()
        return (text[after:].strip(), "") if begin or (is_cut and self._is_opened) else ("", text)


def plain_calls(text: str, tools: Schemas) -> list[ToolCall | Malformed]:
    """Each line `name(1, b="text")` with the name of a tool; or a text that is one such line."""
    lines, calls = text.strip().splitlines(), list[ToolCall | Malformed]()
    for line in lines:
        match = _LINE.match(line[:LINE_CHARACTERS_MAX])
        if match is None:
            continue
        call = python_call(match[1], match[2].strip())
        if len(line) > LINE_CHARACTERS_MAX:
            call = Malformed(f"a call is one line of at most {LINE_CHARACTERS_MAX:,} characters")
        if match[1] in tools or (len(lines) == 1 and isinstance(call, ToolCall)):
            calls.append(call)
    return calls


LFM2 = CallForm(PythonCalls(), opens=r"<\|tool_call_start\|>", closes=r"<\|tool_call_end\|>")
DEFAULT_FORMS = KNOWN_MARKS, LFM2, CallForm(BareJsonCalls())
"""Of a template that writes no calls."""
