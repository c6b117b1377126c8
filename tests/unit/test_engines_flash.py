"""The engine with the attention and the recorded steps that it has on a GPU, against its way on a CPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from inspect import signature

import flash_double
import pytest
import torch
from engine_models import CONFIGS, make_engine, make_model, make_work, prompt_of, run, weights_into
from tests.long import covering

from millrace.core.types import Sampling
from millrace.devices import operators
from millrace.devices.gpu import has_flash
from millrace.engines.own.accelerated import flash, fused
from millrace.engines.own.accelerated.fused import FusedPass
from millrace.engines.own.architecture import architecture_of
from millrace.engines.own.cache import KVCache
from millrace.engines.own.sampler import BLOCK, DIRECT_VOCAB_MAX, draw

COMPOSED = [name for name, c in CONFIGS.items() if (a := architecture_of(c)).cap is not None or a.sinks]
"""torch's kernel does not compute their attention."""


def works():
    """More than slots, of several lengths, two of them one group; they end at different times."""
    settings = [Sampling(max_tokens=5 + 7 * i, logprobs=2 * (i % 2), ignore_eos=True) for i in range(9)]
    lengths = (1, 2, 17, 64, 90, 3, 30, 30, 5)
    return [make_work(i, prompt_of(i, n), s) for i, (n, s) in enumerate(zip(lengths, settings, strict=True))]


@pytest.mark.parametrize(("name", "slots"), covering(CONFIGS, [3, 11]))
def test_it_generates_what_the_other_way_generates(name, slots, monkeypatch):
    model = make_model(name, scale=1.5)
    expected = run(make_engine(model, slots=slots, prefill_chunk=24), works())
    flash_double.install(monkeypatch)
    engine = make_engine(model, slots=slots, prefill_chunk=24)
    assert isinstance(engine._cache, flash.FlashCache) and isinstance(engine._forward, FusedPass)
    assert "fused kernels" in engine.computes
    assert ("recorded" in engine.computes) != bool(architecture_of(CONFIGS[name]).routed)
    found = run(engine, works())
    for trajectory_id, (tokens, logprobs, _) in expected.items():
        assert found[trajectory_id][0] == tokens
        assert (torch.tensor(found[trajectory_id][1]) - torch.tensor(logprobs)).abs().max() < 2e-5


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("name", COMPOSED)
def test_caps_and_sinks_need_the_own_kernel_and_padded_keys_without(name, broken, monkeypatch):
    model = make_model(name, scale=1.5)
    expected = run(make_engine(model, slots=3, prefill_chunk=24), works())
    flash_double.install(monkeypatch)
    monkeypatch.delattr(flash, "flash_attention")
    if broken:
        monkeypatch.setattr(fused, "disagreement", lambda *_: 1.0)
    engine = make_engine(model, slots=3, prefill_chunk=24)
    assert isinstance(engine._forward, FusedPass) != broken
    assert type(engine._cache) is (KVCache if broken else flash.FlashCache)
    found = run(engine, works())
    for trajectory_id, (tokens, logprobs, _) in expected.items():
        assert found[trajectory_id][0] == tokens
        assert (torch.tensor(found[trajectory_id][1]) - torch.tensor(logprobs)).abs().max() < 2e-5


@pytest.mark.parametrize("broken", ["rotated", "attended", "gated_linear", "added"])
def test_a_kernel_that_is_wrong_is_left_and_the_log_says_so(broken, monkeypatch, caplog):
    flash_double.install(monkeypatch)
    model, sent = make_model(scale=1.5), works()[:3]
    expected = run(make_engine(model), sent)
    right = getattr(fused, broken)
    monkeypatch.setattr(fused, broken, lambda *arguments: 1.1 * right(*arguments))  # what is compared with
    engine = make_engine(model)
    assert not isinstance(engine._forward, FusedPass) and "it is off by 0.09" in caplog.text
    assert {i: one[0] for i, one in run(engine, sent).items()} == {i: one[0] for i, one in expected.items()}


@pytest.mark.parametrize(("name", "ignored"), [("gpt_oss", "sinks_H"), ("gemma2", "cap")])
def test_a_kernel_that_ignores_caps_or_sinks_is_wrong(name, ignored, monkeypatch):
    shape, place = architecture_of(CONFIGS[name]), [*signature(fused.attended).parameters].index(ignored)
    if shape.cap is not None:
        shape = replace(shape, cap=50.0, scale=1 / 16)  # of published models, whose scores are mostly small
    right, asked = fused.attended, (shape, torch.bfloat16, torch.device("cpu"))
    assert fused.disagreement(*asked) == 0
    monkeypatch.setattr(fused, "attended", lambda *x: right(*x[:place], None, *x[place + 1 :]))
    assert fused.disagreement(*asked) > 5 * fused.TOLERANCE


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("broken", ["chosen", "by_expert", "gated_rows", "added_experts"])
def test_a_kernel_of_a_mixture_that_is_wrong_is_left(broken, name, monkeypatch, caplog):
    flash_double.install(monkeypatch)
    model, right = make_model(name), getattr(fused, broken)

    def wrong(*arguments):
        found = right(*arguments)
        return 1 + found if isinstance(found, torch.Tensor) else tuple(1 + x for x in found)

    monkeypatch.setattr(fused, broken, wrong)
    assert not isinstance(make_engine(model)._forward, FusedPass)
    assert "without a fused kernel" in caplog.text


