"""LoRA in JAX is LoRA in torch: its beginning, gradients, steps, versions and files."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from mesh_doubles import uneven_batch
from safetensors.numpy import load_file
from test_presets import few_shapes  # noqa: F401 - for every test
from trainer_doubles import (
    WRITERS,
    make_batch,
    make_trainer,
    role_config,
    save_checkpoint,
    tiny_model,
)

from millrace.algorithms import build
from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.training import Adapter, Optimizer
from millrace.core.errors import ConfigError, DataError
from millrace.core.types import Endpoint
from millrace.devices.low_rank import BASE
from millrace.trainer.adapted_linear import adapt, adapted_layers, trained_weights
from millrace.trainer.batch.batch_step import StepSettings
from millrace.trainer.files import checkpoint as torch_files
from millrace.trainer.files import export as torch_export
from millrace.trainer.role import TorchTrainer
from millrace_jax.adapted_matmul import MergeRule, adapted_matmul
from millrace_jax.adapter_tree import adapter_dims, begin_adapter, whole_model
from millrace_jax.decoder import read_architecture
from millrace_jax.devices.mesh import make_mesh
from millrace_jax.files.checkpoint import JaxSaver, load_checkpoint
from millrace_jax.files.convert import convert
from millrace_jax.files.model_directory import export_adapter, export_checkpoint
from millrace_jax.policy import FrozenPolicy, JaxPolicy
from millrace_jax.role import JaxTrainer
from millrace_jax.weights import LAYERS, named_slices, read_weights

LORA = Adapter(rank=4, alpha=8.0)
OPTIMIZER = Optimizer(lr=1e-3, eps=1e-4, weight_decay=0.1)
SEED = 3
FAMILIES = pytest.mark.parametrize("family", ["llama", "qwen2"])


def torch_model(family: str, config: Adapter = LORA, published: Any = torch.float32) -> Any:
    model = tiny_model(family)
    adapt(model, config, published=published, seed=SEED)
    return model


def adapted_policy(
    path: Path,
    family: str,
    *,
    config: Adapter = LORA,
    kl: bool = False,
    published: Any = jnp.float32,
    axes: tuple[int, int, int] = (1, 1, 1),
    devices: int = 1,
    **changes: Any,
) -> JaxPolicy:
    path.mkdir(exist_ok=True)
    tiny_model(family).save_pretrained(path)
    mesh, shape = make_mesh(*axes, jax.devices()[:devices]), read_architecture(path)
    base = jax.tree.map(lambda x: x.astype(published), read_weights(path, shape, mesh))
    settings: dict[str, Any] = {
        "optimizer": OPTIMIZER,
        "token_budget": 4096,
        "max_tokens": 24,
        "temperature": 1.0,
        "dtype": jnp.float32,
        "published": published,
    }
    assert config.scale is not None
    return JaxPolicy(
        replace(shape, merging=MergeRule(config.scale, published)),
        begin_adapter(shape, config, SEED, mesh),
        build(PolicyGradient(kl=0.1 * kl)),
        StepSettings(**settings | changes),
        base=base,
        reference=FrozenPolicy(base, shape, published) if kl else None,
        mesh=mesh,
    )


def tensors_of(tree: Any, policy: JaxPolicy, config: Adapter = LORA) -> dict[str, Any]:
    return {name: np.asarray(x) for name, x in named_slices(tree, adapter_dims(policy.shape, config))}


@FAMILIES
def test_version_0_has_the_same_numbers_bit_for_bit(family: str, tmp_path: Path) -> None:
    config = Adapter(rank=3, targets=("q_proj", "down_proj"))
    due = trained_weights(torch_model(family, config))
    policy = adapted_policy(tmp_path, family, config=config)
    found = tensors_of(policy.state.weights, policy, config)
    assert list(found) == list(due)
    assert all(np.array_equal(found[name], due[name].detach()) for name in due)


@FAMILIES
def test_gradients_equal_those_of_torch(family: str, tmp_path: Path) -> None:
    model, policy = torch_model(family), adapted_policy(tmp_path, family)
    random = torch.Generator().manual_seed(5)
    for name, weight in trained_weights(model).items():
        if name.endswith("lora_B"):  # not 0: A has a gradient too
            weight.data.copy_(torch.randn(weight.shape, generator=random) / 8)
    weights = trained_weights(model)
    layers = {
        name: jnp.stack([weights[f"{LAYERS}.{i}.{name}"].detach().numpy() for i in range(2)])
        for name in policy.state.weights[LAYERS]
    }
    policy.state = policy.state._replace(weights={LAYERS: layers})
    summary = make_trainer(model=model).accumulate(make_batch())
    assert policy.accumulate(make_batch()).loss == pytest.approx(summary.loss, rel=1e-5, abs=1e-6)
    found = tensors_of(policy.gradient[0], policy)
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        due = weight.grad.numpy()
        assert np.abs(due).max() > 1e-5
        assert np.abs(found[name] - due).max() < 1e-6 * max(1.0, np.abs(due).max()), name


@FAMILIES
def test_three_steps_are_those_of_torch_and_the_base_is_the_reference(family: str, tmp_path: Path) -> None:
    model = torch_model(family)
    algorithm = build(PolicyGradient(kl=0.1))
    trainer = make_trainer(algorithm, model=model, reference=model, optimizer=OPTIMIZER, minibatches=2)
    policy = adapted_policy(tmp_path, family, kl=True, minibatches=2)
    for version in range(3):
        batch = make_batch(version, groups=4)
        due, found = (each.step(batch, rejected_dir=tmp_path) for each in (trainer, policy))
        for name, value in due.metrics.items():
            assert found.metrics[name] == pytest.approx(value, rel=2e-4, abs=2e-5), (version, name)
    weights = tensors_of(policy.state.weights, policy)
    for name, weight in trained_weights(model).items():
        np.testing.assert_allclose(weights[name], weight.detach(), atol=1e-5, err_msg=name)
    merged = dict(whole_model(policy.base, policy.state.weights, policy.shape))
    for name, layer in adapted_layers(model).items():
        np.testing.assert_allclose(merged[f"{name}.weight"], layer.merged(), atol=1e-5, err_msg=name)


def test_the_merged_matrix_is_rounded_as_replicas_round_it() -> None:
    random = np.random.default_rng(0)
    x, weight, down, up = (
        random.normal(size=size).astype(np.float32) for size in ((3, 8), (16, 8), (2, 8), (16, 2))
    )
    weight = weight.astype(jnp.bfloat16)
    found = adapted_matmul(x, weight, down, up, MergeRule(0.5, jnp.bfloat16))
    merged = (torch.from_numpy(weight.astype(np.float32)) + 0.5 * torch.from_numpy(up @ down)).bfloat16()
    np.testing.assert_allclose(found, x @ merged.float().numpy().T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axes, devices", [((2, 1, 1), 2), ((2, 2, 1), 8), ((1, 1, 2), 2)])
def test_steps_on_a_mesh_are_those_of_one_device(
    axes: tuple[int, int, int], devices: int, tmp_path: Path
) -> None:
    settings = {"token_budget": 64, "kl": True}
    due = adapted_policy(tmp_path, "qwen2", **settings)
    found = adapted_policy(tmp_path, "qwen2", axes=axes, devices=devices, **settings)
    for version in range(3):
        for each in (due, found):
            each.step(uneven_batch(version), rejected_dir=tmp_path)
    weights = tensors_of(due.state.weights, due)
    for name, weight in tensors_of(found.state.weights, found).items():
        np.testing.assert_allclose(weight, weights[name], atol=1e-5, err_msg=name)
    down = found.state.weights[LAYERS]["self_attn.q_proj.lora_A"]
    assert {part.data.size for part in down.addressable_shards} == {down.size // axes[0]}


# ------------------------------------------------------------ versions


def version_0(role: Any, config: dict[str, Any], path: Path) -> tuple[dict[str, bytes], str, int]:
    async def publish() -> Any:
        trainer = role(config, str(path), "trainer_doubles:open_memory_writer", "cpu")
        await trainer.load(None)
        await trainer.publish(Endpoint("memory", str(path), 2, 1 << 20))
        return await trainer.await_published()

    published = asyncio.run(publish())
    return WRITERS[-1].written[-1][1], published.digest, published.weights_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_version_is_the_one_of_torch_byte_for_byte(dtype: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    adapter = {"rank": 4}
    config = role_config(tmp_path / "model", model={"dtype": dtype}, adapter=adapter)
    due = version_0(TorchTrainer, config, tmp_path)
    found = version_0(JaxTrainer, config | {"trainer": {"backend": "jax"}}, tmp_path)
    assert found == due
    assert BASE in found[0]


# ------------------------------------------------------------ files


def trained(path: Path, steps: int = 2) -> JaxPolicy:
    policy = adapted_policy(path, "llama")
    for version in range(steps):
        policy.step(make_batch(version), rejected_dir=path)
    return policy


def saved(policy: JaxPolicy, directory: Path) -> Path:
    saver = JaxSaver()
    saver.begin(policy, directory)
    return Path(saver.result().path)


def test_a_checkpoint_has_the_adapter_alone_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    policy = trained(tmp_path / "model")
    path = saved(policy, tmp_path / "saved")
    loaded = adapted_policy(tmp_path / "model", "llama")
    load_checkpoint(loaded, path)
    for each in (policy, loaded):
        each.step(make_batch(2), rejected_dir=tmp_path)
    assert set(policy.state.weights) == {LAYERS}
    found, due = (jax.tree.leaves(each.state) for each in (loaded, policy))
    assert all(np.array_equal(one, other) for one, other in zip(found, due, strict=True))


def test_a_run_goes_on_with_the_other_trainer(tmp_path: Path) -> None:
    policy, model = adapted_policy(tmp_path / "model", "llama"), torch_model("llama")
    trainer = make_trainer(model=model, optimizer=OPTIMIZER)
    for each in (policy, trainer):
        each.step(make_batch(), rejected_dir=tmp_path)
    in_torch, in_jax = torch_model("llama"), adapted_policy(tmp_path / "model", "llama")
    resumed = make_trainer(model=in_torch, optimizer=OPTIMIZER)
    torch_files.load_checkpoint(resumed, convert(saved(policy, tmp_path / "a"), tmp_path / "b", "torch"))
    load_checkpoint(in_jax, convert(save_checkpoint(trainer, tmp_path / "c"), tmp_path / "d", "jax"))
    for each in (policy, resumed, in_jax):
        each.step(make_batch(1), rejected_dir=tmp_path)
    due = tensors_of(policy.state.weights, policy)
    found = tensors_of(in_jax.state.weights, in_jax)
    for name, weight in trained_weights(in_torch).items():
        np.testing.assert_allclose(weight.detach(), due[name], atol=1e-5, err_msg=name)
        np.testing.assert_allclose(found[name], due[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_models_and_adapters_are_those_of_torch(dtype: str, tmp_path: Path) -> None:
    policy, start = trained(tmp_path / "model"), tmp_path / "model"
    path = saved(policy, tmp_path / "jax")
    in_torch = convert(path, tmp_path / "torch", "torch")
    options: dict[str, Any] = {"model_path": str(start), "dtype": dtype, "adapter": LORA}
    export_checkpoint(path, tmp_path / "found", **options)
    torch_export.export_checkpoint(in_torch, tmp_path / "due", **options)
    export_adapter(path, tmp_path / "found-adapter", **options)
    torch_export.export_adapter(in_torch, tmp_path / "due-adapter", **options)
    for name, exact in (("model.safetensors", False), ("adapter_model.safetensors", True)):
        ends = "-adapter" * exact
        found, due = (load_file(tmp_path / f"{each}{ends}" / name) for each in ("found", "due"))
        assert found.keys() == due.keys()
        atol = 0 if exact else 1e-6 if dtype == "float32" else 2e-2
        for key, x in due.items():
            assert found[key].dtype == x.dtype
            np.testing.assert_allclose(
                found[key].astype(np.float32), x.astype(np.float32), atol=atol, rtol=0, err_msg=key
            )
    configs = [
        (tmp_path / f"{each}-adapter" / "adapter_config.json").read_text() for each in ("found", "due")
    ]
    assert configs[0] == configs[1]


def test_an_adapter_of_another_rank_is_refused(tmp_path: Path) -> None:
    path = saved(trained(tmp_path / "model", 1), tmp_path / "saved")
    options: dict[str, Any] = {"model_path": str(tmp_path / "model"), "dtype": "float32"}
    with pytest.raises(DataError, match="holds another adapter"):
        export_checkpoint(path, tmp_path / "out", adapter=Adapter(rank=2), **options)


def test_targets_that_no_layer_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no layer of this model has out_proj"):
        adapted_policy(tmp_path, "llama", config=Adapter(rank=2, targets=("out_proj",)))
