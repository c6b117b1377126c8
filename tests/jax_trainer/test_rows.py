"""Rows in JAX: attention to near tokens equals attention to all, shapes are few, devices have even rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from millrace.trainer.batch.packing import Branch, Tree, pack
from millrace_jax import forward
from millrace_jax.decoder import EVERYWHERE
from millrace_jax.forward import attention
from millrace_jax.row_arrays import RowArrays, arrays_of, even_rows


def trees(count: int, longest: int) -> list[Tree]:
    """Prompts of 1 to 40 tokens with up to 4 completions of up to `longest` tokens that often begin alike."""
    random, made, first = np.random.default_rng(0), [], 0
    for _ in range(count):
        prompt, branches = random.integers(0, 9, random.integers(1, 40)), []
        for length in random.integers(1, longest + 1, random.integers(1, 5)):
            tokens = random.integers(0, 2, length)
            branches.append(Branch(tokens, np.ones(length, bool), first))
            first += length
        made.append(Tree(prompt, branches))
    return made


def output_and_gradients(rows: RowArrays, window: int, cap: float | None) -> list[Any]:
    random = np.random.default_rng(1)
    count, tokens = rows.tokens_RT.shape
    shapes = [(count, tokens, heads, 8) for heads in (4, 2, 2, 4)]
    q, k, v, upstream = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)

    def of(q: Any, k: Any, v: Any) -> Any:
        places = rows.ends_RT, rows.positions_RT, jnp.asarray(window)
        return attention(q, k, v, *places, band=rows.band, scale=0.3, cap=cap)

    out, backward = jax.vjp(jax.jit(of), q, k, v)
    return [out, *backward(upstream)]


@pytest.mark.parametrize("budget, longest, band, block, scores", [
    (400, 20, 64, 512, 1 << 20),
    (1100, 60, 128, 512, 1 << 20),
    (1100, 60, 128, 512, 1 << 16),  # a map over blocks
    (1100, 60, 128, 32, 1 << 13),  # several blocks before each
])  # fmt: skip
def test_attention_to_near_tokens_is_attention_to_all(
    budget: int, longest: int, band: int, block: int, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = arrays_of(pack(trees(24, longest), budget))
    assert rows.band == band and rows.tokens_RT.shape[1] % band == 0 and len(rows.tokens_RT) > 1
    for window, cap in ((EVERYWHERE, None), (7, 2.0)):
        monkeypatch.setattr(forward, "BLOCK", 512)
        due = output_and_gradients(replace(rows, band=0), window, cap)
        monkeypatch.setattr(forward, "BLOCK", block)
        monkeypatch.setattr(forward, "SCORES", scores)
        for found, expected in zip(output_and_gradients(rows, window, cap), due, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_band_is_as_wide_as_the_farthest_token_that_is_seen() -> None:
    for longest in (20, 60, 90, 300):
        rows = arrays_of(pack(trees(12, longest), 4096))
        sees = max(
            token - int(np.flatnonzero(ends[: token + 1] > token)[0])
            for ends in rows.ends_RT
            for token in range(len(ends))
        )
        assert rows.band == 0 or sees <= 2 * rows.band
        assert rows.band or 8 * sees > rows.tokens_RT.shape[1], (longest, sees, rows.tokens_RT.shape)


def test_batches_of_one_task_have_few_shapes() -> None:
    """Sizes that differ by a tenth have three shapes at most, with no more than a sixth of padding."""
    shapes = set()
    for tokens in range(1000, 1101):
        prompt = Tree(np.zeros(12, int), [Branch(np.arange(tokens), np.ones(tokens, bool), 0)])
        rows = arrays_of(pack([prompt], 4096))
        shapes.add((rows.tokens_RT.shape, rows.targets_RN.shape))
        assert rows.tokens_RT.size < 7 / 6 * (tokens + 12)
    assert len(shapes) <= 3


@pytest.mark.parametrize("at_once", [2, 3, 8])
def test_each_device_has_a_row(at_once: int) -> None:
    every = trees(40, 30)
    rows = even_rows(every, 4096, at_once)
    lengths = [len(row.tokens_T) for row in rows]
    assert len(rows) == at_once and max(lengths) < 1.2 * sum(lengths) / at_once
    trained = np.sort(np.concatenate([row.flat_N for row in rows]))
    np.testing.assert_array_equal(trained, np.arange(len(trained)))
    assert even_rows(every, 4096, 1)[0].flat_N.size == len(trained)
    assert even_rows([], 4096, at_once) == []
