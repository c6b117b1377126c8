"""A taskset of `verifiers` is run by its own code, and asks the gateway by text or by tokens."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.agents.played import EXAMPLES, Played, play

import millrace
from millrace.conversations.tokenizer import ASSISTANT, END, USER, load_tokenizer
from millrace.quickstart.start_model import learn

ALPHABET = string.ascii_letters + string.digits + "*=. "


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Any:
    def run(texts: list[str], **variables: str) -> Played:
        return play("with_verifiers", tmp_path, model, texts, {"index": 3}, variables)

    return run


@pytest.mark.parametrize(
    ("texts", "scored"), [pytest.param(["hm", "91"], 1.0, marks=pytest.mark.smoke), (["90"], 0.0)]
)
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


def demonstrated(rng: random.Random) -> Iterator[tuple[str, str]]:
    """A right answer or a wrong one, at once or after a word that is none."""
    number = rng.randrange(10, 18)
    asked = f"{USER}{number}*7={END}{ASSISTANT}"
    yield asked, "hm"
    yield asked, str(number * 7)
    yield f"{asked}hm{END}{USER}A number.{END}{ASSISTANT}", str(rng.choice([number * 7, 7]))


@pytest.mark.usefixtures("warm")
def test_a_run_trains_on_what_the_train_client_asked_for(tmp_path: Path) -> None:
    start, rows, agent = tmp_path / "start", tmp_path / "rows.jsonl", EXAMPLES / "with_verifiers.py"
    rng = random.Random(0)
    pairs = [pair for _ in range(1000) for pair in demonstrated(rng)]
    learn(pairs, tmp_path / "base", start, Console(), alphabet=ALPHABET, steps=60, lr=4e-3, seed=1)
    rows.write_text("".join(json.dumps({"prompt": "", "index": index}) + "\n" for index in range(8)))
    run = millrace.train(
        model={"path": str(start)},
        task={"kind": "file", "path": str(rows), "answer": None},
        reward={
            "kind": "environment",
            "path": f"{agent}:reward",
            "agent": {"function": f"{agent}:solve", "variables": {"RENDERER": str(start)}},
            "turns": 3,
            "timeout_s": 300.0,
            "memory_mb": 4096,
        },
        run_dir=tmp_path / "run",
        steps=3,
        batch={"prompts": 2, "group_size": 4},
        sampling={"max_tokens": 8},
        schedule={"kind": "synchronous"},
        rollout={"max_sequence_tokens": 96, "slots": 8},
    )
    accounting = run.summary()["accounting"]
    assert accounting["trained"] == accounting["admitted"] == 3 * 2 * 4
    trained = list(run.trajectories(tokens=True))
    assert {one["reward"] for one in trained} <= {0.0, 1.0} and len(trained) == 3 * 2 * 4
    longer = [one for one in trained if one["reward/turns"] > 1]
    assert longer and all("A number." in one["completion"] for one in longer)
    for one in trained:  # what verifiers sent back is what was sampled, and went on from it
        assert not any(one[f"reward/forks_{cause}"] for cause in ("history", "tools", "template", "other"))
        assert one["reward/calls_refused"] == 0 and len(one["tokens"]) == len(one["versions"])
