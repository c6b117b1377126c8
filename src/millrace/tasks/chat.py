"""Prompts as text: a filled template, or chat messages that the tokenizer's chat template renders.

Messages are read as data sets write them: OpenAI's `role` and `content`, with parts of text and calls of
tools; ShareGPT's `from` and `value`; nulls that Parquet adds where another row has a key.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from typing import Any

from millrace.config.tables import task as table
from millrace.conversations.call_forms import CallStyle, style_of
from millrace.conversations.conversation_text import ConversationText
from millrace.conversations.tool_calls import CALL_ID
from millrace.core.errors import DataError
from millrace.tasks.rows import Row, find_column

CALL = "function_call"
"""A role of ShareGPT, whose text is a call or a list of them; a key of OpenAI's old messages."""
ROLES = {
    "human": "user",
    "gpt": "assistant",
    CALL: "assistant",
    **dict.fromkeys(("observation", "function", "function_response"), "tool"),
}
"""Names that ShareGPT and OpenAI's old messages have for roles."""
READ = ("role", "content", "from", "value", "tool_calls", CALL)
"""The keys of a message that are written anew."""
THINKING, CALLED = ("reasoning", "thinking"), ("tool_call",)
"""Types of parts of a content that are none of its text."""
_SPEAKERS, _CONTENT = {"system", "developer", *ROLES.values()}, {"content", "value", "tool_calls"}
_BETWEEN = re.compile(r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|\}(?=\s+\{)""", re.DOTALL)
"""Strings of Python; and where NumPy writes no comma between the tables of an array."""
Message = dict[str, Any]
More = str | Sequence[Message]
"""What follows a prompt."""
Tools = Sequence[Message]
"""JSON Schemas of tools, as chat templates take them."""


def render(
    config: table.Task,
    tokenizer: Any,
    columns: Row,
    prompt: Any,
    row_id: str,
    more: More = "",
    own_tools: Sequence[Message] = (),
) -> str:
    """The text of a prompt, with `more` behind it: text or messages. `own_tools` follow those of the row.

    Raises: DataError: the row, or the tokenizer, has not what the prompt needs.
    """
    messages = conversation(config, tokenizer, columns, prompt, row_id)
    if isinstance(messages, str):
        return messages + (more if isinstance(more, str) else "\n".join(one["content"] for one in more))
    messages = followed(messages, more)
    column = None if isinstance(config, table.GymTaskSection) else config.tools
    tools = [] if column is None else tools_of(find_column(columns, column), f"{row_id}: `{column}`")
    shown = [*tools, *own_tools]
    written = ConversationText(tokenizer, dict(config.chat_arguments))
    try:
        text = written.checked(messages, shown)
    except DataError as error:
        raise DataError(f"{row_id}: {error}") from error
    names = [_name_of(tool) for tool in shown]
    knows = "tools" in str(tokenizer.chat_template)
    if gone := [name for name in names if not knows or name not in text]:
        whose = f"the row has `{column}`" if tools else "the environment has tools"
        raise DataError(
            f"{row_id}: {whose}, and the model's chat template knows no tools, or hides {gone[0]!r}.\n"
            '  Take a model for tools, or leave them out: task.tools = "none". Some templates show tools in '
            "a system message alone: set task.system"
        )
    return text


def conversation(
    config: table.Task, tokenizer: Any, columns: Row, prompt: Any, row_id: str
) -> str | list[Message]:
    """The messages of a prompt, which a chat template renders; without chat the text.

    Raises: DataError: as `render`.
    """
    if isinstance(prompt, str):
        text = _fill(config.template, {**columns, "prompt": prompt}, row_id)
        messages = [{"role": "user", "content": text}]
        if not config.chat:
            if config.system is not None:
                raise DataError(
                    f"{row_id}: the prompt is text, and `task.system` needs chat: set `task.chat` to true"
                )
            return text
    elif is_messages(prompt):
        messages = _asked(prompt, row_id)
    else:
        kind = type(prompt).__name__
        raise DataError(f"{row_id}: the prompt is a {kind}: it must be text, or a list of chat messages")
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{row_id}: the prompt has chat messages, and the model's tokenizer has no chat template.\n"
            "  Take a chat model, or give the prompt as text"
        )
    if config.system is not None and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": config.system}, *messages]
    return as_taken(messages, tokenizer, dict(config.chat_arguments))


def as_taken(messages: list[Message], tokenizer: Any, arguments: dict[str, Any]) -> list[Message]:
    """The messages with the ids and arguments of calls as the chat template takes them."""
    if not any("tool_calls" in one for one in messages):
        return messages
    style = style_of(tokenizer, arguments, refuses=False)
    return _identified([_as_taken(one, style) for one in messages], style)


def followed(messages: list[Message], more: More) -> list[Message]:
    """A text follows the text of the last message."""
    if isinstance(more, str):
        *before, last = messages
        return [*before, {**last, "content": last["content"] + more}]
    return [*messages, *more]


def _as_taken(one: Message, style: CallStyle) -> Message:
    """A message with the arguments of its calls as text, for a template that takes text."""
    calls = one.get("tool_calls")
    return {**one, "tool_calls": [*map(_as_text, calls)]} if calls and style.as_text else one


def _identified(messages: list[Message], style: CallStyle) -> list[Message]:
    """Each call has an id that any template takes, and its result has the same. Rows have other ids, or none:
    then a result is of the first call before it that has none."""
    made, ids, waiting, num_calls = list[Message](), dict[str, str](), list[str](), 0
    for one in messages:
        if calls := one.get("tool_calls"):
            waiting = [
                f"functions.{call['function']['name']}:{number}"
                if style.named_ids
                else CALL_ID.format(number)
                for number, call in enumerate(calls, num_calls)
            ]
            num_calls += len(calls)
            ids |= {str(call.get("id", own)): own for call, own in zip(calls, waiting, strict=True)}
            calls = [{**call, "id": own} for call, own in zip(calls, waiting, strict=True)]
            one = {**one, "tool_calls": calls}
        elif one["role"] == "tool" and waiting:
            result = ids.get(str(one.get("tool_call_id")), waiting[0])
            waiting = [own for own in waiting if own != result]
            one = {**one, "tool_call_id": result}
        made.append(one)
    return made


def _as_text(call: Message) -> Message:
    function = call["function"]
    arguments = function.get("arguments")
    given = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": given}}


def _name_of(tool: Message) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, dict) else tool).get("name", ""))


def is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def with_messages(row: Row, name: str) -> Row:
    """The row, with chat messages in a column that has their text. See `as_messages`."""
    messages = as_messages(value := find_column(row, name))
    return row if messages is value else _replaced(row, name, messages)


def _replaced(row: Row, name: str, value: Any) -> Row:
    if name in row:
        return {**row, name: value}
    first, _, rest = name.partition(".")
    return {**row, first: _replaced(row[first], rest, value)}


def as_messages(value: Any) -> Any:
    """The chat messages whose JSON is the value, or their text in Python, as pandas writes lists and arrays
    into cells. Any other value as it is."""
    if not isinstance(value, str) or not re.match(r"\s*\[\s*\{", value):
        return value
    for read in json.loads, _from_python:
        with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            chat = read(value)
            if is_messages(chat) and all(_role(one) in _SPEAKERS and _CONTENT & one.keys() for one in chat):
                read_messages(chat, "a row")
                return chat
    return value


def _from_python(text: str) -> Any:
    return ast.literal_eval(_BETWEEN.sub(lambda found: found[1] or "},", text.strip()))


def find_reference(columns: Row, name: str) -> Any:
    """The reference answer: the column, and of chat messages the text of the assistant's last. None: there is
    none, or it is the NaN or NaT of a gap."""
    value = find_column(columns, name)
    if not is_messages(value) or not all(_role(one) for one in value):
        return None if isinstance(value, float | date) and value != value else value
    last = value[-1]
    return _content(_content_of(last), name) if _role(last) == "assistant" else None


def _asked(prompt: list[Message], row_id: str) -> list[Message]:
    """The messages up to where the assistant is to answer: the assistant's turn at the end is left out."""
    messages = read_messages(prompt, row_id)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError(f"{row_id}: the prompt has no message before the assistant's")
    return messages


def read_messages(given: list[Message], row_id: str) -> list[Message]:
    """In OpenAI's form. Raises: DataError: one has no role, or a part that is no text."""
    return [_message(one, f"{row_id}: message {n}") for n, one in enumerate(given, 1)]


def _message(one: Message, where: str) -> Message:
    role = _role(one)
    if not role:
        raise DataError(f"{where} has no `role`, only {sorted(one)}: a message is {{role, content}}")
    content = _content(_content_of(one), where)
    key, named = "tool_calls", one.get("tool_calls")
    if CALL in (one.get("role"), one.get("from")):
        key, named, content = CALL, content, ""
    named = named or one.get(CALL) or _inside(_content_of(one), CALLED)
    given = _tables(named, f"{where}: `{key}`", "calls")
    calls = [_call(call, where) for call in given or ()]
    rest = {key: value for key, value in one.items() if key not in READ}
    thinking = "".join(_content(part, where) for part in _inside(_content_of(one), THINKING))
    return {
        "role": role,
        "content": content,
        **({"reasoning_content": thinking} if thinking else {}),
        **without_nulls(rest),
        **({"tool_calls": calls} if calls else {}),
    }


def _role(one: Message) -> str | None:
    role = one.get("role") or one.get("from")
    return ROLES.get(role, role) if isinstance(role, str) else None


def _content_of(one: Message) -> Any:
    return one.get("content") if one.get("role") else one.get("value")


def _content(content: Any, where: str) -> str:
    """Without thinking and calls. Raises: DataError: a part of the content is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    parts = [one for one in parts if _type(one) not in (*THINKING, *CALLED)]
    texts = [*map(_text, parts)]
    for part, text in zip(parts, texts, strict=True):
        if not isinstance(text, str):
            kind = _type(part) or type(part).__name__
            raise DataError(f"{where} has a part of type {kind!r}: a message is text, or parts of text")
    return "".join(texts)


def _inside(content: Any, types: Sequence[str]) -> list[Any]:
    """What the parts of these types have."""
    parts = [one for one in (content if isinstance(content, list) else ()) if _type(one) in types]
    return [next((one[key] for key in (one["type"], "value", "text") if one.get(key)), None) for one in parts]


def _type(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else None


def _text(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    return part.get("text", part.get("value") if part.get("type") == "text" else None)


def tools_of(value: Any, where: str) -> list[Message]:
    """The tools of a row. Raises: DataError: they are no list of tables."""
    return [*map(_of_function, _tables(value, where, "tools") or ())]


def _of_function(tool: Message) -> Message:
    """A tool as chat templates take it: some data sets write the function alone."""
    return {"type": "function", "function": tool} if "function" not in tool and "name" in tool else tool


def _call(call: Message, where: str) -> Message:
    """A call with its arguments as a table: chat templates write them as JSON, and text would be quoted. Some
    data sets write the function alone. Raises: DataError: the call has no name."""
    if "function" not in call:
        named = {key: call.pop(key) for key in ("name", "arguments") if key in call}
        call = {"type": "function", **call, "function": named}
    function = call["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(
            f"{where} has a call without a name: a call is {{type, function: {{name, arguments}}}}"
        )
    if isinstance(function.get("arguments"), str):
        with suppress(ValueError):  # a model may have called a tool with something else
            call = {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    return call


def _tables(value: Any, where: str, of: str) -> list[Message] | None:
    """Tools, or calls. Raises: DataError: they are no list of tables."""
    try:
        value = json.loads(value) if isinstance(value, str) and value.strip() else value
        value = [value] if isinstance(value, dict) else value
        tables = [json.loads(one) if isinstance(one, str) else one for one in value or ()]
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} is no list of {of}: {error}") from error
    if not all(isinstance(one, dict) for one in tables):
        raise DataError(f"{where} is no list of {of}: each is a table, such as {{type, function}}")
    return [without_nulls(one) for one in tables] or None


def without_nulls(value: Any) -> Any:
    """Without the keys of tables that have no value: a table of Parquet has the keys of every row."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def _fill(template: str, columns: Row, row_id: str) -> str:
    try:
        return template.format(**columns)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise DataError(
            f"{row_id}: `task.template` {template!r} cannot be filled ({type(error).__name__}: {error}); "
            f"columns: {sorted(columns)}. A literal brace is written {{{{ or }}}}."
        ) from error
