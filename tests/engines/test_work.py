"""Slots, prompts in chunks, ends, leases, release and resume."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from bench import ALPHABET, END, Bench, OpenBench, Played, prompt_of

from millrace.core.errors import DataError
from millrace.core.types import Finish, Sampling
from millrace.rollout.protocol import Capabilities

LONG = Sampling(max_tokens=60)


def text_of(tokens: list[int]) -> str:
    """Special tokens are no letters, and none of these tests looks for one."""
    return "".join(ALPHABET[token - 5] if token >= 5 else "#" for token in tokens)


def endless(bench: Bench, prompt: list[int], length: int) -> Played:
    """A completion of that length without an end token in it, by the first seed that gives one."""
    for seed in range(200):
        (one,) = bench.play([bench.work(prompt, Sampling(max_tokens=length), seed=seed)])
        if one.finish is Finish.LENGTH and min(one.tokens) >= 5:
            return one
    raise AssertionError("every seed ends early")


# ---------------------------------------------------------------- slots and prompts


@pytest.mark.smoke
def test_more_work_than_slots_waits_and_is_all_done(bench_of: OpenBench) -> None:
    bench = bench_of(slots=3)
    bench.serve(1)
    bench.submit(bench.work(prompt_of(i, 5 + i), Sampling(max_tokens=4 + i)) for i in range(10))
    bench.engine.step()
    load = bench.engine.load()
    ended = {part.trajectory_id for part in bench.engine.take_progress() if part.finish is not None}
    assert load.running <= 3 and load.running + load.waiting + len(ended) == 10
    bench.clear()
    played = bench.play(bench.work(prompt_of(i, 5 + i), Sampling(max_tokens=4 + i)) for i in range(10))
    assert all(one.finish is not None for one in played)
    assert (bench.engine.load().running, bench.engine.load().waiting) == (0, 0)
    bench.check(played)


@pytest.mark.stepwise
def test_its_load_tells_how_full_it_is(bench_of: OpenBench) -> None:
    bench = bench_of()
    version = bench.serve(1)
    before = bench.engine.load()
    lasting = Sampling(max_tokens=60, ignore_eos=True)
    bench.submit(bench.work(prompt_of(i, 40), lasting) for i in range(2))
    bench.sample(2)
    load = bench.engine.load()
    assert load.version == version and load.running <= 2
    assert 2 * 40 <= load.kv_used_tokens <= load.kv_capacity_tokens
    assert load.prefilled_tokens - before.prefilled_tokens >= 2 * 39
    assert load.generated_tokens - before.generated_tokens >= 4


def test_long_prompts_are_computed_in_chunks_and_come_out_right(
    bench_of: OpenBench, can: Capabilities
) -> None:
    bench = bench_of(prefill_chunk=16)
    bench.serve(1)
    bench.submit([bench.work([5, 6], LONG)])
    bench.sample(1)
    bench.submit(bench.work(prompt_of(i, 150 + 7 * i), LONG) for i in range(3))
    while bench.engine.has_work or bench.engine.has_finished:
        before = bench.engine.load().prefilled_tokens
        bench.step()
        assert bench.engine.load().prefilled_tokens - before <= 16 or not can.chunks_prompts
    bench.check(bench.drain().values())


def test_members_of_a_group_compute_their_prompt_once(bench_of: OpenBench, can: Capabilities) -> None:
    if not can.shares_prefixes:
        pytest.skip("this engine shares no prompts")
    bench, prompt = bench_of(), prompt_of(4, 130)
    bench.serve(1)
    before = bench.engine.load().prefilled_tokens
    played = bench.play(bench.work(prompt, LONG, group_id=1) for _ in range(8))
    assert bench.engine.load().prefilled_tokens - before < 3 * len(prompt)
    assert len({tuple(one.tokens) for one in played}) > 1
    bench.check(played)


def test_a_resumed_member_of_a_group_comes_out_right(bench_of: OpenBench) -> None:
    bench, prompt = bench_of(), prompt_of(4, 50)
    bench.serve(1)
    works = [
        bench.work(prompt, LONG, group_id=1, tokens=tokens) for tokens in ([], [9, 8, 7], prompt_of(5, 20))
    ]
    bench.check(bench.play(works))


@pytest.mark.computed
def test_another_seed_samples_other_tokens(bench_of: OpenBench) -> None:
    bench = bench_of()
    bench.serve(1)
    one, other = bench.play(bench.work([5, 6, 7], LONG, seed=seed) for seed in (1, 2))
    assert one.tokens != other.tokens


# ---------------------------------------------------------------- ends


@pytest.mark.computed
def test_the_end_token_stops_and_belongs_to_the_completion(bench_of: OpenBench) -> None:
    bench = bench_of()
    bench.serve(1)
    played = bench.play(bench.work(prompt_of(i, 5), Sampling(max_tokens=120)) for i in range(24))
    stopped = [one for one in played if one.finish is Finish.STOP]
    assert stopped
    for one in stopped:
        assert one.tokens[-1] == END and END not in one.tokens[:-1]
    assert all(END not in one.tokens for one in played if one.finish is Finish.LENGTH)


@pytest.mark.computed
def test_a_stop_string_over_two_tokens_stops_with_the_token_that_completes_it(bench_of: OpenBench) -> None:
    bench = bench_of()
    bench.serve(1)
    free = bench.play(bench.work([5, 6, 7], Sampling(max_tokens=60, temperature=0.4)) for _ in range(24))
    pairs = Counter(pair for one in free for pair in pairwise(one.tokens) if min(pair) >= 5)
    string = text_of(list(pairs.most_common(1)[0][0]))
    sampling = Sampling(max_tokens=60, temperature=0.4, stop=("never there", string))
    played = bench.play(bench.work([5, 6, 7], sampling) for _ in range(24))
    for one in played:
        text = text_of(one.tokens)
        assert string not in text[:-1]
        assert (one.finish is Finish.STOP) == (text.endswith(string) or END in one.tokens)
    assert any(text_of(one.tokens).endswith(string) for one in played)
    bench.check(played)


@pytest.mark.computed
def test_the_token_budget_counts_from_the_prompt_and_truncates(bench_of: OpenBench) -> None:
    bench = bench_of()
    bench.serve(1)
    work = endless(bench, [5, 6], 10).work
    partial = endless(bench, [5, 6], 10).tokens[:3]
    (one,) = bench.play([bench.work([5, 6], work.sampling, seed=work.seed, tokens=partial)])
    assert one.finish is Finish.STOP or (len(one.tokens), one.finish) == (7, Finish.LENGTH)
    bench.check([one])


@pytest.mark.computed
def test_the_context_truncates_too(bench_of: OpenBench) -> None:
    bench = bench_of(max_sequence_tokens=64)
    bench.serve(1)
    played = bench.play(bench.work(prompt_of(i, 60), LONG) for i in range(6))
    assert {one.finish for one in played if END not in one.tokens} == {Finish.LENGTH}
    assert all(len(one.tokens) == 4 for one in played if one.finish is Finish.LENGTH)
    bench.check(played)


@pytest.mark.computed
@pytest.mark.parametrize(("tokens", "finish"), [([5, END], Finish.STOP), ([5] * 4, Finish.LENGTH)])
def test_work_that_is_already_complete_is_reported_finished(
    tokens: list[int], finish: Finish, bench_of: OpenBench
) -> None:
    bench = bench_of()
    bench.serve(1)
    (one,) = bench.play([bench.work([5, 6], Sampling(max_tokens=4), tokens=tokens)])
    assert (one.tokens, one.finish) == ([], finish)


@pytest.mark.computed
def test_what_it_cannot_hold_is_refused_and_nothing_of_it_is_queued(bench_of: OpenBench) -> None:
    bench = bench_of(max_sequence_tokens=64)
    bench.serve(1)
    fits = bench.work([5, 6], LONG)
    for prompt in ([], [5] * 65, [5, 128], [-1, 5]):
        with pytest.raises(DataError, match="trajectory"):
            bench.engine.submit([fits, bench.work(prompt, LONG)])
    assert not bench.engine.has_work


# ---------------------------------------------------------------- leases, release, resume


def test_a_repeated_or_older_lease_changes_nothing(bench_of: OpenBench) -> None:
    bench = bench_of()
    bench.serve(1)
    work = bench.work([5, 6], LONG, lease=2)
    bench.submit([work])
    bench.sample(3)
    older = bench.work([9], LONG, trajectory_id=work.trajectory_id, lease=1)
    bench.engine.submit([work, older])
    played = bench.drain()
    bench.engine.submit([work])
    assert not bench.engine.has_work and not bench.engine.has_finished
    bench.check(played.values())


def test_a_newer_lease_replaces_the_older_one(bench_of: OpenBench) -> None:
    bench = bench_of()
    bench.serve(1)
    work = bench.work([5, 6], LONG)
    bench.submit([work])
    bench.sample(3)
    bench.submit([bench.work([5, 6], LONG, trajectory_id=work.trajectory_id, lease=1)])
    (one,) = bench.drain().values()  # `Bench.note` refuses a part of the older one
    assert one.finish is not None
    bench.check([one])


def test_what_is_released_goes_on_elsewhere(bench_of: OpenBench, fresh_bench: OpenBench) -> None:
    bench, other = bench_of(), fresh_bench()
    for each in (bench, other):
        each.serve(1)
    bench.submit(bench.work(prompt_of(i, 9 + i), LONG) for i in range(4))
    bench.sample(6)
    for trajectory_id in [key for key, one in bench.played.items() if one.finish is None]:
        released = bench.release(trajectory_id)
        assert bench.engine.release([trajectory_id]) == []
        bench.check([released])
        work = released.work
        resumed = other.work(work.prompt, LONG, trajectory_id=trajectory_id, lease=1, tokens=released.tokens)
        (rest,) = other.play([resumed])
        assert rest.finish is Finish.STOP or len(released.tokens) + len(rest.tokens) == LONG.max_tokens
        other.check([rest])


def test_what_waits_is_released_with_nothing_sampled(bench_of: OpenBench) -> None:
    bench = bench_of(slots=3)
    bench.serve(1)
    works = [bench.work(prompt_of(i, 9), LONG, tokens=[7, 8]) for i in range(8)]
    bench.submit(works)
    bench.engine.step()
    assert bench.release(works[-1].trajectory_id).tokens == []
    assert bench.engine.release([10**6]) == []
    assert works[-1].trajectory_id not in bench.drain()


def test_what_has_finished_but_was_not_reported_is_released_with_its_end(bench_of: OpenBench) -> None:
    bench = bench_of()
    bench.serve(1)
    work = bench.work([5, 6], Sampling(max_tokens=3))
    bench.submit([work])
    while not bench.engine.has_finished:
        bench.engine.step()
    released = bench.release(work.trajectory_id)
    assert released.finish is not None and released.tokens
    assert bench.engine.take_progress() == [] and bench.engine.release([work.trajectory_id]) == []


@pytest.mark.stepwise
def test_a_load_in_between_does_not_lose_what_is_released(bench_of: OpenBench) -> None:
    bench = bench_of()
    first = bench.serve(1)
    work = bench.work(prompt_of(1, 9), Sampling(max_tokens=200, ignore_eos=True), tokens=[4, 4])
    bench.submit([work])
    bench.sample(4)
    second = bench.serve(2)
    bench.engine.step()
    bench.engine.step()
    bench.take()
    released = bench.release(work.trajectory_id)
    assert {version for version, _ in released.columns.runs} <= {first, second}
    bench.check([released])
