"""A conversation as its chat template writes it: the text, what the template leaves out, and the token ids.

The texts of messages are rendered as they are: a template trims them, cuts them and reads switches in them.
A control token in a text is encoded as text, so no text ends a message.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Any

from millrace.conversations.encoding import Encoding, encodable
from millrace.conversations.tokenizer import encode
from millrace.core.errors import DataError

Message = dict[str, Any]
"""`role`, `content`, and perhaps `name`, `reasoning_content`, `tool_call_id` and `tool_calls`."""
_SHOWN = 'xText{}x"'
SHOWN_CHARACTERS = 60
_GUARDS = range(0xE000, 0xE100)
"""Characters that no text has a meaning for. One of them stands before each control token of a text."""


class ConversationText:
    """`arguments`: of the chat template."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any]) -> None:
        self._tokenizer, self._arguments = tokenizer, dict(arguments)

    @cached_property
    def _encoding(self) -> Encoding:
        return Encoding(self._tokenizer)

    @cached_property
    def _controls(self) -> list[re.Pattern[str]]:
        """Of all added tokens, and of the special ones alone."""
        added = [one for one in getattr(self._tokenizer, "added_tokens_encoder", {}) if len(one.strip()) > 1]
        special = {*self._tokenizer.all_special_tokens}
        return [_pattern(added), _pattern([one for one in added if one in special])]

    def text(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, asks: bool = True) -> str:
        """Up to where the assistant is to write, if it `asks`. It raises what the template raises."""
        rendered = self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=asks,
            **self._arguments,
        )
        return str(rendered)

    def ids(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """Raises: DataError: the template cannot render the messages, leaves one out, or makes a control
        token of a text."""
        messages = list(_mapped(messages, encodable))
        text, shown = self._checked(messages, tools)
        if shown:
            self._refuse_made(shown, text, messages)
        guard, guarded = self.guarded(messages, text, lambda given: self.text(given, tools))
        first, *others = guarded.split(guard)
        return encode(self._tokenizer, first) + self._behind_guards(others)

    def guarded_ids(self, guard: str, guarded: str) -> list[int]:
        """The ids of a text in the middle of a conversation. Behind each guard stands a control token of a
        message's text."""
        first, *others = guarded.split(guard)
        return self._encoding.template(first) + self._behind_guards(others)

    def framed_ids(self, pieces: Sequence[str], contents: Sequence[str]) -> list[int]:
        """The ids of `contents` between `pieces` of the template. They are encoded as one text, because a
        token of a whole conversation may reach from one into the other: but for where one would make a
        control token of another."""
        guard = self._guard("".join([*pieces, *contents]))
        guarded = [self._controls[0].sub(rf"{guard}\g<0>", one) for one in contents]
        text = "".join(piece + one for piece, one in zip(pieces, [*guarded, ""], strict=True))
        ids, of_pieces = self.guarded_ids(guard, text), [*map(self._encoding.template, pieces)]
        if self._control_ids(ids) == self._control_ids(chain(*of_pieces)):
            return ids
        of_contents = [*map(self._encoding.plain, contents), []]
        return [*chain(*chain(*zip(of_pieces, of_contents, strict=True)))]

    def _control_ids(self, ids: Iterable[int]) -> list[int]:
        return [one for one in ids if one in self._encoding.controls]

    def _behind_guards(self, parts: Sequence[str]) -> list[int]:
        ids = list[int]()
        for part in parts:
            token = self._controls[0].match(part)
            stop = token.end() if token else 0
            ids += self._encoding.plain(part[:stop]) + self._encoding.template(part[stop:])
        return ids

    def checked(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        """The text. Raises: DataError: the template cannot render the messages, or leaves one out."""
        return self._checked(messages, tools)[0]

    def _checked(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[str, str]:
        """The text, and the text with marks in place of those of messages; empty: the template has none."""
        try:
            text = self.text(messages, tools)
        except Exception as error:  # a template is a program
            raise DataError(f"the chat template failed: {type(error).__name__}: {error}") from error
        return text, self._refuse_left_out(messages, text, tools)

    def guarded(
        self, messages: Sequence[Message], text: str, render: Callable[[Sequence[Message]], str]
    ) -> tuple[str, str]:
        """A guard, and the text with the guard before each control token of a message. A template may read
        such a token in a text, as it does an end of thinking: then the special tokens alone have a guard."""
        guard = self._guard(text)
        for pattern in self._controls:
            marked = render(list(_mapped(messages, partial(pattern.sub, rf"{guard}\g<0>"))))
            if marked.replace(guard, "") == text:
                return guard, re.sub(rf"{guard}(?!{self._controls[0].pattern})", "", marked)
        if not any(pattern.search(one) for one in _texts(messages) for pattern in self._controls[1:]):
            return guard, text
        raise DataError(
            "the chat template reads special tokens in the texts of messages, so they cannot be encoded "
            "as text\n  Leave them out of the messages."
        )

    @staticmethod
    def _guard(text: str) -> str:
        return next((chr(code) for code in _GUARDS if chr(code) not in text), chr(_GUARDS.start))

    def _refuse_left_out(self, messages: Sequence[Message], text: str, tools: Sequence[Any]) -> str:
        marks = list[str]()

        def mark(one: str) -> str:
            marks.append(one)
            return _SHOWN.format(len(marks) - 1) if one else one

        marked, parts = list[Message](), list[list[range]]()
        for one in messages:
            begins, calls = [len(marks)], list[Message]()
            marked += _mapped([{**one, "tool_calls": ()}], mark)
            for call in one.get("tool_calls") or ():
                begins.append(len(marks))
                calls.append(_call(call, mark))
            marked[-1] = {key: value for key, value in marked[-1].items() if key != "tool_calls"}
            marked[-1] |= {"tool_calls": calls} if calls else {}
            parts.append([range(*pair) for pair in pairwise([*begins, len(marks)])])
        try:
            shown = self.text(marked, tools)
        except Exception:  # it reads a text, such as the JSON of a result
            shown = ""
        for n, (one, (of_text, *of_calls)) in enumerate(zip(messages, parts, strict=True)):
            seen = any(_is_shown(shown, text, number, marks) for number in of_text)
            ids = [call.get("id") for call in one.get("tool_calls") or ()]
            gone = [
                own
                for own, call_id in zip(of_calls, ids, strict=True)
                if not any(_is_shown(shown, text, number, marks) for number in own)
                and not (call_id and call_id in text)
            ]
            if gone or not (seen or of_calls or self._is_empty(n, messages, text, tools)):
                what = "the calls of tools in it" if gone else "it"
                raise DataError(
                    f"the chat template leaves out message {n + 1} (role {one['role']!r}, text "
                    f"{str(one.get('content'))[:SHOWN_CHARACTERS]!r}): the model would not see {what}\n"
                    "  Use another role or another template, or leave the message out."
                )
        return shown

    def _is_empty(self, at: int, messages: Sequence[Message], text: str, tools: Sequence[Any]) -> bool:
        """Whether a message has no text, and the model sees that it is there, or loses nothing."""
        if messages[at].get("content"):
            return False
        if messages[at]["role"] not in ("tool", "user"):
            return True
        try:
            return self.text([*messages[:at], *messages[at + 1 :]], tools) != text
        except Exception:  # without it, the conversation is none
            return True

    def _refuse_made(self, shown: str, text: str, messages: Sequence[Message]) -> None:
        """A template that removes a part of a text may join its rest to a special token."""
        special, texts = self._controls[1], _texts(messages)
        made = Counter(special.findall(text)) - Counter(special.findall(shown))
        made -= Counter(found for one in texts for found in special.findall(one))
        if joined := [one for one in made if _may_join(one, texts)]:
            raise DataError(f"the chat template makes the special token {joined[0]!r} of a text of a message")


def _may_join(token: str, texts: Sequence[str]) -> bool:
    """Whether a text has the begin of a token and, behind it, its end."""
    return any(
        token[:cut] in one and token[cut:] in one.partition(token[:cut])[2]
        for one in texts
        for cut in range(1, len(token))
    )


def _is_shown(shown: str, text: str, number: int, marks: Sequence[str]) -> bool:
    if shown:  # a template may write a text in capitals
        return f"xtext{number}x" in shown.casefold()
    return marks[number].strip() in text or json.dumps(marks[number])[1:-1] in text


def _pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    longest = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or "(?!)")


def _texts(messages: Sequence[Message]) -> list[str]:
    found = list[str]()

    def keep(one: str) -> str:
        found.append(one)
        return one

    list(_mapped(messages, keep))
    return found


def _mapped(messages: Sequence[Message], change: Callable[[str], str]) -> Iterator[Message]:
    """The messages with each text of theirs changed: contents, names, and arguments with their keys."""
    for one in messages:
        changed = dict(one)
        for key in ("content", "reasoning_content", "name"):
            if isinstance(one.get(key), str):
                changed[key] = change(one[key])
        if one.get("tool_calls"):
            changed["tool_calls"] = [_call(call, change) for call in one["tool_calls"]]
        yield changed


def _call(call: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    function = call["function"]
    arguments = _value(function.get("arguments"), change)
    return {**call, "function": {**function, "name": change(function["name"]), "arguments": arguments}}


def _value(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {change(key): _value(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_value(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value
