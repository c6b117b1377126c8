"""The engine drafts with the trained head: its tokens are those without it, and seconds decide its use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import EOS, collect, drain, make_exact_engine, make_model, make_work, prompt_of

from millrace.config.goes_together import refuse_start
from millrace.config.schema import Config
from millrace.core.errors import ConfigError
from millrace.core.types import Sampling
from millrace.devices.draft_head import DraftHead, first_head
from millrace.engines.own.architecture import architecture_of
from millrace.engines.own.drafts.trained_drafter import FIRST, MeasuredWorth, TrainedDraftingEngine
from millrace.rollout.protocol import EngineOptions
from millrace.run.resume import check_resume


def drafting_engine(model: Any, head: DraftHead | None, **options: Any) -> TrainedDraftingEngine:
    usual = {"model_path": "", "device": "cpu", "slots": 16, "max_sequence_tokens": 320, "exact": True}
    asked = EngineOptions(**usual | {"drafts": "trained", "keep_kv": False, "probe": False} | options)
    try:
        engine = TrainedDraftingEngine(architecture_of(model.config), asked, eos_ids={EOS}, decode=None)
    except ConfigError as error:
        pytest.skip(str(error))
    named = dict(model.named_parameters()) | (head.tensors if head else {})
    for buffer in engine.standby_buffers():
        if buffer.name in named:
            buffer.data[:] = named[buffer.name].detach().contiguous().view(-1).view(torch.uint8)
    engine.swap(0)
    engine._worth.is_faster = lambda: True
    return engine


def works() -> list[Any]:
    samplings = [Sampling(max_tokens=40, temperature=t) for t in (0.0, 0.3, 1.0)]
    return [make_work(i, prompt_of(i, 9), sampling) for i, sampling in enumerate(samplings)]


def played(engine: Any) -> dict[int, Any]:
    engine.submit(works())
    return collect(drain(engine))


def repeating_head(hidden_size: int) -> DraftHead:
    """A head whose state is its token's embedding: with tied weights it guesses that the token repeats."""
    head = first_head(hidden_size, 0, torch.device("cpu"))
    nothing = torch.zeros(hidden_size, hidden_size)
    return replace(head, fuse=torch.cat([nothing, 9.0 * torch.eye(hidden_size)], dim=1))


def test_no_token_depends_on_the_head() -> None:
    model = make_model()
    expected = played(make_exact_engine(model))
    size = model.config.hidden_size
    for head in (repeating_head(size), first_head(size, 1, torch.device("cpu"))):
        engine = drafting_engine(model, head)
        assert played(engine) == expected
    engine = drafting_engine(model, repeating_head(size))
    played(engine)
    assert engine.load().drafted_tokens > 0
    assert any(buffer.name == "drafter.fuse" for buffer in engine.buffers())


def test_a_version_without_a_head_gets_no_drafts() -> None:
    model = make_model()
    engine = drafting_engine(model, None)
    assert played(engine) == played(make_exact_engine(model))
    assert engine.load().drafted_tokens == 0


def test_a_model_from_files_takes_the_head_of_no_earlier_version(tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)
    engine = drafting_engine(model, repeating_head(model.config.hidden_size))
    engine.swap(1)
    engine.load_standby(str(tmp_path))  # where version 0 was
    engine.swap(2)
    played(engine)
    assert engine.load().drafted_tokens == 0


@pytest.mark.parametrize(("seconds", "faster"), [(0.5, True), (2.5, False)])
def test_drafts_are_made_while_their_seconds_per_token_are_fewer(seconds: float, faster: bool) -> None:
    worth, asked = MeasuredWorth(), []
    for _ in range(600):
        drafts = worth.tries()
        asked.append(drafts)
        # two tokens in a step of `seconds`, against one token in a step of 1 s
        worth.measured(1 + drafts, seconds if drafts else 1.0)
    assert asked[: 2 * FIRST] == [False] * FIRST + [True] * FIRST
    rest = asked[2 * FIRST :]
    assert 0.95 < rest.count(faster) / len(rest) < 1.0, "the other kind is measured now and then"


def config_of(**sections: Any) -> Config:
    plain: dict[str, Any] = {
        "model": {"path": "m"},
        "task": {"kind": "gym", "name": "chain_sum"},
        "reward": {"kind": "gym"},
        "rollout": {"drafts": "trained"},
    }
    return Config.model_validate(plain | sections)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("trainer", "backend", "jax"),
        ("trainer", "shard", 2),
        ("trainer", "offload", True),
        ("adapter", "rank", 8),
        ("rollout", "colocated", True),
    ],
)
def test_what_a_trained_drafter_cannot_go_with_is_refused_by_name(section: str, key: str, value: Any) -> None:
    refuse_start(config_of())
    rollout = {"rollout": {"drafts": "trained"}}
    changed = rollout | {section: rollout.get(section, {}) | {key: value}}
    with pytest.raises(ConfigError, match=f"rollout.drafts.*trained.*`{section}.{key}`") as error:
        refuse_start(config_of(schedule={"kind": "synchronous"}, **changed))
    assert "Set it to" in str(error.value)


def test_a_run_keeps_its_trained_drafter_when_it_is_resumed() -> None:
    trained = config_of()
    for other in ({}, {"drafts": "earlier"}):
        with pytest.raises(ConfigError, match=r"rollout\.drafts"):
            check_resume(trained, config_of(rollout=other))
    assert check_resume(trained, config_of(rollout={"drafts": "trained", "draft_tokens": 2}))
