"""Teachers in JAX teach as in torch: another model, of any size and family, with the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_presets import few_shapes, make_policy  # noqa: F401 - the fixture is for every test
from trainer_doubles import VOCAB, choosing, make_batch, make_trainer, role_config, tiny_model

from millrace.algorithms import build
from millrace.config.schema import Config
from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.training import Optimizer
from millrace.core.errors import DataError
from millrace_jax.devices.mesh import make_mesh
from millrace_jax.files.load_policy import load_policy
from millrace_jax.weights import slices


def assert_equal_weights(policy: Any, trainer: Any) -> None:
    due = {name: x.detach().numpy() for name, x in trainer.model.named_parameters()}
    for name, weight in slices(policy.state.weights, policy.shape):
        np.testing.assert_allclose(weight, due[name], atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("family, more_tokens", [("qwen3", 0), ("llama", 8)])
@pytest.mark.parametrize("masked", [False, True])
def test_steps_with_a_teacher_are_those_of_torch(
    family: str, more_tokens: int, masked: bool, tmp_path: Path
) -> None:
    """The teacher may have more rows of logits than the student."""
    changes: dict[str, Any] = {
        "optimizer": Optimizer(lr=1e-3, eps=1e-3, weight_decay=0.1),
        "max_tokens": 20,
        "minibatches": 2,
    }
    algorithm = build(PolicyGradient(teacher="there", teacher_weight=0.5))
    teacher = tiny_model(family, seed=2, intermediate_size=96, vocab_size=VOCAB + more_tokens)
    trainer = make_trainer(algorithm, reference=teacher, **changes)
    policy = make_policy(tmp_path, algorithm, teacher=teacher, **changes)
    for version in range(2):
        batch = make_batch(version, groups=4)
        batch = choosing(batch) if masked else batch
        due, found = (each.step(batch, rejected_dir=tmp_path) for each in (trainer, policy))
        for name, value in due.metrics.items():
            assert found.metrics[name] == pytest.approx(value, rel=2e-4, abs=2e-5), (version, name)
    assert_equal_weights(policy, trainer)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs several devices")
def test_a_teacher_is_divided_among_devices(tmp_path: Path) -> None:
    algorithm = build(PolicyGradient(teacher="there"))
    teacher = tiny_model("llama", seed=2, num_hidden_layers=3)
    one, four = (
        make_policy(tmp_path, algorithm, teacher=teacher, mesh=mesh)
        for mesh in (None, make_mesh(2, 2, 1, jax.devices()[:4]))
    )
    for each in (one, four):
        each.accumulate(make_batch())
    for found, due in zip(jax.tree.leaves(four.gradient), jax.tree.leaves(one.gradient), strict=True):
        np.testing.assert_allclose(found, due, atol=1e-6)


def test_a_teacher_of_a_configuration_is_loaded_as_it_is_and_must_have_the_same_tokens(
    tmp_path: Path,
) -> None:
    for name, family in (("student", "qwen3"), ("teacher", "llama")):
        tiny_model(family).save_pretrained(tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    sections = {"algorithm": {"kind": "grpo", "teacher": str(tmp_path / "teacher")}}
    sections |= {"model": {"dtype": "bfloat16"}, "trainer": {"backend": "jax"}}
    config = Config.model_validate(role_config(tmp_path / "student", **sections))
    policy = load_policy(config)
    assert policy.reference.published == np.float32 and policy.settings.published == "bfloat16"
    assert policy.reference.shape.layer_shapes != policy.shape.layer_shapes
    (tmp_path / "teacher" / "tokenizer.json").write_text('{"model": {"vocab": {"b": 0}}}')
    with pytest.raises(DataError, match="has other tokens"):
        load_policy(config)
