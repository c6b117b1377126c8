"""After a swap the engine equals a fresh one with the new weights, and serves what it digests."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from engine_models import (
    CONFIGS,
    collect,
    drain,
    make_engine,
    make_exact_engine,
    make_model,
    make_work,
    prompt_of,
    run,
    weights_into,
)
from msgspec.structs import replace
from tests.long import few

from millrace.core.digest import NamedBuffer, digest_buffers
from millrace.core.types import Progress, Sampling
from millrace.engines.own import torch_engine as engines
from millrace.engines.own.accelerated import row_matmul
from millrace.placement import number_format

SAMPLING = Sampling(max_tokens=40)


def works(lease: int = 0) -> list:
    return [make_work(i, prompt_of(i // 2, 20), SAMPLING, group_id=i // 2, lease=lease) for i in range(6)]


def buffers_of(model) -> list[NamedBuffer]:
    return [
        NamedBuffer(name, "float32", tuple(p.shape), p.detach().view(-1).view(torch.uint8).numpy())
        for name, p in model.named_parameters()
    ]


@pytest.mark.parametrize("name", few(CONFIGS, 6))
def test_after_a_swap_the_engine_equals_a_fresh_one(name: str) -> None:
    old, new = make_model(name, seed=1), make_model(name, seed=2)
    engine = make_exact_engine(old, version=1, eos_ids=())
    before = run(engine, works())
    weights_into(engine, new)
    engine.swap(2)
    engine.submit(
        [make_work(w.trajectory_id, w.prompt, SAMPLING, group_id=w.group_id, lease=1) for w in works()]
    )
    after = collect(drain(engine))
    assert after == run(make_exact_engine(new, eos_ids=()), works()) and after != before


@pytest.mark.parametrize("name", few(CONFIGS, 6))
def test_trajectories_in_flight_go_on_as_in_a_fresh_engine_that_resumes_them(name: str) -> None:
    old, new = make_model(name, seed=1), make_model(name, seed=2)
    engine = make_exact_engine(old, version=1, eos_ids=(), prefill_chunk=16)
    engine.submit(works())
    for _ in range(15):
        engine.step()
    weights_into(engine, new)
    engine.swap(2)
    progress = drain(engine)
    known: dict[int, list[int]] = {}
    for part in under(1, progress):
        known.setdefault(part.trajectory_id, []).extend(part.columns.tokens)
    assert len(known) == 6
    resumed = [
        make_work(w.trajectory_id, w.prompt, SAMPLING, group_id=w.group_id, tokens=known[w.trajectory_id])
        for w in works()
    ]
    assert collect(list(under(2, progress))) == run(make_exact_engine(new, eos_ids=()), resumed)


def test_a_wide_model_is_packed_anew_after_each_swap_and_after_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are plain here, so that this holds on any CPU."""
    copies: list[torch.Tensor] = []
    monkeypatch.setattr(row_matmul, "packing_pays", lambda weight: True)
    monkeypatch.setattr(row_matmul, "packed", lambda weight: copies.append(weight.clone()) or copies[-1])
    monkeypatch.setattr(row_matmul, "matmul_packed", lambda x, copy: x @ copy.t())
    monkeypatch.setattr(row_matmul, "WIDE", 8)
    monkeypatch.setattr(row_matmul, "PACKED_ROWS_MIN", 1)
    old, new = make_model(seed=1), make_model(seed=2)
    engine = make_engine(old, version=1, eos_ids=())
    before, made = run(engine, works()), len(copies)
    for lease in range(1, 4):
        weights_into(engine, new)
        engine.swap(2)
        engine.submit(
            make_work(w.trajectory_id, w.prompt, SAMPLING, group_id=w.group_id, lease=lease) for w in works()
        )
        after = collect(drain(engine))
        engine.sleep()
        engine.wake()
    assert made > 0 and len(copies) == 4 * made
    assert after == run(make_engine(new, eos_ids=()), works()) and after != before


def test_without_recomputing_trajectories_keep_their_cache_and_new_ones_never_share_it() -> None:
    old, new = make_model(seed=1), make_model(seed=2)
    engine = make_engine(old, version=1, eos_ids=(), recompute=False)
    first, second = (
        make_work(0, prompt_of(0, 20), SAMPLING),
        make_work(1, prompt_of(0, 20), SAMPLING, group_id=0),
    )
    engine.submit([first])
    for _ in range(5):
        engine.step()
    weights_into(engine, new)
    engine.swap(2)
    engine.submit([second])
    results = collect(drain(engine))
    assert engine.load().prefilled_tokens == 19 + 19
    fresh = run(make_engine(new, eos_ids=()), [first, second])
    assert results[1][0] == fresh[1][0] and results[0][0] != fresh[0][0]


