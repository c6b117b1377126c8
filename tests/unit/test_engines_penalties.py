"""Presence and frequency penalties count the present turn; a repetition penalty counts all that precedes."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from engine_models import EOS, drain, make_engine, make_model, make_work, prompt_of, weights_into
from msgspec.structs import replace

from millrace.core.completion.columns import TokenColumns
from millrace.core.types import Sampling, Work
from millrace.engines.own.architecture import architecture_of
from millrace.engines.own.drafts.drafting_engine import DraftingEngine
from millrace.rollout.protocol import EngineOptions

IDS = count()
PROMPT, LENGTH = prompt_of(1, 6), 12
EARLIER, OBSERVED = prompt_of(2, 5), prompt_of(3, 4)
KINDS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.5},
    {"presence_penalty": -0.7, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 1.3, "presence_penalty": 0.9, "frequency_penalty": 0.4},
]


def work(
    prompt: list[int], tokens: list[int], turn_start: int, length: int = LENGTH, **settings: Any
) -> Work:
    sampling = Sampling(max_tokens=len(tokens) + length, temperature=0.0, ignore_eos=True, **settings)
    return make_work(0, prompt, sampling, tokens=tokens, turn_start=turn_start)


def drafting_engine(model: Any) -> Any:
    options = EngineOptions(
        model_path="",
        device="cpu",
        slots=8,
        max_sequence_tokens=128,
        drafts="earlier",
        keep_kv=False,
        probe=False,
    )
    engine = DraftingEngine(architecture_of(model.config), options, eos_ids={EOS}, decode=None)
    weights_into(engine, model)
    engine.swap(0)
    return engine


def play(engine: Any, works: list[Work]) -> list[TokenColumns]:
    """What an engine samples, which plays a trajectory once: each has an id of its own here."""
    found = {next(IDS): TokenColumns() for _ in works}
    engine.submit([replace(one, trajectory_id=i) for one, i in zip(works, found, strict=True)])
    for part in drain(engine):
        found[part.trajectory_id].extend(part.columns)
    return list(found.values())


@pytest.fixture(params=["plain", "drafting"], scope="module")
def engine(request: pytest.FixtureRequest) -> Any:
    model = make_model()
    return make_engine(model) if request.param == "plain" else drafting_engine(model)


@pytest.mark.parametrize("settings", KINDS)
def test_penalties_are_the_same_on_both_sides_of_a_fork(engine: Any, settings: dict[str, Any]) -> None:
    before = [*EARLIER, *OBSERVED]
    one, behind_fork = play(
        engine,
        [
            work(PROMPT, before, len(before), **settings),
            work([*PROMPT, *before], [], 0, **settings),
        ],
    )
    assert list(one.tokens) == list(behind_fork.tokens)
    assert list(one.logprobs) == pytest.approx(list(behind_fork.logprobs), abs=1e-5)


@pytest.mark.parametrize("settings", KINDS)
def test_a_turn_that_goes_on_elsewhere_counts_its_own_tokens(engine: Any, settings: dict[str, Any]) -> None:
    before = [*EARLIER, *OBSERVED]
    (whole,) = play(engine, [work(PROMPT, before, len(before), **settings)])
    half = list(whole.tokens[: LENGTH // 2])
    moved = work(PROMPT, [*before, *half], len(before), LENGTH - len(half), **settings)
    (rest,) = play(engine, [moved])
    assert [*half, *rest.tokens] == list(whole.tokens)
    assert list(rest.logprobs) == pytest.approx(list(whole.logprobs[len(half) :]), abs=1e-5)


def test_what_was_observed_has_no_presence(engine: Any) -> None:
    """The logits of the first token of a turn are those of the model."""
    before = [*EARLIER, *OBSERVED]
    plain, penalised = play(
        engine,
        [work(PROMPT, before, len(before)), work(PROMPT, before, len(before), presence_penalty=2.0)],
    )
    assert plain.tokens[0] == penalised.tokens[0]
    assert plain.logprobs[0] == pytest.approx(penalised.logprobs[0], abs=1e-6)
    assert torch.tensor(list(plain.logprobs)).isfinite().all()
