"""Learns how a family writes calls of tools from what its chat template writes.

A known conversation with known calls is rendered. Where names, keys and values stand says what stands between
them. The learnt form must read the rendered calls, else the template is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import product, takewhile
from typing import Any, NamedTuple

from millrace.conversations.call_reader import BEGINS_OF_THINKING, END_OF_THINKING, CallForm
from millrace.conversations.grammars import (
    BareJsonCalls,
    BracedCalls,
    Grammar,
    JsonCalls,
    NamedCalls,
    PythonCalls,
    TaggedCalls,
    is_harmony,
    literal,
)
from millrace.conversations.tool_calls import ToolCall
from millrace.core.errors import ConfigError

_ASK, _SAY, _ID = "xbeginx", "xreplyx", "xcall0xxx"
_EMPTY = re.compile(r"<\|(\w+)_start\|><\|\1_end\|>")
"""Marks around the text of a message, if it has none."""
_CALLS = (
    ("xfirstx", {"xkeyax": "xvalax", "xkeybx": 40719}),
    ("xsecondx", {"xkeycx": "xvalcx", "xkeydx": 40729}),
)
PROBE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "x",
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": "string" if isinstance(value, str) else "integer", "description": "x"}
                    for key, value in arguments.items()
                },
                "required": list(arguments),
            },
        },
    }
    for name, arguments in _CALLS
]
_SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] for one in PROBE_TOOLS}  # type: ignore[index]
Render = Callable[..., str]
"""`render(messages, prompt=..., tools=...)`. It raises what the template raises."""


class CallStyle(NamedTuple):
    """`form`: None: the template writes no calls. `shows_tools`: it writes the tools on offer. `as_text`:
    it takes arguments as JSON text. `named_ids`: it writes ids `functions.NAME:0` in place of names.
    `opens_thinking`: a prompt ends with the begin of thinking. `by_marks`: the template shows tools and
    writes no calls, so the marks count that families tell their models."""

    form: CallForm | None
    shows_tools: bool
    as_text: bool = False
    named_ids: bool = False
    opens_thinking: bool = False
    by_marks: bool = False


NO_STYLE = CallStyle(None, False)
"""Of prompts without a chat template."""


class _Probe(NamedTuple):
    """What a template wrote behind the head of the assistant's message."""

    text: str
    end: str
    num_calls: int


def learn_style(render: Render) -> CallStyle:
    """Raises: ConfigError: the template writes calls in a form that cannot be read, or fails on calls."""
    shows, opens = _shows_tools(render), _opens_thinking(render)
    if not shows:
        return CallStyle(None, False, _wants_text(render), opens_thinking=opens)
    written, num_rendered, failure, several = "", 0, Exception(), False
    for as_text, named_ids, count, results in product((False, True), (False, True), (2, 1), (False, True)):
        if several and count == 1:  # a form that reads the first of two calls alone
            continue
        try:
            text = _rendered(render, count, as_text=as_text, named_ids=named_ids, results=results)
        except Exception as error:  # a template is a program
            failure = error
            continue
        num_rendered += 1
        if _CALLS[0][0] not in text.rpartition(_ASK)[2]:
            continue
        probe = _behind_head(render, text, count)
        written = written or probe.text
        form = _form(probe)
        if form is not None and _reads(form, probe):
            return CallStyle(form, True, as_text, named_ids, opens)
        several = several or (count == 2 and _CALLS[1][0] in probe.text)
    if not num_rendered:
        raise ConfigError(
            "the chat template of the model (`model.path`) shows tools, and fails on messages with calls of "
            f"tools: {failure}\n  Use another chat template (chat_template.jinja in the model's directory)."
        )
    if not written:
        return CallStyle(None, True, opens_thinking=opens, by_marks=True)
    raise ConfigError(
        f"the chat template of the model (`model.path`) writes calls of tools as {written[:200]!r}: this "
        "form cannot be read, so no call of the model would run\n"
        "  Use a chat template that writes calls as JSON, as a name and JSON, with a tag around each "
        "argument, or as Python (chat_template.jinja in the model's directory). See docs/turns.md."
    )


