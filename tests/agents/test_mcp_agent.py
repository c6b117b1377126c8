"""An agent gives the tools of an MCP server to the model, and calls them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.agents.played import play


@pytest.mark.parametrize(
    ("called", "heard"),
    [("multiply(12, 34)", "408"), ('multiply("x", 2)', "validation error")],
)
def test_the_model_calls_a_tool_of_an_mcp_server(
    model: Path, tmp_path: Path, called: str, heard: str
) -> None:
    played = play("with_mcp", tmp_path, model, [called, "408"], {"prompt": "12*34="})
    assert played.end.returned == "408"
    first, second = played.calls
    (tool,) = first.tools
    assert tool["function"]["name"] == "multiply" and tool["function"]["description"]
    assert list(tool["function"]["parameters"]["properties"]) == ["a", "b"]
    assert [turn.role for turn in second.messages] == ["user", "assistant", "tool"]
    assert heard in second.messages[-1].content
