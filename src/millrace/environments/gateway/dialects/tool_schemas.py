"""The tools of a request, from each dialect's form to OpenAI's form for chat."""

from __future__ import annotations

from typing import Any

from millrace.environments.gateway.calls import Call
from millrace.environments.gateway.dialects.fields import Fields, shown

FORCED = "forces a call, which needs constrained sampling: the turn would not come from the policy"


def take_tools(
    fields: Fields, call: Call, *, schema: str, kind: str = "function", nested: bool = False
) -> None:
    """Put `tools` into the call. With the `tool_choice` "none" there are no tools.

    Args:
        schema: the field that has the JSON Schema of the arguments.
        kind: the type of a tool that the agent runs. A tool without a type is of this type.
        nested: whether the rest of a tool is in its field `function`.
    Raises: RefusedCall: a tool is of another type, or the choice forces a call.
    """
    tools = []
    for tool in fields.objects("tools"):
        if (found := tool.take("type")) not in (None, kind):
            tool.refuse(
                "type", f"is {shown(found)}: only {kind!r} is possible, a tool that the agent runs itself"
            )
        tools.append(_tool(tool.inner("function") if nested else tool, call, schema))
    choice = fields.take("tool_choice")
    if isinstance(choice, dict):  # Anthropic's form
        rest = {name: value for name, value in choice.items() if name != "type"}
        choice = choice.get("type")
        call.unheeded |= {"tool_choice": rest} if rest else {}
    if choice not in (None, "auto", "none"):
        fields.refuse("tool_choice", f'{FORCED}. Give "auto" or "none"')
    call.tools = [] if choice == "none" else tools


def _tool(function: Fields, call: Call, schema: str) -> dict[str, Any]:
    name, description = function.named("name"), function.text("description")
    parameters = function.take(schema) or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        function.refuse(schema, "is no object: it must be a JSON Schema")
    if function.take("strict"):
        call.unheeded.setdefault("strict", []).append(name)
    described = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}