def _shows_tools(render: Render) -> bool:
    """Some templates show them in the system prompt alone."""
    asked = {"role": "user", "content": _ASK}
    for messages in ([asked], [{"role": "system", "content": _SAY}, asked]):
        with suppress(Exception):  # a template is a program
            if _CALLS[0][0] in render(messages, prompt=True, tools=PROBE_TOOLS):
                return True
    return False


def _opens_thinking(render: Render) -> bool:
    try:
        prompt = render([{"role": "user", "content": _ASK}], prompt=True).rpartition(_ASK)[2]
    except Exception:
        return False
    return bool(re.search(rf"(?:{BEGINS_OF_THINKING})\s*$", prompt))


def _rendered(render: Render, count: int, *, as_text: bool, named_ids: bool, results: bool) -> str:
    """A conversation that ends with calls, or with their results. It raises what the template raises."""
    calls, answers = [], []
    for number, (name, arguments) in enumerate(_CALLS[:count]):
        given: Any = json.dumps(arguments) if as_text else dict(arguments)
        call_id = f"functions.{name}:{number}" if named_ids else f"xcall{number}xxx"
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": given}})
        answers.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": "xresultx"})
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": _ASK},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    return render([*messages, *(answers if results else ())], prompt=False, tools=PROBE_TOOLS)


def _wants_text(render: Render) -> bool:
    """Whether the template takes arguments of calls as text alone."""
    for as_text in (False, True):
        with suppress(Exception):  # a template is a program
            _rendered(render, 1, as_text=as_text, named_ids=False, results=True)
            return as_text
    return False


def _behind_head(render: Render, text: str, count: int) -> _Probe:
    """Without what the template writes around each message of the assistant, and without thinking."""
    body, asked, reply, prompt = text.rpartition(_ASK)[2], {"role": "user", "content": _ASK}, "", ""
    with suppress(Exception):
        prompt = render([asked], prompt=True, tools=PROBE_TOOLS).rpartition(_ASK)[2].rstrip()
        messages = [asked, {"role": "assistant", "content": _SAY}]
        reply = render(messages, prompt=False, tools=PROBE_TOOLS).rpartition(_ASK)[2]
    head, _, end = reply.partition(_SAY)
    shared = _to_boundary(_shared_begin(head, body))
    shared = max([one for one in (prompt, head.rstrip()) if body.startswith(one)] or [shared], key=len)
    body = _EMPTY.sub("", re.sub(r"xcall\dxxx", _ID, body[len(shared) :]))
    begin = body[: body.index(_CALLS[0][0])]
    thought = [found.end() for found in END_OF_THINKING.finditer(begin)]
    body = body[max(thought, default=0) :]
    body = body.partition("xresultx")[0]
    if end.strip() and end.strip() in body:
        body = body[: body.rindex(end.strip())] if "xresultx" not in text else body.partition(end.strip())[0]
    return _Probe(body, end, count)


def _to_boundary(text: str) -> str:
    """Without a mark at the end that is not whole."""
    at = max(text.rfind("<"), text.rfind("["))
    return text if at < 0 or re.search(r"[>\]]", text[at:]) else text[:at]


class _Core(NamedTuple):
    """Where a call stands, from its name or its first bracket on, to the end of its last value."""

    start: int
    stop: int
    grammar: Grammar | None