def under(version: int, progress: list[Progress]) -> Iterator[Progress]:
    """The parts that were sampled under one version."""
    for part in progress:
        start = 0
        for sampled, count in part.columns.runs:
            if sampled == version:
                yield replace(part, columns=part.columns[start : start + count])
            start += count


@pytest.mark.parametrize("name", CONFIGS)
def test_buffers_are_the_models_parameters_in_state_dict_order(name: str) -> None:
    model = make_model(name)
    engine = make_engine(model)
    expected = buffers_of(model)
    assert [(b.name, b.dtype, b.shape) for b in engine.buffers()] == [
        (b.name, b.dtype, b.shape) for b in expected
    ]
    assert engine.digest() == digest_buffers(expected)


@pytest.mark.parametrize("name", few(reversed(CONFIGS), 8))
def test_the_engine_computes_with_exactly_the_digested_buffers(name: str) -> None:
    """Damaging any one digested tensor changes the digest and what is computed."""
    model, sampling = make_model(name, scale=1.2), Sampling(max_tokens=12)
    engine = make_engine(model, eos_ids=())
    probe = [make_work(0, prompt_of(0, 20), sampling)]
    reference, digest = run(engine, probe), engine.digest()
    for index, buffer in enumerate(engine.buffers(), start=1):
        saved = buffer.data.copy()
        buffer.data.view("float32")[:] *= 1.5
        again = [make_work(0, probe[0].prompt, sampling, lease=index)]
        assert engine.digest() != digest, buffer.name
        assert run(engine, again) != reference, buffer.name
        buffer.data[:] = saved
    assert engine.digest() == digest


@pytest.mark.parametrize("fast", [True, False])
def test_bfloat16_weights_are_served_as_published(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(number_format, "multiplies_bfloat16", lambda: fast)
    model = make_model().to(torch.bfloat16)
    engine = make_engine(model, dtype="bfloat16")
    assert engine.computes.startswith("bfloat16" if fast else "float32 (bfloat16 weights")
    expected = [
        NamedBuffer(name, "bfloat16", tuple(p.shape), p.detach().view(-1).view(torch.uint8).numpy())
        for name, p in model.named_parameters()
    ]
    assert engine.digest() == digest_buffers(expected)
    assert len(run(engine, works())) == 6


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", ["qwen3 untied, no grouping", "llama biases, llama3 rope"])
def test_in_bfloat16_only_products_are_rounded_and_a_swap_changes_all_copies(
    name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms, attention and logits are float32, so the gap to float32 is that of the products' factors."""
    monkeypatch.setattr(number_format, "multiplies_bfloat16", lambda: True)
    if not compiled:
        monkeypatch.setattr(engines, "native_pass", lambda *_, **__: (None, ""))
    first, second = (make_model(name, seed=seed, scale=1.0).to(torch.bfloat16) for seed in (0, 1))
    swapped, fresh = make_engine(first, dtype="bfloat16"), make_engine(second, dtype="bfloat16")
    wide = make_engine(copy.deepcopy(second).float())
    run(swapped, works())
    weights_into(swapped, second)
    swapped.swap(2)
    found, expected = run(swapped, works(1)), run(fresh, works(1))
    for trajectory_id, (tokens, logprobs, _) in expected.items():
        assert found[trajectory_id][:2] == (tokens, logprobs)
        assert len(set(np.float32(logprobs).view(np.uint32) & 0xFFFF)) > 1  # log-probs are not rounded
    work = make_work(9, [5, 6, 7], Sampling(max_tokens=1, ignore_eos=True))
    (ours,), (theirs,) = (run(engine, [work])[9][1] for engine in (fresh, wide))
    assert ours == pytest.approx(theirs, abs=0.1)


def test_weights_in_another_format_are_served_from_the_swap_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(number_format, "multiplies_bfloat16", lambda: False)
    engine = make_engine(make_model().to(torch.bfloat16), dtype="bfloat16")
    before = engine.digest()
    weights_into(engine, make_model(seed=1).to(torch.bfloat16))
    assert engine.digest() == before
    engine.swap(2)
    assert engine.digest() != before
