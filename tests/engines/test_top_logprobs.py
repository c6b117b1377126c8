"""`sampling.logprobs`: at each position the most likely tokens, of the distribution that was sampled from."""

from __future__ import annotations

import pytest
import torch
from bench import TOLERANCE, Bench, OpenBench, Played, prompt_of
from test_settings import nearest

from millrace.core.errors import DataError
from millrace.core.types import Sampling
from millrace.rollout.protocol import Capabilities

LENGTH = 24


@pytest.fixture(autouse=True)
def _able(can: Capabilities) -> None:
    if "sampling.logprobs" not in can.settings:
        pytest.skip("refused")


def check(bench: Bench, one: Played) -> None:
    """Against a plain model's, each position with the version that sampled it."""
    assert one.columns.top_logprobs is not None
    start, rows = 0, list(one.columns.top_logprobs.rows())
    for version, count in one.columns.runs:
        distribution, _ = nearest(bench.logits(version, one), one)
        for expected, row in zip(
            distribution[start : start + count], rows[start : start + count], strict=True
        ):
            ids, logprobs = torch.tensor([i for i, _ in row]), torch.tensor([p for _, p in row])
            best = expected.topk(one.work.sampling.logprobs).values
            assert (logprobs - expected[ids]).abs().max() < TOLERANCE
            assert (logprobs - best[best.isfinite()]).abs().max() < TOLERANCE
            assert len(set(ids.tolist())) == len(row)
        start += count
    assert start == len(rows) == len(one.tokens)


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.7, "repetition_penalty": 1.3}, {"top_k": 3, "temperature": 1.2}],
    ids=["plain", "scaled", "fewer can come than are asked for"],
)
def test_the_most_likely_tokens_are_those_of_the_distribution(settings: dict, bench_of: OpenBench) -> None:
    bench, sampling = bench_of(), Sampling(max_tokens=LENGTH, logprobs=5, **settings)
    bench.serve(1)
    partial = prompt_of(9, 6)  # from a different engine: nothing is said of these
    played = bench.play(bench.work(prompt_of(i, 4 + i), sampling, tokens=partial[: i % 3]) for i in range(6))
    for one in played:
        check(bench, one)


def test_each_trajectory_gets_as_many_as_it_asks_for(bench_of: OpenBench) -> None:
    bench = bench_of()
    bench.serve(1)
    nums = (0, 2, 20)
    played = bench.play(bench.work([5, 6], Sampling(max_tokens=LENGTH, logprobs=num)) for num in nums)
    assert [one.columns.top_logprobs and one.columns.top_logprobs.num for one in played] == [None, 2, 20]
    for one in played[1:]:
        check(bench, one)


def test_they_stay_with_their_tokens_through_a_load_and_a_release(bench_of: OpenBench) -> None:
    bench = bench_of()
    bench.serve(1)
    works = [
        bench.work(prompt_of(i, 5), Sampling(max_tokens=60, ignore_eos=True, logprobs=4)) for i in range(4)
    ]
    bench.submit(works)
    bench.sample(5)
    bench.serve(2)
    bench.sample(12)
    released = bench.release(works[0].trajectory_id)
    for one in [released, *bench.drain().values()]:
        assert len(one.columns.runs) == 2
        check(bench, one)


def test_more_than_the_model_has_is_refused(bench_of: OpenBench) -> None:
    bench = bench_of()
    bench.serve(1)
    with pytest.raises(DataError, match=r"`sampling.logprobs` \(200\) asks for more than 128 tokens"):
        bench.submit([bench.work([5], Sampling(max_tokens=3, logprobs=200))])
