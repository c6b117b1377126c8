"""A mesh of devices changes no step: eight simulated devices against one."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from mesh_doubles import STEPS, Axes, mesh_policy, named, uneven_batch
from safetensors.numpy import load_file, save_file
from test_algorithms_presets import PRESETS
from trainer_doubles import SIZE, make_batch, tiny_model

from millrace.algorithms import build
from millrace.core.errors import ConfigError, DataError
from millrace.core.types import StepResult
from millrace_jax import forward, gradients
from millrace_jax.decoder import read_architecture
from millrace_jax.devices.mesh import make_mesh
from millrace_jax.gradients import sequences, tokens_of
from millrace_jax.policy import JaxPolicy
from millrace_jax.weights import LAYERS, read_weights

OWN = {"compilations", "compile_s", "micro_batches", "forwarded_tokens"}
MESHES: list[tuple[int, Axes]] = [
    (2, (2, 1, 1)), (4, (2, 1, 1)), (4, (1, 2, 2)), (8, (8, 1, 1)), (8, (4, 2, 1)), (8, (2, 2, 2)),
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A saved model by its family and changes to it."""

    def save(family: str, **changes: Any) -> Path:
        path = tmp_path_factory.mktemp("model")
        tiny_model(family, **changes).save_pretrained(path)
        return path

    return save


def stepped(policy: JaxPolicy, rejected_dir: Path, steps: int = 3) -> StepResult:
    for version in range(steps):
        result = policy.step(uneven_batch(version), rejected_dir=rejected_dir)
    return result


def assert_same(found: JaxPolicy, result: StepResult, due: JaxPolicy, expected: StepResult) -> None:
    weights = named(due.state.weights)
    for name, weight in named(found.state.weights).items():
        np.testing.assert_allclose(weight, weights[name], atol=1e-5, rtol=0, err_msg=name)
    assert set(result.metrics) == set(expected.metrics)
    for name in set(expected.metrics) - OWN:
        assert result.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4, abs=1e-5), name
    assert result.trained_tokens == expected.trained_tokens


@pytest.mark.parametrize("family, changes", [
    ("qwen3", {}), ("qwen3", {"tie_word_embeddings": False}), ("gemma3", {}),
])  # fmt: skip
def test_steps_are_those_of_one_device(family: str, changes: Any, saved: Any, tmp_path: Path) -> None:
    path = saved(family, **changes)
    due = mesh_policy(path, 1, (1, 1, 1))
    begun = named(due.state.weights)
    expected = stepped(due, tmp_path)
    assert all(np.abs(begun[name] - x).max() > 1e-4 for name, x in named(due.state.weights).items())
    for devices, axes in MESHES if family == "qwen3" and not changes else MESHES[-2:]:
        found = mesh_policy(path, devices, axes)
        assert_same(found, stepped(found, tmp_path), due, expected)


def test_a_critic_a_reference_and_several_updates_are_those_of_one_device(saved: Any, tmp_path: Path) -> None:
    path, reference = saved("qwen2"), saved("qwen2", seed=1)
    algorithm = build(PRESETS["ppo"]())
    changes = {"algorithm": algorithm, "minibatches": 2, "epochs": 2}
    make = partial(mesh_policy, path, reference=reference if algorithm.needs_reference else None, **changes)
    due, found = make(1, (1, 1, 1)), make(8, (2, 2, 1))
    assert found.state.head is not None
    expected = stepped(due, tmp_path, 2)
    assert_same(found, stepped(found, tmp_path, 2), due, expected)
    np.testing.assert_allclose(found.state.head["weight"], due.state.head["weight"], atol=1e-5)