def test_a_kernel_that_gives_no_number_is_left(monkeypatch, caplog):
    flash_double.install(monkeypatch)
    right = fused.gated_linear
    monkeypatch.setattr(fused, "gated_linear", lambda *arguments: torch.nan * right(*arguments))
    assert not isinstance(make_engine(make_model())._forward, FusedPass) and "off by nan" in caplog.text


def test_without_triton_there_are_no_kernels_and_the_log_says_so(monkeypatch, caplog):
    flash_double.install(monkeypatch)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "millrace.engines.own.accelerated.layer_tiles", raising=False)
    monkeypatch.setattr(
        fused, "disagreement", lambda *_: operators._by_kernel(fused.KERNELS, "rotated", torch.ones(1))
    )
    engine = make_engine(make_model())
    assert not isinstance(engine._forward, FusedPass) and "fused" not in engine.computes
    assert "without a fused kernel: " in caplog.text and "triton" in caplog.text


def test_a_step_may_run_twice_as_while_it_is_recorded(monkeypatch):
    """It reads nothing that it wrote: the same step again writes the same."""
    flash_double.install(monkeypatch)
    model = make_model(scale=1.5)
    once = run(make_engine(model, slots=5), works())
    monkeypatch.setattr(flash, "recorded", lambda step, pool: lambda: (step(), step()))
    assert run(make_engine(model, slots=5), works()) == once


def test_few_numbers_of_rows_are_recorded_and_both_sets_of_weights(monkeypatch):
    flash_double.install(monkeypatch)
    model, made = make_model(), []
    monkeypatch.setattr(flash, "recorded", lambda step, pool: made.append(step) or step)
    engine = make_engine(model, slots=20)
    for version in (0, 1, 2):
        works = [make_work(20 * version + i, prompt_of(i, 9), Sampling(max_tokens=2 + i)) for i in range(20)]
        run(engine, works)
        weights_into(engine, model)
        engine.swap(version + 1)
    keys = [(id(step.args[0]), step.args[1]) for step in made]
    assert len(keys) == len(set(keys)) and {rows for _, rows in keys} == {8, 16, 20}
    assert len({weights for weights, _ in keys}) == 2


def test_a_padded_slot_that_waits_for_its_prompt_keeps_what_it_has(monkeypatch):
    """Its row is computed too, and writes behind its last valid position."""
    flash_double.install(monkeypatch)
    model = make_model(scale=1.5)
    short, long = (
        make_work(0, prompt_of(0, 4), Sampling(max_tokens=60)),
        make_work(1, prompt_of(1, 80), Sampling(max_tokens=9)),
    )
    alone = run(make_engine(model, slots=4, prefill_chunk=8), [long])[1]
    beside = run(make_engine(model, slots=4, prefill_chunk=8), [short, long])[1]
    assert alone[0] == beside[0]


@pytest.mark.parametrize("vocab", [DIRECT_VOCAB_MAX + 1, DIRECT_VOCAB_MAX + BLOCK, 20_000])
def test_a_large_vocabulary_is_drawn_from_as_its_cumulative_distribution_says(vocab):
    generator = torch.Generator().manual_seed(0)
    probs = (4 * torch.randn((64, vocab), generator=generator)).softmax(-1)
    probs[:, ::3] = 0  # masked
    uniforms = torch.rand(64, generator=generator, dtype=torch.float64)
    uniforms[:2] = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64)
    tokens = draw(probs, uniforms)
    probs = probs.double() / probs.sum(-1, keepdim=True, dtype=torch.float64)
    upper = probs.cumsum(-1)
    chosen = upper.gather(1, tokens[:, None])[:, 0]
    each = probs.gather(1, tokens[:, None])[:, 0]
    assert (each > 0).all()
    assert (uniforms <= chosen + 1e-9).all() and (uniforms >= chosen - each - 1e-9).all()


def test_of_a_large_vocabulary_a_row_is_drawn_alike_alone_and_among_others():
    probs = (
        4 * torch.randn((16, DIRECT_VOCAB_MAX + 77), generator=torch.Generator().manual_seed(1))
    ).softmax(-1)
    uniforms = torch.rand(16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    whole = draw(probs, uniforms)
    assert torch.equal(whole, torch.cat([draw(probs[i : i + 1], uniforms[i : i + 1]) for i in range(16)]))


def test_a_row_of_nan_finds_no_token():
    probs = torch.full((1, DIRECT_VOCAB_MAX + 1), torch.nan)
    assert draw(probs, torch.tensor([0.5], dtype=torch.float64)).item() >= DIRECT_VOCAB_MAX


def test_a_copied_slot_is_the_same_in_both_caches():
    shape, numbers = (2, 3, 2, 16, 8), torch.randn(2, 16, 2, 8)
    caches = [kind(shape, torch.float32, torch.device("cpu")) for kind in (KVCache, flash.FlashCache)]
    for cache in caches:
        cache.allocate()
        cache.allocate()
        cache.extend(0, 5)
    caches[0].values[:, 0] = numbers.transpose(1, 2)
    caches[1].values[:, 0] = numbers
    for cache in caches:
        cache.copy(0, 1, 5)
    assert torch.equal(caches[0].values[:, 1].transpose(1, 2)[:, :5], caches[1].values[:, 1, :5])
    assert caches[1].lengths == [5, 5] and not caches[1].values[:, 1, 5:].any()


def test_only_a_gpu_in_16_bits_has_it():
    assert not has_flash(torch.device("cpu"), torch.bfloat16, 128)
    assert not has_flash(torch.device("cuda"), torch.float32, 128)
    assert not has_flash(torch.device("cuda"), torch.bfloat16, 18)
