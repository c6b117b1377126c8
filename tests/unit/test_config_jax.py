"""What a trainer in JAX cannot do is refused with the key and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from trainer_doubles import role_config

from millrace.config.schema import Config


def config(**sections: Any) -> Config:
    trainer = {"backend": "jax"} | sections.pop("trainer", {})
    return Config.model_validate(role_config("model", trainer=trainer, **sections))


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"adapter": {"rank": 4, "kind": "dora"}}, r'`adapter.kind` \("dora"\): only LoRA'),
        ({"optimizer": {"rule": "muon"}}, r'`optimizer.rule` \("muon"\)'),
        ({"optimizer": {"states": "8bit"}}, r'`optimizer.states` \("8bit"\)'),
        ({"trainer": {"offload": True}}, r"`trainer.offload` \(true\)"),
        ({"trainer": {"quantization": "fp8"}}, r'`trainer.quantization` \("fp8"\): only bfloat16'),
        ({"trainer": {"shard": 2, "hosts": 2}, "adapter": {"rank": 4}}, r"`trainer.hosts` \(2\)"),
        ({"sampling": {"routing": True}}, r"`sampling.routing` \(true\)"),
    ],
)
def test_what_the_trainer_in_jax_cannot_do_is_refused_by_name(sections: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=rf'`trainer.backend` \("jax"\) cannot do {named}'):
        config(**sections)


def test_all_else_is_accepted() -> None:
    made = config(trainer={"shard": 4, "tensor": 2, "hosts": 2}, model={"dtype": "bfloat16"})
    assert (made.trainer.ranks, made.trainer.ranks_of_host, made.trainer.processes_of_host) == (8, 4, 1)
    assert config(adapter={"rank": 4}, trainer={"tensor": 2}).adapter.scale == 8.0
    assert config(
        sampling={"top_p": 0.9}, algorithm={"kind": "grpo", "teacher": "there"}
    ).sampling.token_masks
