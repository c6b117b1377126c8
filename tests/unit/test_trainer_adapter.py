"""Adapters: what is trained, published, computed with, saved and exported."""

from __future__ import annotations

import json
import os
import pickle
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trainer_doubles import make_batch, make_trainer, save_checkpoint, save_tiny_model, tiny_model
from transformers import AutoModelForCausalLM
from xxhash import xxh3_64_intdigest

from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.training import Adapter, Optimizer
from millrace.core.digest import NamedBuffer, digest_buffers
from millrace.core.errors import ConfigError, DataError, WeightsError
from millrace.devices.low_rank import adapted, first_down
from millrace.devices.served_weights import Base, Merging, MergingReader
from millrace.engines.own.architecture import read_architecture
from millrace.engines.own.parameters import Parameters
from millrace.placement.memory.needs import adapter_elements
from millrace.trainer.adapted_linear import (
    adapt,
    adapted_layers,
    base_weights,
    published_weights,
    trained_weights,
)
from millrace.trainer.files.checkpoint import load_checkpoint
from millrace.trainer.files.export import export_adapter, export_checkpoint
from millrace.trainer.model import load_model
from millrace.trainer.publish.publisher import PublishBuffers

CPU = torch.device("cpu")
LORA, DORA = Adapter(rank=4, alpha=8.0), Adapter(rank=4, alpha=8.0, kind="dora")
PEFT = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # its own
BOTH = pytest.mark.parametrize("adapter", [LORA, DORA], ids=lambda adapter: adapter.kind)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def with_adapter(model, adapter=LORA, *, published=torch.float32, moved=True):
    """`moved`: as after some steps, with a B that is not 0."""
    adapt(model, adapter, published=published, seed=0)
    generator = torch.Generator().manual_seed(1)
    for layer in adapted_layers(model).values() if moved else ():
        layer.lora_B.data.normal_(0, 0.05, generator=generator)
        if layer.lora_magnitude is not None:
            layer.lora_magnitude.data.normal_(0, 0.05, generator=generator)
    return model


class AdapterReader:
    """A `WeightsReader` of one version."""

    def __init__(self, pieces):
        self._pieces, self.closed = pieces, False

    @contextmanager
    def view(self, version):
        yield digest_buffers(self._pieces), self._pieces

    def close(self):
        self.closed = True


def published(model, dtype):
    return PublishBuffers(published_weights(model, dtype), dtype).fill()


def in_an_engine(path, model, adapter, dtype):
    """The weights that an engine computes with once it has pulled what `model` publishes."""
    parameters = Parameters(read_architecture(str(path)), dtype, CPU)
    into = list(parameters.buffers())
    merging = Merging(str(path), str(dtype).removeprefix("torch."), adapter.scale)
    reader = merging.over(AdapterReader(published(model, dtype)))
    digest = reader.read(0, into)
    assert digest == parameters.digest()
    assert merging.published(digest) == digest_buffers(published(model, dtype))
    return parameters


# ------------------------------------------------------------ training


def written_out(model, adapter, name, layer):
    """The layer in plain torch, for torch to differentiate."""

    def forward(x):
        whole = layer.weight + adapter.scale * layer.lora_B @ layer.lora_A
        if layer.lora_magnitude is not None:
            magnitude = layer.weight.norm(dim=1) + layer.lora_magnitude
            whole = whole * (magnitude / whole.norm(dim=1).detach())[:, None]
        return torch.nn.functional.linear(x, whole, layer.bias)

    layer.forward = forward


@BOTH
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "phi3"])
def test_the_gradient_is_that_of_plain_torch(family, adapter):
    found, plain = (with_adapter(tiny_model(family).double(), adapter) for _ in range(2))
    for name, layer in adapted_layers(plain).items():
        written_out(plain, adapter, name, layer)
    batch = make_batch(version=1)
    for model in (found, plain):
        make_trainer(model=model, dtype=torch.float64).accumulate(batch)
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    assert gradients
    for name, parameter in found.named_parameters():
        if parameter.requires_grad:
            assert (parameter.grad - gradients[name]).abs().max() < 1e-9 * gradients[name].abs().max()
        else:
            assert parameter.grad is None


