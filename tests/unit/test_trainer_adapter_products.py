"""Adapters as a GPU computes them (`kernels.products`): in the rounded matrices, and joined."""

from __future__ import annotations

import pytest
import torch
from test_trainer_adapter import DORA, LORA, in_an_engine, with_adapter
from torch.nn.functional import linear
from trainer_doubles import make_batch, make_trainer, save_checkpoint, save_tiny_model, tiny_model

from millrace.config.tables.training import Optimizer
from millrace.trainer.adapted_linear import adapted_layers, switched_off
from millrace.trainer.files.checkpoint import load_checkpoint
from millrace.trainer.kernels import products
from millrace.trainer.kernels.products import JOINED, ROUNDED, SAME_INPUT
from millrace.trainer.kernels.row_threads import RowThreads
from millrace.trainer.model import recompute_layers

NARROW = torch.bfloat16
TARGETS = pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj")], ids=["all", "some"])


def joined_model(family="qwen3", adapter=LORA, *, moved=True):
    """One product for queries, keys and values, as on a GPU."""
    model = with_adapter(tiny_model(family), adapter, published=NARROW, moved=moved)
    products.install_linear(model)
    for layer in model.base_model.layers:
        setattr(layer.self_attn, SAME_INPUT, ("q_proj", "k_proj", "v_proj"))
    return model


def projections(model):
    attention = model.base_model.layers[0].self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def make_narrow(model, **changes):
    trainer = make_trainer(model=model, dtype=NARROW, published=NARROW, **changes)
    trainer._rows = RowThreads(512)  # one thread: two would add to one gradient
    return trainer


@TARGETS
def test_in_float64_outputs_and_gradients_are_those_of_plain_torch(targets):
    model = joined_model("qwen2", LORA.model_copy(update={"targets": targets})).double()
    layers, generator = projections(model), torch.Generator().manual_seed(2)
    for layer in layers:
        layer.bias.data.normal_(generator=generator)
    x = torch.randn(1, 7, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    trained = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    adapted = [
        layer.weight + LORA.scale * layer.lora_B @ layer.lora_A if hasattr(layer, "lora_A") else layer.weight
        for layer in layers
    ]
    plain = torch.cat([linear(x, w, layer.bias) for w, layer in zip(adapted, layers, strict=True)], -1)
    slope = torch.randn(plain.shape, generator=generator, dtype=torch.float64)
    due = torch.autograd.grad(plain, [x, *trained], slope)
    joined = products._unfilled(layers, torch.float64)
    for layer, block in zip(layers, joined.weight.split(products._outputs(layers)), strict=True):
        setattr(layer, ROUNDED, block)
    products._fill([joined])
    found = products._multiplied(joined, x)
    assert len(trained) == 2 * (len(targets) or 3) and (found - plain).abs().max() < 1e-12
    returned = torch.autograd.grad(found, [x, *trained], slope, retain_graph=True)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    found.backward(slope)
    added = [x.grad, *(parameter.grad - 1 for parameter in trained)]
    for one, other, expected in zip(returned, added, due, strict=True):
        assert (one - expected).abs().max() < 1e-12 and (other - expected).abs().max() < 1e-12


@TARGETS
def test_the_rounded_matrices_are_those_of_the_engine(targets, tmp_path):
    adapter, path = LORA.model_copy(update={"targets": targets}), save_tiny_model(tmp_path)
    trainer = make_narrow(joined_model(adapter=adapter))
    parameters = in_an_engine(path, trainer.model, adapter, NARROW)
    with trainer._serving():
        for name, layer in adapted_layers(trainer.model).items():
            assert torch.equal(getattr(layer, ROUNDED), parameters.named[f"{name}.weight"])
    assert not any(hasattr(m, each) for m in trainer.model.modules() for each in (JOINED, ROUNDED))


def test_layers_that_are_switched_off_compute_without_their_adapters():
    trainer, x = make_narrow(joined_model()), torch.randn(1, 5, 32)
    layers = projections(trainer.model)
    with torch.no_grad(), torch.autocast("cpu", NARROW), trainer._serving():
        (joined,) = products.products(layers, x)
        with switched_off(trainer.model):
            apart = products.products(layers, x)
        assert all(torch.equal(y, linear(x, each.weight)) for y, each in zip(apart, layers, strict=True))
    assert joined.shape[-1] == sum(y.shape[-1] for y in apart)
    assert not torch.equal(joined, torch.cat(apart, -1))


def test_a_resumed_trainer_goes_on_bit_for_bit(tmp_path):
    changes = {"optimizer": Optimizer(lr=1e-3)}
    trainer = make_narrow(joined_model(), **changes)
    trainer.step(make_batch(0), rejected_dir=tmp_path)
    checkpoint = save_checkpoint(trainer, tmp_path)
    resumed = make_narrow(joined_model(moved=False), **changes)
    load_checkpoint(resumed, checkpoint)
    for each in (trainer, resumed):
        each.step(make_batch(1), rejected_dir=tmp_path)
    assert all(map(torch.equal, trainer.trained, resumed.trained))


@pytest.mark.parametrize(("adapter", "rounded"), [(LORA, True), (DORA, False)], ids=["lora", "dora"])
def test_lora_is_in_the_rounded_copies_and_dora_computes_by_itself(adapter, rounded):
    trainer = make_narrow(joined_model(adapter=adapter))
    with trainer._serving():
        assert {hasattr(m, ROUNDED) for m in adapted_layers(trainer.model).values()} == {rounded}
    alone = make_narrow(with_adapter(tiny_model(), adapter, published=NARROW))  # as on a CPU
    with alone._serving():
        assert not any(hasattr(m, ROUNDED) for m in adapted_layers(alone.model).values())


def test_with_recompute_no_copy_of_all_adapted_matrices_is_made():
    model = joined_model()
    recompute_layers(model)
    layer, x = projections(model)[0], torch.randn(1, 3, 32, dtype=NARROW)
    with products.rounded_once(model, NARROW):
        assert not any(hasattr(each, ROUNDED) or hasattr(each, JOINED) for each in projections(model))
        layer(x).sum().backward()
    assert layer.lora_B.grad is not None
