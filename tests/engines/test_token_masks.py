"""`sampling.token_masks`: where tokens are cut off, at each position those that could come. On them the
trainer finds the same log-probs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bench import TOLERANCE, VOCAB, Bench, OpenBench, Played, prompt_of
from test_settings import nearest

from millrace.core.types import Sampling, TrainSequence
from millrace.rollout.protocol import Capabilities
from millrace.trainer.recorded import token_masks_of
from millrace.trainer.row_logprobs import CUT, masks_on

LENGTH = 24


@pytest.fixture(autouse=True)
def _able(can: Capabilities) -> None:
    if "sampling.token_masks" not in can.settings:
        pytest.skip("refused")


def check(bench: Bench, one: Played) -> None:
    """Against a plain model's, each position with the version that sampled it."""
    token_masks = token_masks_of([TrainSequence(0, one.columns, 0.0, truncated=False)])
    assert (
        token_masks is not None and (token_masks.counts_N > 0).all() and (token_masks.counts_N < VOCAB).any()
    )
    start, sampling = 0, one.work.sampling
    for version, count in one.columns.runs:
        part = slice(start, start + count)
        logits = bench.logits(version, one)[part].double() / sampling.temperature
        masks_on(torch.device("cpu"), token_masks.of(np.arange(start, start + count)), 0, VOCAB).cut(
            logits, 0
        )
        full, _ = nearest(bench.logits(version, one), one)
        assert ((logits > CUT) == full[part].isfinite()).all()
        found = logits.log_softmax(-1).gather(-1, torch.tensor(one.tokens[part])[:, None])[:, 0]
        assert (found - torch.tensor(one.columns.logprobs[part])).abs().max() < TOLERANCE
        start += count
    assert start == len(one.tokens)


@pytest.mark.parametrize(
    "settings",
    [{"top_p": 0.9}, {"top_k": 7, "temperature": 1.2}, {"top_k": 30, "top_p": 0.95, "min_p": 0.01}],
    ids=["top-p", "top-k", "all three"],
)
def test_log_probs_over_the_choices_are_those_that_were_recorded(settings: dict, bench_of: OpenBench) -> None:
    bench, sampling = bench_of(), Sampling(max_tokens=LENGTH, **settings)
    bench.serve(1)
    partial = prompt_of(9, 6)  # from a different engine: nothing is said of these
    played = bench.play(bench.work(prompt_of(i, 4 + i), sampling, tokens=partial[: i % 3]) for i in range(6))
    for one in played:
        check(bench, one)


def test_they_stay_with_their_tokens_through_a_load_and_a_release(bench_of: OpenBench) -> None:
    bench = bench_of()
    bench.serve(1)
    sampling = Sampling(max_tokens=60, ignore_eos=True, top_p=0.9)
    works = [bench.work(prompt_of(i, 5), sampling) for i in range(4)]
    bench.submit(works)
    bench.sample(5)
    bench.serve(2)
    bench.sample(12)
    released = bench.release(works[0].trajectory_id)
    for one in [released, *bench.drain().values()]:
        assert len(one.columns.runs) == 2
        check(bench, one)


def test_nothing_is_told_where_nothing_is_cut_or_nobody_asks(bench_of: OpenBench) -> None:
    bench = bench_of()
    bench.serve(1)
    settings = [{}, {"top_p": 0.9, "token_masks": False}, {"top_k": 5, "temperature": 0.0}]
    played = bench.play(bench.work([5, 6], Sampling(max_tokens=LENGTH, **each)) for each in settings)
    assert [one.columns.token_masks for one in played] == [None] * 3