def _form(probe: _Probe) -> CallForm | None:
    cores, at = list[_Core](), 0
    for name, arguments in _CALLS[: probe.num_calls]:
        core = _core(probe.text, at, name, arguments)
        if core is None:
            return None
        cores.append(core)
        at = core.stop
    first, last, text = cores[0], cores[-1], probe.text
    opening, ending = text[: first.start], text[last.stop :]
    if probe.num_calls == 2:
        between = text[first.stop : last.start]
        opens = _shared_end(opening, between)
        closes = between[: len(between) - len(opens)]
        section = opening[: len(opening) - len(opens)]
    else:
        opens, closes, section = opening, ending, ""
    if not _mark(opens):
        opens, section = section, ""
    ends = ending.strip().removeprefix(closes.strip())
    grammar = first.grammar
    if not _mark(opens):
        grammar = _bare(grammar)
    if grammar is None:
        return None
    if isinstance(grammar, TaggedCalls):
        block, opens = _block(_mark(opens))
        section += block
        grammar, closes = _closed(grammar, closes, ending, opens if block else "")
    return CallForm(
        grammar,
        *(_pattern(one) for one in (_mark(opens), closes.strip(), section.strip(), ends.strip())),
    )


def _pattern(text: str) -> str:
    """Each call has an id of its own."""
    return literal(text).replace(_ID, r"[\w\-.:]*")


def _mark(opens: str) -> str:
    """What opens a call. A bracket at its end begins a list."""
    return opens.strip().rstrip("[ \n").strip()


def _bare(grammar: Grammar | None) -> Grammar | None:
    match grammar:
        case JsonCalls() if grammar.name:
            return BareJsonCalls(grammar)
        case NamedCalls() | PythonCalls():
            return grammar._replace(bare=True)
    return None


def _block(opens: str) -> tuple[str, str]:
    """The mark of a block of calls, if a call has a mark of its own behind it. Models leave a block out, or
    write several calls into it."""
    found = re.fullmatch(r"(<[^<>]+>)\s*(<[^<>]+)", opens)
    return (found[1], found[2]) if found else ("", opens)


def _closed(grammar: TaggedCalls, closes: str, ending: str, opens: str) -> tuple[TaggedCalls, str]:
    """What stands behind the last argument ends the call. `behind_value` begins it. `opens`: of a call in a
    block, which ends it too."""
    end = closes if closes.strip() else ending
    plain = re.sub(r"\\(.)", r"\1", grammar.behind_value.replace(r"\s*", ""))
    rest = end.strip().removeprefix(plain).strip()
    found = re.fullmatch(r"(</[^<>]+>)\s*(</[^<>]+>)", rest)
    if not opens or not found:
        return grammar._replace(end=literal(rest)), ""
    behind = rf"(?=\s*(?:{literal(found[2])}|{literal(opens)}|$))"
    return grammar._replace(end=literal(found[1]) + behind), found[2]


def _shared_begin(one: str, other: str) -> str:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(character for character, _ in pairs)


def _shared_end(one: str, other: str) -> str:
    """What both end with, from the begin of a mark on."""
    shared = _shared_begin(one[::-1], other[::-1])[::-1]
    at = min((at for at in (shared.find("<"), shared.find("[")) if at >= 0), default=-1)
    if at >= 0:
        return shared[at:]
    return shared if shared == one else ""


def _core(text: str, at: int, name: str, arguments: Mapping[str, Any]) -> _Core | None:
    named = text.find(name, at)
    if named < 0:
        return None
    for start, value, stop in _objects(text, at):
        if value == {name: arguments}:
            return _Core(start, stop, JsonCalls((), ()))
        paths = _paths(value, name), _paths(value, arguments)
        if all(paths):
            return _Core(start, stop, JsonCalls(paths[0][0], paths[1][0]))
        if value == arguments and named < start:
            between = _pattern(re.sub(r"\d+", "0", text[named + len(name) : start])).replace("0", r"\d+")
            return _Core(named, stop, NamedCalls(between))
    return _by_argument(text, named, name, arguments)


def _objects(text: str, at: int) -> Iterator[tuple[int, Any, int]]:
    """The tables of JSON in a text from a place on, the outer ones alone."""
    decoder = json.JSONDecoder()
    while (at := text.find("{", at)) >= 0:
        try:
            value, stop = decoder.raw_decode(text, at)
        except ValueError:
            at += 1
            continue
        yield at, value, stop
        at = stop


