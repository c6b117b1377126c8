"""Several ranks compute what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.long import few, long
from tests.ranks import work
from tests.ranks.together import together
from trainer_doubles import CONFIGS, save_tiny_model
from transformers import AutoConfig

from millrace.core.errors import DataError
from millrace.trainer.model import load_model
from millrace.trainer.ranks.mesh import ALONE, Ranks

pytestmark = pytest.mark.timeout(900)  # one fixture does the work of all: a minute on two idle cores

SHAPES = {
    2: [{"shard": 2}, {"tensor": 2}, {"sequence": 2}],
    4: [
        {"shard": 4},
        {"shard": 2, "tensor": 2},
        {"shard": 2, "sequence": 2},
        {"tensor": 2, "sequence": 2},
    ],
}
FAMILIES = ("qwen3", "llama", "qwen2")  # embeddings tied, not tied, projections with a bias
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
UNEVEN = {"vocab_size": 67}  # no number of ranks divides it


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    save_tiny_model(directory / "qwen3-other", seed=1, **HEADS, **UNEVEN)
    return {family: save_tiny_model(directory / family, family, **HEADS, **UNEVEN) for family in FAMILIES}


@pytest.fixture(scope="module", params=few(reversed(SHAPES)))
def errors(request: pytest.FixtureRequest, paths: dict[str, Path]) -> dict[Any, float]:
    return together(request.param, work.errors, SHAPES[request.param], paths)[0]


LIMITS = {
    "packed": 1e-5,
    "recomputed": 1e-5,
    "fewer rows than ranks": 1e-5,
    "weights rounded": 1e-5,
    "against a reference": 1e-5,
    "settled for the batch": 1e-5,
    "by sequence in float64": 1e-9,
    "cut sampling in float64": 1e-9,
    "with a critic in float64": 1e-9,
    "steps with a critic": 1e-5,
    "weights after three steps": 1e-5,
    "several steps a batch": 1e-5,
    "in float64": 1e-9,
    "in bfloat16": 2e-2,
}


@long
@pytest.mark.parametrize("computation", LIMITS)
def test_every_division_gives_what_one_process_gives(errors: dict[Any, float], computation: str) -> None:
    found = {case: error for case, error in errors.items() if case[0] == computation}
    assert found
    assert {case: error for case, error in found.items() if not error < LIMITS[computation]} == {}


@pytest.mark.parametrize("world", SHAPES)
def test_the_result_of_a_step_is_that_of_one_process_and_the_same_on_all_ranks(
    world: int, paths: dict[str, Path]
) -> None:
    by_rank = together(world, work.results, SHAPES[world], paths["qwen3"])
    due = by_rank[0][0]
    for shape, *found in zip(SHAPES[world], *(results[1:] for results in by_rank), strict=True):
        for result in found:
            assert result.metrics == found[0].metrics, shape
            assert result.logprob_gap == found[0].logprob_gap, shape
        assert found[0].metrics == pytest.approx(due.metrics, rel=1e-3, abs=1e-6), shape
        assert found[0].trained_tokens == due.trained_tokens
        assert {k: v[2] for k, v in found[0].logprob_gap.items()} == {
            k: v[2] for k, v in due.logprob_gap.items()
        }


@long
@pytest.mark.parametrize("world", SHAPES)
def test_what_is_not_finite_on_one_rank_is_refused_by_all(world: int, paths: dict[str, Path]) -> None:
    by_rank = together(world, work.refusals, SHAPES[world], paths["qwen3"])
    for answers in zip(*by_rank, strict=True):
        messages = {message for message, _ in answers}
        assert len(messages) == 1, messages
        (message,) = messages
        if "the loss is nan" in message:
            assert message.startswith("TrainingError")
            assert not any(changed for _, changed in answers)
        else:
            assert message.startswith("WeightsError"), message
            assert "embed_tokens" in message


@long
@pytest.mark.parametrize(
    ("world", "shapes", "families"),
    [
        (2, SHAPES[2], [name for name in CONFIGS if name not in FAMILIES]),
        (4, SHAPES[4][1:], ["gpt_oss", "phi3", "qwen3_moe"]),
    ],
)
def test_the_other_families_too(
    tmp_path: Path, world: int, shapes: list[dict[str, int]], families: list[str]
) -> None:
    heads = HEADS if world == 4 else {}
    paths = {family: save_tiny_model(tmp_path / str(i), family, **heads) for i, family in enumerate(families)}
    errors = together(world, work.gradient_errors, shapes, paths)[0]
    assert len(errors) == len(shapes) * len(families)
    assert {case: error for case, error in errors.items() if not error < 1e-5} == {}


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("phi3", {"intermediate_size": 47}, r"must divide the model's `intermediate_size` \(47\)"),
        ("qwen3_moe", {"num_experts": 3}, r"must divide the model's `num_experts` \(3\)"),
    ],
)
def test_what_ranks_do_not_divide_is_refused(tmp_path: Path, family: str, change: Any, message: str) -> None:
    path = save_tiny_model(tmp_path, family)
    config = AutoConfig.from_pretrained(path)
    config.update(change)
    config.save_pretrained(path)
    with pytest.raises(DataError, match=message):
        load_model(path, work.CPU, Ranks(tensor=2))


def test_heads_that_ranks_do_not_divide_are_refused(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    with pytest.raises(DataError, match=r"must divide the model's `num_key_value_heads` \(2\)"):
        load_model(path, work.CPU, Ranks(tensor=2, sequence=2))


def test_a_rank_holds_its_share_of_the_weights(paths: dict[str, Path]) -> None:
    shapes = [{"shard": 4}, {"tensor": 2, "sequence": 2}, {"shard": 2, "tensor": 2}]
    for shares in together(4, work.shares, shapes, paths["llama"]):
        assert max(shares) < 0.26


def test_one_process_alone_starts_no_group() -> None:
    assert [ALONE.mesh, ALONE.weights_mesh, ALONE.group("tensor")] == [None, None, None]
    assert ALONE.gather("mine") == ["mine"]
    assert not torch.distributed.is_initialized()
