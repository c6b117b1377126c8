"""A trainer in fp8: which configurations it is refused for, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_preflight import MODEL, config_for
from test_preflight import model as model

from millrace.checks.preflight import preflight
from millrace.config.schema import Config
from millrace.core.errors import ConfigError


def quantised_trainer(model: Path, /, **sections: dict[str, object]) -> Config:
    config = config_for(model).model_dump()
    quantised = {"model": {"dtype": "bfloat16"}, "trainer": {"quantization": "fp8"}}
    for changes in (quantised, sections):
        for name, keys in changes.items():
            config[name] |= keys
    return Config.model_validate(config)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"dtype": "float32"}}, '`model.dtype` is "float32".\n  Set it to "bfloat16"'),
        ({"trainer": {"shard": 2}}, "`trainer.shard` is 2.\n  Set it to 1"),
        ({"trainer": {"tensor": 2}}, "`trainer.tensor` is 2"),
        ({"trainer": {"sequence": 2}}, "`trainer.sequence` is 2"),
        ({"trainer": {"offload": True}}, "`trainer.offload` is true.\n  Set it to false"),
        ({"adapter": {"rank": 4}}, '`adapter.rank` is 4.\n  Set it to "none"'),
    ],
    ids=str,
)
def test_a_trainer_that_does_not_compute_with_quantised_copies_is_refused(
    model: Path, tmp_path: Path, sections: dict[str, dict[str, object]], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        preflight(quantised_trainer(model, **sections), tmp_path)
    assert str(caught.value).startswith('`trainer.quantization` ("fp8") ') and said in str(caught.value)
    assert str(caught.value).endswith(", or leave `trainer.quantization` out")


def test_a_trainer_with_one_rank_and_whole_weights_may_be_quantised_and_experts_are_refused(
    model: Path, tmp_path: Path
) -> None:
    config = quantised_trainer(model)
    config = config.model_copy(update={"model": config.model.model_copy(update={"device": "cpu"})})
    assert '`trainer.quantization` ("fp8") makes steps slower on a CPU' in "\n".join(
        preflight(config, tmp_path)
    )
    (model / "config.json").write_text(json.dumps(MODEL | {"model_type": "qwen3_moe", "num_experts": 4}))
    with pytest.raises(ConfigError, match=r"(?s)`trainer.quantization` .* has experts.*Leave it out"):
        preflight(config, tmp_path)