@PEFT
@BOTH
def test_the_gradient_is_that_of_peft(adapter):
    peft = pytest.importorskip("peft")
    ours = with_adapter(tiny_model().double(), adapter)
    ends = sorted({name.rpartition(".")[2] for name in adapted_layers(ours)})
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=ends, use_dora=adapter.kind == "dora", lora_dropout=0.0
    )
    theirs = peft.get_peft_model(tiny_model(attention="eager").double(), config)
    layers = dict(theirs.base_model.model.named_modules())
    for name, layer in adapted_layers(ours).items():
        layers[name].lora_A["default"].weight.data.copy_(layer.lora_A.data)
        layers[name].lora_B["default"].weight.data.copy_(layer.lora_B.data)
        if layer.lora_magnitude is not None:
            magnitude = layer.weight.norm(dim=1) + layer.lora_magnitude
            layers[name].lora_magnitude_vector["default"].weight.data.copy_(magnitude)
    tokens = torch.randint(0, 64, (1, 20), generator=torch.Generator().manual_seed(2))
    plain = with_adapter(tiny_model(attention="eager").double(), adapter)
    for model in (plain, theirs):
        logprobs = model(input_ids=tokens).logits.log_softmax(-1)
        logprobs.square().mean().backward()
    for name, layer in adapted_layers(plain).items():
        assert (layer.lora_A.grad - layers[name].lora_A["default"].weight.grad).abs().max() < 1e-9
        assert (layer.lora_B.grad - layers[name].lora_B["default"].weight.grad).abs().max() < 1e-9


def test_only_the_adapter_changes_and_has_optimizer_states(tmp_path):
    trainer = make_trainer(model=with_adapter(tiny_model(), moved=False))
    before = {name: weight.clone() for name, weight in base_weights(trainer.model).items()}
    trainer.step(make_batch(), rejected_dir=tmp_path)
    assert all(torch.equal(weight, before[name]) for name, weight in base_weights(trainer.model).items())
    assert set(trainer.optimizer.state) == set(trainer.trained)
    assert all(layer.lora_B.any() for layer in adapted_layers(trainer.model).values())


def test_an_adapter_begins_with_the_numbers_of_torch():
    for layer, shape in (
        ("model.layers.0.self_attn.q_proj", (4, 33)),
        ("model.layers.1.mlp.up_proj", (2, 9)),
    ):
        generator = torch.Generator().manual_seed(xxh3_64_intdigest(f"7 {layer}".encode()) >> 1)
        bound = shape[1] ** -0.5
        due = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        np.testing.assert_allclose(first_down(layer, shape, 7), due, atol=3e-8, rtol=0)


@BOTH
def test_version_0_is_the_model_itself(adapter):
    tokens = torch.arange(20)[None]
    plain, begun = tiny_model(attention="eager"), tiny_model(attention="eager")
    with_adapter(begun, adapter, moved=False)
    assert torch.equal(plain(input_ids=tokens).logits, begun(input_ids=tokens).logits)


@DTYPES
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_a_reference_by_switching_off_is_the_frozen_copy(kl_in, dtype, tmp_path):
    algorithm = PolicyGradient(kl=0.1, kl_in=kl_in)
    found = []
    for by_copy in (False, True):
        model = with_adapter(tiny_model(), published=dtype)
        copy = tiny_model()
        for weight in copy.parameters():
            weight.data.copy_(weight.to(dtype))
        trainer = make_trainer(algorithm, model=model, reference=copy if by_copy else model, published=dtype)
        result = trainer.step(make_batch(), rejected_dir=tmp_path)
        found.append((result.metrics, [p.detach().clone() for p in trainer.trained]))
    (metrics, weights), (of_copy, weights_of_copy) = found
    assert metrics == of_copy and metrics["kl_reference"] != 0
    assert all(map(torch.equal, weights, weights_of_copy))


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_a_resumed_trainer_goes_on_bit_for_bit(rule, tmp_path):
    changes = {"optimizer": Optimizer(lr=1e-3, rule=rule)}
    trainer = make_trainer(model=with_adapter(tiny_model(), DORA), **changes)
    trainer.step(make_batch(0), rejected_dir=tmp_path)
    checkpoint = save_checkpoint(trainer, tmp_path)
    resumed = make_trainer(model=with_adapter(tiny_model(), DORA, moved=False), **changes)
    load_checkpoint(resumed, checkpoint)
    for each in (trainer, resumed):
        each.step(make_batch(1), rejected_dir=tmp_path)
    assert all(map(torch.equal, trainer.trained, resumed.trained))
    saved = load_file(checkpoint / "model.safetensors")
    assert saved.keys() == trained_weights(trainer.model).keys()