def _paths(value: Any, wanted: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The keys that lead to a value of a table. Arguments may be a text of JSON."""
    if not isinstance(value, dict):
        return []
    found = list[tuple[str, ...]]()
    for key, inner in value.items():
        same = inner == wanted
        if isinstance(wanted, dict) and isinstance(inner, str):
            try:
                same = json.loads(inner) == wanted
            except ValueError:
                same = False
        found += [(*path, key)] if same else _paths(inner, wanted, (*path, key))
    return found


def _by_argument(text: str, named: int, name: str, arguments: Mapping[str, Any]) -> _Core | None:
    """Each argument has marks of its own."""
    places, at = [], named + len(name)
    for key, value in arguments.items():
        begin = text.find(key, at)
        found = text.find(str(value), begin + len(key))
        if begin < 0 or found < 0:
            return None
        places.append((text[at:begin], text[begin + len(key) : found]))
        at = found + len(str(value))
    (before, value_1), (between, value_2) = places
    if before.strip() == "(" and value_1.strip().startswith("="):
        return _Core(named, _closing(text, named + len(name)), PythonCalls())
    if before.strip() == "{" and value_1.strip()[:1] == ":" and value_2.strip() in (":", value_1.strip()):
        return _Core(named, _closing(text, named + len(name)), BracedCalls(value_1.strip()[1:]))
    before_key = _shared_end(before, between)
    if not before_key.strip():
        return None
    behind_value = between[: len(between) - len(before_key)]
    of_text, other = (literal(one.strip()) for one in (value_1, value_2))
    values = other if of_text == other else f"(?P<text>{of_text})|{other}"
    grammar = TaggedCalls(
        literal(before[: len(before) - len(before_key)].strip()),
        literal(before_key.strip()),
        values,
        literal(behind_value.strip()),
        "",
        value_1.endswith("\n"),
    )
    return _Core(named, at, grammar) if behind_value.strip() else None


def _closing(text: str, at: int) -> int:
    """Behind the bracket of a call; the known values have none."""
    return re.compile(r"[)}]").search(text, at).end()  # type: ignore[union-attr]


def _reads(form: CallForm, probe: _Probe) -> bool:
    calls = [call for _, _, several in form.find(probe.text, _SCHEMAS) for call in several]
    wanted = [ToolCall(name, arguments) for name, arguments in _CALLS[: probe.num_calls]]
    as_texts = [
        ToolCall(name, {key: str(value) for key, value in arguments.items()}) for name, arguments in _CALLS
    ]
    return calls in (wanted, as_texts[: probe.num_calls])


def style_of(tokenizer: Any, arguments: Mapping[str, Any], *, refuses: bool = True) -> CallStyle:
    """The style of a tokenizer's chat template with these arguments. Without `refuses`, a form that cannot be
    read is none. Raises: ConfigError: as `learn_style`."""
    if not getattr(tokenizer, "chat_template", None):
        return NO_STYLE
    if is_harmony(tokenizer):  # whose turns are read from their ids
        return CallStyle(None, True)
    style = _learnt(tokenizer, str(tokenizer.chat_template), tuple(sorted(arguments.items())))
    if isinstance(style, CallStyle):
        return style
    if refuses:
        raise ConfigError(style)
    return CallStyle(None, True)


@lru_cache(maxsize=8)
def _learnt(tokenizer: Any, template: str, arguments: tuple[tuple[str, Any], ...]) -> CallStyle | str:
    """The style, or why there is none."""

    def render(messages: Any, *, prompt: bool, tools: Any = None) -> str:
        options = {**dict(arguments), **({"tools": tools} if tools else {})}
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, **options
        )
        return str(rendered)

    try:
        return learn_style(render)
    except ConfigError as error:
        return str(error)
