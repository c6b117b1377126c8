"""A taskset of `verifiers` is run by its own code, and asks the gateway by text or by tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.agents.played import Played, play

from millrace.environments.tokenizer import load_tokenizer


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Any:
    def run(texts: list[str], **variables: str) -> Played:
        return play("with_verifiers", tmp_path, model, texts, {"index": 3}, variables)

    return run


@pytest.mark.parametrize(("texts", "scored"), [(["hm", "91"], 1.0), (["90"], 0.0)])
def test_a_taskset_is_scored_by_verifiers_over_chat_completions(
    run: Any, texts: list[str], scored: float
) -> None:
    played = run(texts)
    assert played.end.returned == {"reward": scored, "turns": len(texts)}
    last = [turn.content for turn in played.calls[-1].messages]
    assert last == ["13*7=", "hm", "A number."][: 2 * len(texts) - 1]


def test_its_train_client_sends_the_tokens_that_were_sampled(run: Any, model: Path) -> None:
    played = run(["hm", "91"], RENDERER=str(model))
    assert played.end.returned == {"reward": 1.0, "turns": 2}
    tokenizer = load_tokenizer(model)
    first, second = (call.prompt for call in played.calls)
    assert tokenizer.decode(first) == "<|user|>13*7=<|end|><|assistant|>"
    assert second[: len(first)] == first
    assert tokenizer.decode(second[len(first) :]) == "hm<|end|><|user|>A number.<|end|><|assistant|>"
    assert all(call.logprobs for call in played.calls)
