"""The engine on a GPU: its kernel, its recorded steps, what it waits for, weights that come meanwhile."""

from __future__ import annotations

import threading
import warnings

import flash_double
import pytest
import torch
from engine_models import (
    CONFIGS,
    make_engine,
    make_model,
    make_work,
    prompt_of,
    run,
    teacher_forced,
    weights_into,
)

from millrace.core.types import Sampling
from millrace.engines.own.accelerated import flash
from millrace.engines.own.architecture import architecture_of
from millrace.engines.own.attention import Kernel, Segment
from millrace.engines.own.sampler import DIRECT_VOCAB_MAX, draw

pytestmark = pytest.mark.gpu
SHAPES = {name: architecture_of(config) for name, config in CONFIGS.items()}
SERVED = [name for name, shape in SHAPES.items() if shape.head_dim % 8 == 0]
"""Those whose attention a kernel computes."""


def rounded(name: str, seed: int = 0):
    """A model whose weights are the same in bfloat16."""
    model = make_model(name, seed, scale=1.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def bfloat16_engine(model, version=0, **options):
    engine = make_engine(model.bfloat16(), version, device="cuda", dtype="bfloat16", **options)
    model.float()
    return engine


def works(count=10, tokens=40):
    return [
        make_work(i, prompt_of(i, 1 + 9 * i), Sampling(max_tokens=tokens, ignore_eos=True))
        for i in range(count)
    ]


def worst_gap(model, found, sent):
    """Of all log-probs, against Hugging Face on the CPU in float32."""
    gaps = []
    for work in sent:
        tokens, logprobs, _ = found[work.trajectory_id]
        expected = teacher_forced(model, work.prompt, tokens).log_softmax(-1)
        gaps.append((torch.tensor(logprobs) - expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]).abs())
    return torch.cat(gaps)


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_in_float32_are_hugging_faces(name):
    model, sent = make_model(name, scale=1.5), works()
    found = run(make_engine(model, device="cuda", slots=4, prefill_chunk=24), sent)
    assert worst_gap(model, found, sent).max() < 2e-4


@pytest.mark.parametrize("name", SERVED)
def test_logprobs_in_bfloat16_are_hugging_faces(name):
    model, sent = rounded(name), works()
    engine = bfloat16_engine(model, slots=6, prefill_chunk=24)
    assert isinstance(engine._cache, flash.FlashCache)
    gaps = worst_gap(model, run(engine, sent), sent)
    assert gaps.mean() < 0.03 and gaps.max() < 0.4


@pytest.mark.parametrize("counts", [[1, 1, 1], [5, 1, 9], [64]])
@pytest.mark.parametrize("window", [None, 6])
def test_the_kernel_attends_as_its_double(counts, window, gpu):
    kernel = Kernel(scale=0.2, cap=None, windows=(window,), exact=False)
    shape = (1, 4, 2, 96, 32)
    starts = [7, 0, 30][: len(counts)]
    segments = [
        Segment(slot, start, count) for slot, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]
    torch.manual_seed(0)
    tokens = [torch.randn(sum(counts), heads, 32).bfloat16() for heads in (4, 2, 2)]
    keys, values = (torch.randn(1, 4, 96, 2, 32).bfloat16() for _ in range(2))
    outs = []
    for device, dtype in ((gpu, torch.bfloat16), (torch.device("cpu"), torch.float32)):
        cache = flash.FlashCache(shape, dtype, device)
        cache.keys.copy_(keys)
        cache.values.copy_(values)
        out = torch.zeros(sum(counts), 4, 32, dtype=dtype, device=device)
        with pytest.MonkeyPatch.context() as patch:
            if device.type == "cpu":
                patch.setattr(flash, "flash_attention", flash_double.flash_attention)
            flash.flash_prefill(cache, segments, kernel)(0, *(x.to(device, dtype) for x in tokens), out, None)
        outs.append(out.float().cpu())
    assert (outs[0] - outs[1]).norm() / outs[1].norm() < 0.02


def test_recorded_steps_give_what_steps_give(monkeypatch):
    model, sent = rounded("qwen3 tied"), works()
    recorded = run(bfloat16_engine(model, slots=7), sent)
    monkeypatch.setattr(flash, "recorded", lambda step, pool: step)
    plain = run(bfloat16_engine(model, slots=7), sent)
    assert {i: one[0] for i, one in recorded.items()} == {i: one[0] for i, one in plain.items()}


def test_after_a_swap_recorded_steps_compute_with_the_new_weights():
    one, other, sent = rounded("qwen3 tied", 0), rounded("qwen3 tied", 1), works()
    engine = bfloat16_engine(one, slots=7)
    for version, model in ((1, other), (2, one), (3, other)):
        weights_into(engine, model.bfloat16())
        model.float()
        engine.swap(version)
        again = [make_work(100 * version + w.trajectory_id, w.prompt, w.sampling) for w in sent]
        assert worst_gap(model, run(engine, again), again).mean() < 0.03


def test_a_steady_step_waits_once():
    engine = bfloat16_engine(rounded("qwen3 tied"), slots=8)
    engine.submit(works(8, 60))
    for _ in range(20):
        engine.step()
    while engine._batch is None or engine._batch._steps_left < 5:
        engine.step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(one.message) for one in caught if "synchroniz" in str(one.message)]
    assert 1 <= len(waits) <= 3, waits


def test_weights_come_while_steps_go_on():
    one, other = rounded("qwen3 tied", 0), rounded("qwen3 tied", 1)
    engine, sent, digests = bfloat16_engine(one, slots=8), works(8, 100), []
    engine.submit(sent)
    engine.step()
    weights_into(engine, other.bfloat16())
    other.float()
    thread = threading.Thread(target=lambda: digests.append(engine.digest_standby()))
    thread.start()
    while thread.is_alive():
        engine.step()
    thread.join()
    engine.swap(1)
    assert [engine.digest()] == digests


def test_a_large_vocabulary_is_drawn_from_as_on_the_cpu(gpu):
    generator = torch.Generator().manual_seed(0)
    probs = (4 * torch.randn((64, 3 * DIRECT_VOCAB_MAX), generator=generator)).softmax(-1)
    uniforms = torch.rand(64, generator=generator, dtype=torch.float64)
    there = draw(probs.to(gpu), uniforms.to(gpu)).cpu()
    assert (there == draw(probs, uniforms)).float().mean() > 0.9
    assert (probs.gather(1, there[:, None]) > 0).all()
