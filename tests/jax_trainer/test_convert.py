"""A run goes on with the other backend: checkpoints of the trainers in torch and in JAX as each other's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_presets import MAX_TOKENS, make_policy
from trainer_doubles import make_batch, make_trainer, save_checkpoint, tiny_model
from transformers import AutoModelForCausalLM

from millrace.algorithms import build
from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.training import Optimizer
from millrace.core.errors import DataError
from millrace.trainer.files import checkpoint as torch_files
from millrace_jax.files.checkpoint import JaxSaver, load_checkpoint, named_arrays
from millrace_jax.files.convert import convert, of_jax, of_torch
from millrace_jax.files.model_directory import export_checkpoint

CHANGES: dict[str, Any] = {
    "optimizer": Optimizer(lr=1e-3, eps=1e-3, weight_decay=0.1),
    "max_tokens": MAX_TOKENS,
}
ALGORITHMS = [PolicyGradient(), PolicyGradient(kind="ppo")]


def torch_trainer(algorithm: Any) -> Any:
    return make_trainer(build(algorithm), **CHANGES)


def jax_policy(path: Path, algorithm: Any) -> Any:
    path.mkdir(exist_ok=True)
    return make_policy(path, build(algorithm), **CHANGES)


def steps(trainer: Any, count: int, path: Path) -> Any:
    for _ in range(count):
        trainer.step(make_batch(trainer.version, groups=4), rejected_dir=path)
    return trainer


def saved(policy: Any, directory: Path) -> Path:
    saver = JaxSaver()
    saver.begin(policy, directory)
    return Path(saver.result().path)


def weights_of(trainer: Any) -> dict[str, Any]:
    if hasattr(trainer, "model"):
        return {name: x.detach().numpy() for name, x in trainer.model.named_parameters()}
    arrays = {name: np.asarray(x) for name, x in named_arrays(trainer.state).items()}
    return of_jax(arrays)[0]


def assert_equal_weights(one: Any, other: Any) -> None:
    found, due = weights_of(one), weights_of(other)
    assert found.keys() == due.keys()
    for name in due:
        np.testing.assert_allclose(found[name], due[name], atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_of_torch_goes_on_in_jax(algorithm: Any, tmp_path: Path) -> None:
    trainer = steps(torch_trainer(algorithm), 2, tmp_path)
    path = convert(save_checkpoint(trainer, tmp_path), tmp_path / "jax", "jax")
    policy = jax_policy(tmp_path, algorithm)
    load_checkpoint(policy, path)
    assert policy.version == 2
    steps(policy, 1, tmp_path)
    assert_equal_weights(policy, steps(trainer, 1, tmp_path))
    if trainer.value_head is not None:
        np.testing.assert_allclose(policy.state.head["weight"], trainer.value_head.weight.detach(), atol=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_of_jax_goes_on_in_torch(algorithm: Any, tmp_path: Path) -> None:
    policy = steps(jax_policy(tmp_path, algorithm), 2, tmp_path)
    path = convert(saved(policy, tmp_path / "jax"), tmp_path / "torch", "torch")
    trainer = torch_trainer(algorithm)
    torch_files.load_checkpoint(trainer, path)
    assert trainer.version == 2
    steps(trainer, 1, tmp_path)
    assert_equal_weights(trainer, steps(policy, 1, tmp_path))
    if trainer.value_head is not None:
        np.testing.assert_allclose(trainer.value_head.weight.detach(), policy.state.head["weight"], atol=1e-5)


def test_there_and_back_every_number_is_the_same_and_the_checkpoint_may_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace_jax.files.convert.FILE_BYTES_MAX", 20_000)
    monkeypatch.setattr("millrace.trainer.files.checkpoint_manifest.FILE_BYTES_MAX", 20_000)
    trainer = steps(torch_trainer(ALGORITHMS[1]), 1, tmp_path)
    path = save_checkpoint(trainer, tmp_path / "saved")
    before = torch_files.open_tensors(file for file in path.glob("*.safetensors") if file.name[:3] != "rng")
    before = {name: x.clone() for name, x in before.items()}
    for to in ("jax", "torch"):
        assert convert(path, path.parent, to) == path
    after = torch_files.open_tensors(file for file in path.glob("*.safetensors"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert list(path.parent.iterdir()) == [path]


def test_a_checkpoint_before_the_first_step_is_converted(tmp_path: Path) -> None:
    path = convert(save_checkpoint(torch_trainer(ALGORITHMS[1]), tmp_path), tmp_path / "jax", "jax")
    policy = jax_policy(tmp_path, ALGORITHMS[1])
    load_checkpoint(policy, path)
    assert_equal_weights(steps(policy, 1, tmp_path), steps(torch_trainer(ALGORITHMS[1]), 1, tmp_path))


@pytest.mark.parametrize(
    ("model", "optimizer", "said"),
    [
        ({}, {"momentum/model.norm.weight": 0}, "optimizer has"),
        ({}, {"exp_avg.codes/model.norm.weight": 0}, "optimizer has"),
        ({}, {"step/model.norm.weight": 1, "step/model.embed_tokens.weight": 2}, "not equally many"),
        ({"model.layers.0.a": 0, "model.layers.1.b": 0}, {}, "a DoRA magnitude, or layers that differ"),
    ],
)
def test_what_has_no_counterpart_is_refused(
    model: dict[str, Any], optimizer: dict[str, Any], said: str
) -> None:
    whole = {name: np.zeros(1) for name in ("model.embed_tokens.weight", "model.norm.weight")}
    arrays = ({name: np.asarray(x) for name, x in each.items()} for each in (whole | model, optimizer))
    with pytest.raises(DataError, match=f"RUN/v1.*{said}"):
        of_torch(*arrays, "RUN/v1")


def test_a_dora_adapter_is_refused() -> None:
    with pytest.raises(DataError, match="a DoRA magnitude"):
        of_torch({"model.layers.0.self_attn.q_proj.lora_magnitude": np.zeros(2)}, {}, "RUN/v1")


def test_a_checkpoint_of_the_same_trainer_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(torch_trainer(ALGORITHMS[0]), tmp_path)
    with pytest.raises(DataError, match="has checkpoint format 1"):
        convert(path, tmp_path / "out", "torch")
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match=r"model\.safetensors is damaged"):
        convert(path, tmp_path / "out", "jax")
    assert not (tmp_path / "out").exists()


def test_the_mapping_back_is_the_inverse(tmp_path: Path) -> None:
    policy = steps(jax_policy(tmp_path, ALGORITHMS[1]), 1, tmp_path)
    arrays = {name: np.asarray(x) for name, x in named_arrays(policy.state).items()}
    again = of_torch(*of_jax(arrays), "")
    assert arrays.keys() == again.keys()
    assert all(np.array_equal(again[name], arrays[name]) for name in arrays)


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "bfloat16"), ("llama", "float32")])
def test_the_model_of_a_checkpoint_is_a_directory_of_hugging_face(
    family: str, dtype: str, tmp_path: Path
) -> None:
    tiny_model(family, seed=3).save_pretrained(tmp_path / "start")
    trainer = make_trainer(model=tiny_model(family, seed=4))
    path = convert(save_checkpoint(trainer, tmp_path), tmp_path / "jax", "jax")
    export_checkpoint(path, tmp_path / "out", model_path=str(tmp_path / "start"), dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    expected = {name: x.to(getattr(torch, dtype)) for name, x in trainer.model.named_parameters()}
    assert all(torch.equal(x, expected[name]) for name, x in model.named_parameters())