# ------------------------------------------------------------ replicas


@BOTH
@DTYPES
def test_an_engine_has_the_very_matrices_that_the_trainer_computes_with(adapter, dtype, tmp_path):
    path = save_tiny_model(tmp_path)
    model = with_adapter(tiny_model(), adapter, published=dtype)
    parameters = in_an_engine(path, model, adapter, dtype)
    for name, layer in adapted_layers(model).items():
        assert torch.equal(parameters.named[f"{name}.weight"], layer.merged().to(dtype))
    assert torch.equal(parameters.embedding, model.get_input_embeddings().weight.to(dtype))


@BOTH
@DTYPES
def test_the_trainer_computes_with_what_is_published(adapter, dtype, tmp_path):
    """Rounded as replicas have it, and not as its own float32 numbers would give it."""
    path = save_tiny_model(tmp_path)
    trainer = make_trainer(model=with_adapter(tiny_model(), adapter, published=dtype), published=dtype)
    parameters = in_an_engine(path, trainer.model, adapter, dtype)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
    name, layer = next(iter(adapted_layers(trainer.model).items()))
    with trainer._serving(), torch.no_grad():
        assert torch.equal(
            layer(x), torch.nn.functional.linear(x, parameters.named[f"{name}.weight"].float())
        )


def test_a_small_part_of_the_bytes_is_published():
    model = with_adapter(tiny_model(), Adapter(rank=1, targets=("q_proj",)))
    sizes = {name: weight.numel() for name, weight in published_weights(model, torch.float32).items()}
    assert sum(sizes.values()) == 2 * (32 + 64) + 32
    assert {name.rpartition(".")[2] for name in sizes} == {"lora_A", "lora_B", "base"}


def test_an_adapter_of_other_weights_is_refused(tmp_path):
    path = save_tiny_model(tmp_path)
    other = with_adapter(tiny_model(seed=3))
    with pytest.raises(WeightsError, match="Every host must have the very files"):
        in_an_engine(path, other, LORA, torch.float32)


def test_weights_that_are_written_meanwhile_are_refused(tmp_path):
    path = save_tiny_model(tmp_path)
    pieces = published(with_adapter(tiny_model()), torch.float32)
    reader = Merging(str(path), "float32", 2.0).over(AdapterReader(pieces))
    with reader.view(0):
        os.utime(path / "model.safetensors", (1, 1))
    with pytest.raises(WeightsError, match="were written while the run reads them"), reader.view(1):
        pass


def test_whole_weights_are_not_taken_for_an_adapter(tmp_path):
    path = save_tiny_model(tmp_path)
    whole = PublishBuffers(dict(tiny_model().state_dict()), torch.float32).fill()
    with pytest.raises(WeightsError, match="is no adapter"):
        Merging(str(path), "float32", 2.0).over(AdapterReader(whole)).read(0, [])


def test_a_view_in_another_process_is_the_same(tmp_path):
    path = save_tiny_model(tmp_path, "llama")
    pieces = published(with_adapter(tiny_model("llama")), torch.float32)
    reader = MergingReader(AdapterReader(pieces), Base(str(path), torch.float32), 2.0)
    with reader.view(0) as (digest, found):
        assert digest == digest_buffers(found)
    reader._reader = None
    other = pickle.loads(pickle.dumps(reader))
    other._reader = AdapterReader([NamedBuffer(p.name, p.dtype, p.shape, p.data.copy()) for p in pieces])
    with other.view(0) as (again, _):
        assert again == digest


# ------------------------------------------------------------ files


