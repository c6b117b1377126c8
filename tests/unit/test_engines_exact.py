"""Exactness is found by trying the loaded model, or refused with the reason."""

from __future__ import annotations

import pytest
import torch
from engine_models import CONFIGS, make_engine, make_model, make_work, run
from hypothesis import given
from hypothesis import strategies as st
from tests.long import few

from millrace.core.errors import ConfigError
from millrace.core.types import Sampling
from millrace.engines.own.accelerated import exact
from millrace.engines.own.accelerated.row_matmul import RowMatmul
from millrace.engines.own.attention import Kernel

WORKS = [make_work(i, [5, 6, 7 + i], Sampling(max_tokens=20)) for i in range(5)]


@given(tile=st.sampled_from([8, 16, 96]), count=st.integers(1, 5000))
def test_padding_fills_tiles_and_wastes_at_most_a_quarter(tile: int, count: int) -> None:
    rows = RowMatmul(tile).rows(count)
    assert rows % tile == 0 and count <= rows < count * 1.25 + tile
    assert RowMatmul(tile).rows(rows) == rows


def test_without_exactness_nothing_is_padded() -> None:
    assert [RowMatmul().rows(count) for count in (1, 7, 100)] == [1, 7, 100]
    assert "; not exact" in make_engine(make_model()).computes


@pytest.mark.parametrize("name", few(CONFIGS, 6))
def test_rows_computed_alone_give_what_one_product_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(name)
    expected = run(make_engine(model), WORKS)
    monkeypatch.setattr(exact, "CANDIDATES", (RowMatmul(8, alone=True),))
    engine = make_engine(model, exact=True)
    assert "each row alone" in engine.computes
    for key, (tokens, logprobs, _) in run(engine, WORKS).items():
        assert tokens == expected[key][0]
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(expected[key][1]))


def test_products_that_mix_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = RowMatmul.linear

    def mixing(self: RowMatmul, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return linear(self, x, *others) * (1 + len(x) * 1e-6)

    monkeypatch.setattr(RowMatmul, "linear", mixing)
    with pytest.raises(ConfigError, match=r"`rollout.exact` cannot be had here: a row's result changes"):
        make_engine(make_model(), exact=True)


def test_attention_that_depends_on_masked_keys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = Kernel.__call__

    def by_length(kernel: Kernel, q: torch.Tensor, k: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return attend(kernel, q, k, *others) * k.shape[2]

    monkeypatch.setattr(Kernel, "__call__", by_length)
    with pytest.raises(ConfigError, match="attention over 64 keys changes"):
        make_engine(make_model(), exact=True)


def test_an_exact_engine_leaves_the_number_of_threads_alone() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run(make_engine(make_model(), exact=True), WORKS)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_engines_with_other_slots_and_chunks_choose_alike() -> None:
    model = make_model()
    small = make_engine(model, exact=True, slots=2, prefill_chunk=16)
    large = make_engine(model, exact=True, slots=24, prefill_chunk=512)
    assert small.computes == large.computes
