"""The learning rate by version, weight decay by kind of parameter, and Muon."""

from __future__ import annotations

import copy

import pytest
import torch
from model_table import facts
from pydantic import ValidationError
from trainer_doubles import CONFIGS, make_batch, make_trainer, save_checkpoint, tiny_model, weights_of
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from millrace.config.tables.training import Optimizer
from millrace.trainer.batch.batch_step import decays, learning_rate
from millrace.trainer.files.checkpoint import load_checkpoint
from millrace.trainer.model import row_logprobs
from millrace.trainer.optimizer import is_matrix, make_optimizer
from millrace.trainer.ranks import blocks
from millrace.trainer.ranks.blocks import UPDATE_THREADS_MAX, computing_device, update_threads
from millrace.trainer.ranks.mesh import Ranks

MUON = Optimizer(rule="muon", lr=1e-3)


def rates(config, count):
    return [learning_rate(config, version) for version in range(count)]


def test_a_linear_rate_worked_by_hand():
    config = Optimizer(lr=0.8, warmup_steps=2, decay="linear", decay_steps=6, lr_end=0.5)
    assert rates(config, 8) == pytest.approx([0.4, 0.8, 0.8, 0.7, 0.6, 0.5, 0.4, 0.4])


def test_a_cosine_rate_worked_by_hand():
    config = Optimizer(lr=1.0, decay="cosine", decay_steps=4)
    root = 2**0.5
    assert rates(config, 6) == pytest.approx([1.0, (2 + root) / 4, 0.5, (2 - root) / 4, 0.0, 0.0])


def test_a_constant_rate_stays():
    assert rates(Optimizer(lr=0.3, warmup_steps=3), 5) == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.3])


@pytest.mark.parametrize(
    "changes",
    [
        {"decay": "linear"},
        {"decay_steps": 10},
        {"decay": "cosine", "decay_steps": 5, "warmup_steps": 5},
        {"rule": "muon", "states": "8bit"},
    ],
)
def test_settings_that_do_not_belong_together_are_refused_by_name(changes):
    with pytest.raises(ValidationError, match=r"`optimizer\.\w+` \("):
        Optimizer(**changes)


def ones_without_gradient(family, rule):
    """The parameters of a tiny model after one update: each was 1, with a gradient of 0."""
    model = tiny_model(family)
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)
    make_optimizer(model, Optimizer(rule=rule, lr=0.1, weight_decay=0.1)).step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("rule", ["adamw", "muon"])
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_weight_decay_shrinks_matrices_and_leaves_biases_norms_and_sinks(family, rule):
    for name, parameter in ones_without_gradient(family, rule).items():
        shrinks = parameter.ndim > 1 and "bias" not in name
        assert torch.allclose(parameter, torch.tensor(0.99 if shrinks else 1.0)), name


@pytest.mark.parametrize("name", sorted(facts()))
def test_only_weights_of_linear_layers_embeddings_and_experts_decay(name):
    text = {**facts()[name].text_config, "num_hidden_layers": 1, "layer_types": None}
    config = CONFIG_MAPPING[text["model_type"]].from_dict(text)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    modules = dict(model.named_modules())
    for parameter_name, parameter in model.named_parameters():
        owner, _, own = parameter_name.rpartition(".")
        kind = type(modules[owner]).__name__
        plain = kind in ("Linear", "Embedding") or kind.endswith(("Embedding", "Router", "Experts", "Gate"))
        due = plain and parameter.ndim > 1 and not own.endswith("bias")
        assert decays(parameter_name, parameter.ndim) == due, (parameter_name, kind)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_norm.weight",  # Cohere: one for each head
        "model.layers.0.mlp.experts.gate_up_proj_bias",
        "model.layers.0.mlp.experts.down_proj.bias",
        "model.layers.0.mlp.gate.e_score_correction_bias",
        "model.layers.0.self_attn.sinks",
        "model.layers.0.mixer.A_log",
        "model.layers.0.mixer.D",
        "model.layers.0.linear_attn.dt_bias",
        "model.layers.0.LayerNorm2.weight",
        "model.layers.0.mlp.per_expert_scale",
        "transformer.h.0.ln_1.weight",
        "model.layers.0.self_attn.q_proj.lora_magnitude",
        "model.layers.0.layer_scale.gamma",
    ],
)
def test_a_bias_or_scale_that_is_a_matrix_has_no_decay_and_is_not_of_muon(name):
    assert not decays(name, 2)
    assert not is_matrix(name, torch.nn.Parameter(torch.zeros(2, 2)))


