"""The tools of an environment: public methods with types and a docstring."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec

from millrace.conversations.tool_calls import ToolCall
from millrace.core.errors import RewardError
from millrace.rewards.scores import shortened

NO_TOOLS = "reset", "get_reward", "close"
RESTORING = "snapshot", "restore"
"""Methods of an environment with `recovery = "restored"`."""


class ToolError(Exception):
    """A call that a tool cannot answer; the model reads why."""


class WrongCall(ToolError):
    """The model's own error."""


@dataclass(frozen=True)
class Tool:
    """`schema`: as chat templates take it. `hints`: the types of the parameters."""

    name: str
    schema: dict[str, Any]
    hints: dict[str, Any]
    signature: inspect.Signature

    def call(self, environment: Any, call: ToolCall) -> Any:
        """What the tool returns. Raises: ToolError: the arguments do not fit, or the tool raised."""
        try:
            bound = self.signature.bind(None, *call.positional, **call.arguments)
        except TypeError as error:
            raise WrongCall(f"{self.name}: {error}") from error
        del bound.arguments[next(iter(bound.arguments))]
        arguments = {name: self._converted(name, value) for name, value in bound.arguments.items()}
        return getattr(environment, self.name)(**arguments)

    def _converted(self, name: str, value: Any) -> Any:
        try:
            return msgspec.convert(value, self.hints[name])
        except msgspec.ValidationError as error:
            raise WrongCall(f"{self.name}: argument {name}: {error}") from error


def find_tools(kind: type, path: str) -> dict[str, Tool]:
    """The tools of a class by name.

    Raises: RewardError: a public method cannot be one: it has no docstring, or a parameter has no type or no
        description.
    """
    methods = inspect.getmembers(kind, inspect.isfunction)
    none = {*NO_TOOLS, *(RESTORING if getattr(kind, "recovery", "") == "restored" else ())}
    return {
        name: _tool(name, method, path)
        for name, method in methods
        if not name.startswith("_") and name not in none
        if not isinstance(inspect.getattr_static(kind, name), staticmethod)
    }


def _tool(name: str, method: Callable[..., Any], path: str) -> Tool:
    from transformers.utils import get_json_schema

    signature = inspect.signature(method)
    try:
        if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in signature.parameters.values()):
            raise TypeError("it takes any number of arguments")
        schema, hints = get_json_schema(method), get_type_hints(method)
        hints.pop("return", None)
        for hint in hints.values():
            msgspec.json.schema(hint)
    except Exception as error:  # of the kinds of transformers and msgspec, and of names that a type has
        raise RewardError(
            f"`reward.path` ({path}): the method {name} cannot be a tool: {error}\n"
            "  A tool has a type for each parameter, and a docstring that describes each one under `Args:`. "
            f"Name a method that is none `_{name}`."
        ) from error
    return Tool(name, schema, hints, signature)


def to_result(returned: Any, characters_max: int) -> tuple[str, bool]:
    """What a tool returned as the text that the model reads, and whether it was cut or was no text.

    Raises: ToolError: it is neither text nor bytes, nor has it a form as JSON.
    """
    if isinstance(returned, bytes | bytearray):
        text = returned[:characters_max].decode(errors="replace")
        return f"{text}\n[{len(returned):,} bytes; the first {len(text):,} characters are above]", True
    if not isinstance(returned, str):
        try:
            returned = json.dumps(returned, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ToolError(f"the tool returned a {type(returned).__name__}: {shortened(error)}") from error
    if len(returned) <= characters_max:
        return returned, False
    note = f"[{len(returned):,} characters; the first {characters_max:,} are above]"
    return f"{returned[:characters_max]}\n{note}", True