@BOTH
@DTYPES
def test_the_exported_model_is_what_replicas_had(adapter, dtype, tmp_path):
    path, dtype_name = save_tiny_model(tmp_path / "start"), str(dtype).removeprefix("torch.")
    trainer = make_trainer(model=with_adapter(load_model(path, CPU), adapter, published=dtype))
    checkpoint = save_checkpoint(trainer, tmp_path)
    export_checkpoint(checkpoint, tmp_path / "out", model_path=str(path), dtype=dtype_name, adapter=adapter)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    parameters = in_an_engine(path, trainer.model, adapter, dtype)
    for name, weight in parameters.named.items():
        assert torch.equal(loaded[name], weight)


@BOTH
def test_an_adapter_is_exported_as_peft_reads_it(adapter, tmp_path):
    path = save_tiny_model(tmp_path / "start")
    trainer = make_trainer(model=with_adapter(load_model(path, CPU), adapter))
    checkpoint = save_checkpoint(trainer, tmp_path)
    export_adapter(checkpoint, tmp_path / "out", model_path=str(path), dtype="float32", adapter=adapter)
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["use_dora"]) == (4, 8.0, adapter.kind == "dora")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    layer = adapted_layers(trainer.model)["model.layers.0.self_attn.q_proj"]
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    assert torch.equal(tensors[f"{prefix}.lora_A.weight"], layer.lora_A)
    if adapter.kind == "dora":
        magnitude = layer.weight.norm(dim=1) + layer.lora_magnitude
        assert torch.allclose(tensors[f"{prefix}.lora_magnitude_vector"], magnitude)


@PEFT
@BOTH
def test_peft_computes_what_was_trained(adapter, tmp_path):
    peft = pytest.importorskip("peft")
    path = save_tiny_model(tmp_path / "start")
    trainer = make_trainer(model=with_adapter(load_model(path, CPU), adapter))
    checkpoint = save_checkpoint(trainer, tmp_path)
    given = {"model_path": str(path), "dtype": "float32", "adapter": adapter}
    export_adapter(checkpoint, tmp_path / "adapter", **given)
    export_checkpoint(checkpoint, tmp_path / "whole", **given)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    beside = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(path), str(tmp_path / "adapter")
    )
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        found, due = (model(input_ids=tokens).logits for model in (beside, whole))
    assert (found - due).abs().max() < 1e-4


def test_an_adapter_of_another_rank_is_not_exported(tmp_path):
    path = save_tiny_model(tmp_path / "start")
    checkpoint = save_checkpoint(make_trainer(model=with_adapter(load_model(path, CPU))), tmp_path)
    with pytest.raises(DataError, match="of another model"):
        export_checkpoint(
            checkpoint, tmp_path / "out", model_path=str(path), dtype="float32", adapter=Adapter(rank=8)
        )


# ------------------------------------------------------------ configuration


def test_targets_that_no_layer_has_are_refused():
    with pytest.raises(ConfigError, match=r"no layer of this model has qproj"):
        with_adapter(tiny_model(), Adapter(rank=4, targets=("qproj",)))


def test_experts_get_no_adapters(tmp_path):
    path = save_tiny_model(tmp_path, "qwen3_moe")
    for refused in (lambda: with_adapter(tiny_model("qwen3_moe")), lambda: adapter_elements(path, LORA)):
        with pytest.raises(ConfigError, match="experts"):
            refused()


@BOTH
@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")])
def test_the_size_of_an_adapter_is_known_from_the_files(targets, adapter, tmp_path):
    path, adapter = save_tiny_model(tmp_path), adapter.model_copy(update={"targets": targets})
    weights = trained_weights(with_adapter(tiny_model(), adapter))
    assert adapter_elements(path, adapter) == sum(weight.numel() for weight in weights.values())


def test_a_row_is_as_long_as_its_magnitude_says():
    weight, up, down = torch.randn(3, 5), torch.randn(3, 2), torch.randn(2, 5)
    whole = adapted(weight, down, up, torch.full((3,), 0.5), scale=2.0)
    assert torch.allclose(whole.norm(dim=1), weight.norm(dim=1) + 0.5)