@pytest.mark.parametrize(
    "name",
    ["lm_head.weight", "model.layers.0.mlp.experts.down_proj", "model.layers.0.mlp.router.weight",
     "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.self_attn.q_proj.lora_A",
     "model.layers.0.mlp.gate_up_proj.weight"],
)  # fmt: skip
def test_a_matrix_decays(name):
    assert decays(name, 2) and not decays(name, 1)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_muon_goes_on_from_its_state_dict(family):
    one, other = (tiny_model(family) for _ in range(2))
    optimizers = [make_optimizer(model, MUON) for model in (one, other)]

    def updated(model, optimizer):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()

    updated(one, optimizers[0])
    other.load_state_dict(one.state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    optimizers[1].param_groups[-1]["lr"] = optimizers[0].param_groups[-1]["lr"] = 0.5
    for model, optimizer in zip((one, other), optimizers, strict=True):
        updated(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_muon_moves_matrices_by_orthogonal_updates_and_adamw_the_rest(family, tmp_path):
    rules = (Optimizer(lr=1e-3), MUON)
    adam, muon = (make_trainer(optimizer=rule, model=tiny_model(family)) for rule in rules)
    before = weights_of(muon)
    for trainer in (adam, muon):
        trainer.step(make_batch(), rejected_dir=tmp_path)
    for (name, _), old, one, other in zip(
        muon.model.named_parameters(), before, weights_of(adam), weights_of(muon), strict=True
    ):
        if ".layers." in name and old.ndim == 2 and "bias" not in name:
            sizes = torch.linalg.svdvals((other - old).float())
            assert sizes.max() < 2 * sizes.median(), name
        else:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_a_checkpoint_of_muon_goes_on_as_without_it(tmp_path):
    trainer, other = make_trainer(optimizer=MUON), make_trainer(optimizer=MUON)
    trainer.step(make_batch(0), rejected_dir=tmp_path)
    load_checkpoint(other, save_checkpoint(trainer, tmp_path))
    for each in (trainer, other):
        each.step(make_batch(1), rejected_dir=tmp_path)
    for one, two in zip(weights_of(trainer), weights_of(other), strict=True):
        assert torch.equal(one, two)


def test_an_update_on_several_threads_makes_the_same_bits(tmp_path):
    config = Optimizer(lr=1e-2, weight_decay=0.1, grad_clip=0.1)
    one, two = make_trainer(optimizer=config), make_trainer(optimizer=config)
    two._update_threads, counts = 2, []
    two.optimizer.register_step_pre_hook(lambda *_: counts.append(torch.get_num_threads()))
    for trainer in (one, two):
        trainer.step(make_batch(), rejected_dir=tmp_path)
    assert counts == [2]
    assert all(torch.equal(a, b) for a, b in zip(one.trained, two.trained, strict=True))


def test_threads_update_weights_only_where_a_gpu_computes_with_weights_of_the_host(monkeypatch):
    monkeypatch.setattr(blocks.os, "sched_getaffinity", lambda _: range(96))
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert update_threads(Ranks(offload=True, shard=8), gpu) == 12
    assert update_threads(Ranks(offload=True, shard=16, hosts=2), gpu) == 12
    assert update_threads(Ranks(offload=True), gpu) == UPDATE_THREADS_MAX
    assert update_threads(Ranks(offload=True), cpu) == update_threads(Ranks(shard=8), gpu) == 0


def test_the_device_that_computes_is_the_one_that_a_model_was_loaded_for():
    model = make_trainer().model
    assert computing_device(model) == torch.device("cpu")
    model.computes_on = torch.device("meta")
    assert computing_device(model) == torch.device("meta")
    row = make_trainer()._prepared(make_batch(), 1).rows[0][0]
    with pytest.raises(Exception, match="meta"):  # its inputs go there
        row_logprobs(model, row, temperature=1.0, dtype=torch.float32)