def test_long_rows_are_computed_in_blocks(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved("gemma3")
    due = mesh_policy(path, 1, (1, 1, 1), token_budget=256)
    expected = stepped(due, tmp_path, 1)
    monkeypatch.setattr(forward, "BLOCK", 32)
    monkeypatch.setattr(gradients, "CHUNK_LOGITS", 16 * SIZE["vocab_size"])
    for devices, axes in ((1, (1, 1, 1)), (4, (1, 2, 2))):
        found = mesh_policy(path, devices, axes, token_budget=256)
        assert_same(found, stepped(found, tmp_path, 1), due, expected)


# ------------------------------------------------------------ what a device holds


def test_a_device_reads_and_holds_its_part(saved: Any) -> None:
    path = saved("qwen3")
    policy = mesh_policy(path, 8, (4, 2, 1))
    whole = load_file(path / "model.safetensors")
    name = "self_attn.o_proj.weight"
    stacked = np.stack([whole[f"{LAYERS}.{index}.{name}"] for index in range(2)])
    for tree in (policy.state.weights, policy.state.moments.mu, policy.gradient[0]):
        array = tree[LAYERS][name]
        assert {part.data.size for part in array.addressable_shards} == {stacked.size // 8}
    for part in policy.state.weights[LAYERS][name].addressable_shards:
        np.testing.assert_array_equal(part.data, stacked[part.index])


def computations(text: str) -> dict[str, list[int]]:
    """The elements of what each computation of a compiled program gathers."""
    gathers: dict[str, list[int]] = {}
    for line in text.splitlines():
        if re.match(r"(ENTRY )?%[\w.\-]+ .*\{$", line):
            name = line.split()[0]
            gathers[name] = []
        elif found := re.search(r"= \(?\w+\[([\d,]*)\]\S* all-gather(-start)?\(", line):
            gathers[name].append(int(np.prod([int(size) for size in found[1].split(",")])))
    return gathers


@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_is_gathered_in_the_loop_and_again_for_the_gradient(recompute: bool, saved: Any) -> None:
    path = saved("qwen2", num_hidden_layers=5, layer_types=["full_attention"] * 5)
    policy = mesh_policy(path, 8, (8, 1, 1), recompute=recompute)
    prepared = policy._prepared(make_batch(groups=2), 1)
    rows = next(policy._sets(prepared.rows[0]))
    tokens, count = tokens_of(prepared.flat, rows, np.float32), sequences(prepared.flat)
    weights = policy.state.weights, None
    program = policy._accumulated.lower(weights, policy.gradient, rows, tokens, 0.0, count=count)
    gathers = computations(program.compile().as_text())
    layer = sum(int(np.prod(shape)) for shape in policy.shape.layer_shapes.values() if len(shape) == 2)
    loops = [sum(sizes) for name, sizes in gathers.items() if name != "ENTRY" and sizes]
    assert loops == [layer, layer]
    vocabulary = 2 * policy.shape.vocab * policy.shape.hidden_size
    outputs = 2 * rows.targets_RN.size
    assert sum(gathers["ENTRY"]) <= vocabulary + outputs


# ------------------------------------------------------------ programs


def test_a_run_compiles_few_programs(saved: Any, tmp_path: Path) -> None:
    """Rows have one or two full shapes and a rest, whatever the lengths of completions are."""
    policy = mesh_policy(saved("qwen3"), 2, (2, 1, 1), token_budget=256)
    results = [
        policy.step(make_batch(version, groups=3 + 3 * (version % 4)), rejected_dir=tmp_path)
        for version in range(12)
    ]
    compiled = [result.metrics["compilations"] for result in results]
    assert 3 <= sum(compiled) <= 10  # and 3 before the first step
    assert compiled[8:] == [0.0] * 4
    assert results[0].metrics["compile_s"] > results[-1].metrics["compile_s"] == 0.0


# ------------------------------------------------------------ refusals


@pytest.mark.parametrize("axes, message", [
    ((1, 4, 1), r"`trainer.tensor` \(4\) must divide the model's `num_key_value_heads` \(2\)"),
    ((3, 1, 1), r"`trainer.shard` \(3\) must divide the model's `hidden_size` \(32\)"),
    ((1, 1, 3), r"`trainer.sequence` \(3\) must divide the tokens of the shortest row \(128\)"),
])  # fmt: skip
def test_an_axis_that_does_not_divide_the_model_is_refused(axes: Axes, message: str, saved: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        mesh_policy(saved("qwen3"), int(np.prod(axes)), axes)


def test_axes_that_do_not_divide_the_devices_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"`trainer.shard` \(3\) x .* is 3, and does not divide the 8 devices"
    ):
        make_mesh(3, 1, 1, jax.devices())


@pytest.mark.parametrize("fault", ["not finite", "missing", "of another shape", "left over"])
def test_weights_that_are_not_whole_are_refused(fault: str, saved: Any) -> None:
    path, name = saved("qwen3"), "model.layers.1.self_attn.k_proj.weight"
    shape, mesh = read_architecture(path), make_mesh(2, 2, 1, jax.devices()[:4])
    tensors = load_file(path / "model.safetensors")
    taken = tensors.pop(name)
    changed = {
        "not finite": {name: np.full_like(taken, np.nan)},
        "missing": {},
        "of another shape": {name: taken[1:]},
        "left over": {name: taken, f"{name}.more": taken},
    }
    save_file(tensors | changed[fault], path / "model.safetensors")
    with pytest.raises(DataError, match=f"{fault}: {name}"):
        read_weights(path, shape, mesh)


def test_the_tensors_of_a_drafter_are_left_out(saved: Any) -> None:
    path = saved("qwen3")
    shape, mesh = read_architecture(path), make_mesh(1, 1, 1, jax.devices()[:1])
    due, tensors = read_weights(path, shape, mesh), load_file(path / "model.safetensors")
    save_file(tensors | {"drafter.fuse": np.zeros((32, 64), np.float32)}, path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, read_weights(path, shape, mesh), due)


# ------------------------------------------------------------ several processes


def test_two_processes_with_two_devices_each_make_the_same_steps(saved: Any, tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path / "model")
    due = mesh_policy(tmp_path / "model", 1, (1, 1, 1))
    expected = stepped(due, tmp_path, STEPS)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    script = Path(__file__).parent / "mesh_process.py"
    commands = [[sys.executable, str(script), str(index), port, str(tmp_path)] for index in range(2)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors[-2000:]
    finally:
        for process in processes:
            process.kill()
    with np.load(tmp_path / "weights.npz") as found:
        assert found["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-4)
        for name, weight in named(due.state.weights).items():
            np.testing.assert_allclose(found[name], weight, atol=1e-5, rtol=0, err_msg=name)
    assert list((tmp_path / "programs").iterdir())
