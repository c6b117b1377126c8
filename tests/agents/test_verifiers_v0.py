"""An environment of the frozen v0 of `verifiers` is run by its own code, and its tools are called."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.agents.played import play


@pytest.mark.parametrize(
    ("texts", "scored"),
    [
        pytest.param(["multiply(13, 7)", "91"], 1.0, marks=pytest.mark.smoke),
        (["multiply(13, 7)", "90"], 0.0),
        (["91"], 1.0),
    ],
)
def test_an_environment_with_tools_is_scored_by_verifiers(
    model: Path, tmp_path: Path, texts: list[str], scored: float
) -> None:
    played = play("with_verifiers_v0", tmp_path, model, texts, {"index": 3})
    assert played.end.returned == {"reward": scored, "turns": len(texts)}
    turns = played.calls[-1].messages
    assert turns[0].content == "13*7=" and played.calls[0].tools[0]["function"]["name"] == "multiply"
    assert [turn.content for turn in turns if turn.role == "tool"] == ["91"][: len(texts) - 1]
