"""Several ranks train, publish and export an adapter as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.long import long
from tests.ranks import adapters
from tests.ranks.together import together
from trainer_doubles import save_tiny_model

SHAPES = {2: [{"shard": 2}, {"sequence": 2}], 1: [{"offload": True}]}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 67}


@pytest.fixture(scope="module", params=SHAPES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = save_tiny_model(tmp_path_factory.mktemp("model"), **HEADS)
    return together(request.param, adapters.found, SHAPES[request.param], path)[0]


@long
def test_the_adapter_after_three_steps_is_that_of_one_process(found: dict[str, Any]) -> None:
    assert found and all(each["error"] < 1e-5 for each in found.values()), found


@long
def test_what_is_published_belongs_to_the_same_weights(found: dict[str, Any]) -> None:
    assert all(each["base"] for each in found.values())


def test_the_exported_model_is_whole(found: dict[str, Any], tmp_path: Path) -> None:
    assert all(each["exported"] for each in found.values())
