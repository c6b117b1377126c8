"""A later turn of a trajectory: what stood before it ends nothing, and is context."""

from __future__ import annotations

import pytest
from bench import ALPHABET, END, VOCAB, Bench, OpenBench, Played, prompt_of

from millrace.core.completion.columns import token_array
from millrace.core.types import Finish, Sampling, Work

BEFORE = [*prompt_of(3, 6), END, *prompt_of(4, 3)]
"""A turn with its end token, and what was observed after it."""
LETTERS = tuple(ALPHABET[token - 5] for token in BEFORE if token >= 5)
ROOM = 60


def later_turns(bench: Bench, count: int, **sampling: object) -> list[Work]:
    budget = Sampling(max_tokens=len(BEFORE) + ROOM, **sampling)  # type: ignore[arg-type]
    works = [bench.work(prompt_of(i, 5 + i), budget, tokens=BEFORE) for i in range(count)]
    return [changed(work, turn_start=len(BEFORE)) for work in works]


def changed(work: Work, **fields: object) -> Work:
    from msgspec.structs import replace

    return replace(work, **fields)


@pytest.mark.computed
def test_a_turn_goes_on_behind_the_end_of_the_one_before_and_ends_at_the_next(bench_of: OpenBench) -> None:
    bench = bench_of()
    bench.serve(1)
    played = bench.play(later_turns(bench, 48))  # a third of them ends; without seeds any third
    assert {one.finish for one in played} <= {Finish.STOP, Finish.LENGTH}
    assert any(one.finish is Finish.STOP for one in played)
    for one in played:
        assert one.tokens and END not in one.tokens[:-1]
        assert (one.tokens[-1] == END) == (one.finish is Finish.STOP) or len(one.tokens) == ROOM
    bench.check(played)  # with the tokens before it as context


@pytest.mark.computed
def test_a_stop_string_of_an_earlier_turn_ends_nothing_and_a_later_one_does(bench_of: OpenBench) -> None:
    bench = bench_of()
    bench.serve(1)
    played = bench.play(later_turns(bench, 16, stop=LETTERS))
    ends = {END, *(5 + ALPHABET.index(letter) for letter in LETTERS)}
    stopped = [one for one in played if one.finish is Finish.STOP]
    assert any(one.tokens[-1] != END for one in stopped)
    for one in played:
        assert one.tokens and not ends & {*one.tokens[:-1]}
        assert (one.tokens[-1] in ends) == (one in stopped)
    bench.check(played)


@pytest.mark.computed
def test_a_turn_without_a_token_is_not_complete(bench_of: OpenBench) -> None:
    bench = bench_of()
    bench.serve(1)
    (work,) = later_turns(bench, 1)
    (one,) = bench.play([changed(work, tokens=work.tokens[:7], turn_start=7)])  # the end token is the last
    assert one.tokens and one.finish is not None
    bench.check([one])


def test_a_later_turn_that_moves_goes_on_elsewhere(
    bench_of: OpenBench, fresh_bench: OpenBench, kind: str
) -> None:
    """Exact engines sample the same tokens, wherever a turn is cut."""
    exact = {"exact": True} if kind == "own" else {}
    bench, other = bench_of(**exact), fresh_bench(**exact)
    for each in (bench, other):
        each.serve(1)
    works = later_turns(bench, 4)
    whole = {one.work.trajectory_id: one for one in bench.play(works)}
    bench.submit(changed(work, lease=1) for work in works)
    bench.sample(4)
    for trajectory_id in [key for key, one in bench.played.items() if one.finish is None]:
        released = bench.release(trajectory_id)
        work = changed(released.work, lease=2, tokens=released.work.tokens + released.columns.tokens)
        (rest,) = other.play([work])
        bench.check([released])
        other.check([rest])
        if exact:
            assert joined(released, rest) == whole[trajectory_id].columns
        assert rest.finish is not None


def joined(released: Played, rest: Played) -> object:
    columns = released.columns[:]
    columns.extend(rest.columns)
    return columns


def often_ending(most: int) -> Sampling:
    return Sampling(max_tokens=most, stop_token_ids=tuple(range(100, VOCAB)))


@pytest.mark.computed
def test_turns_that_come_back_to_their_engine_have_the_log_probs_of_a_fresh_one(
    bench_of: OpenBench, kind: str
) -> None:
    """Some of their keys and values are there already, except after new weights."""
    bench = bench_of(keep_kv=True)
    for version in range(2):
        bench.serve(version)
        works = [bench.work(prompt_of(i // 2, 30), often_ending(20), group_id=i // 2) for i in range(12)]
        for number in range(3):
            played = bench.play(works)
            bench.check(played)
            more = [[*one.work.tokens, *one.tokens, *prompt_of(number, 5)] for one in played]
            works = [
                changed(
                    one.work,
                    lease=one.work.lease + 1,
                    tokens=token_array(tokens),
                    turn_start=len(tokens),
                    sampling=often_ending(len(tokens) + 20),
                )
                for one, tokens in zip(played, more, strict=True)
            ]
    assert bench.engine.load().reused_tokens > 0 or kind != "own"
