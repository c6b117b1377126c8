"""Keys and values that stay between two turns: the same tokens, less work, nothing of other weights."""

from __future__ import annotations

import random
from collections.abc import Sequence

import flash_double
import pytest
from engine_models import (
    CONFIGS,
    VOCAB,
    drain,
    make_engine,
    make_exact_engine,
    make_model,
    make_work,
    prompt_of,
    weights_into,
)
from tests.long import few

from millrace.core.completion.columns import TokenColumns
from millrace.core.types import Finish, Sampling, Work
from millrace.engines.own.cache import KeptSequences, KVCache
from millrace.engines.own.torch_engine import TorchEngine
from millrace.rollout.continuation import Continuation

OBSERVED = 12


def turn(tid: int, tokens: Sequence[int] = (), *, most: int = 12, group: int | None = None) -> Work:
    """The turn behind `tokens`. Half of the ids end a turn."""
    sampling = Sampling(max_tokens=len(tokens) + most, stop_token_ids=tuple(range(50, VOCAB)))
    group = tid if group is None else group
    fields = {"group_id": group, "tokens": list(tokens), "turn_start": len(tokens), "lease": len(tokens)}
    return make_work(tid, prompt_of(group, 40), sampling, **fields)


def played(engine: TorchEngine, works: Sequence[Work]) -> dict[int, tuple[list[int], TokenColumns, Finish]]:
    """By trajectory, all tokens behind the prompt, the columns of this turn, and its end."""
    engine.submit(works)
    columns, ends = {work.trajectory_id: TokenColumns() for work in works}, {}
    for part in drain(engine):
        columns[part.trajectory_id].extend(part.columns)
        ends[part.trajectory_id] = part.finish
    return {
        work.trajectory_id: (
            [*work.tokens, *columns[work.trajectory_id].tokens],
            columns[work.trajectory_id],
            ends[work.trajectory_id],
        )
        for work in works
    }


def answered(engine: TorchEngine, work: Work) -> Work:
    """Play a turn that ends by itself. Returns the next one."""
    tokens, _, finish = played(engine, [work])[work.trajectory_id]
    assert finish is Finish.STOP
    return turn(work.trajectory_id, [*tokens, *prompt_of(len(tokens), OBSERVED)], group=work.group_id)


def prefilled(engine: TorchEngine, works: Sequence[Work]) -> int:
    before = engine.load().prefilled_tokens
    played(engine, works)
    return engine.load().prefilled_tokens - before


@pytest.mark.parametrize("name", few(CONFIGS, 6))
def test_the_next_turn_computes_new_tokens_alone_and_gives_the_same_bits(name: str) -> None:
    model = make_model(name)
    kept, dropped = (make_exact_engine(model, keep_kv=keep, slots=4) for keep in (True, False))
    work = turn(0)
    for number in range(4):
        before = kept.load()
        (one,), (other,) = (played(engine, [work]).values() for engine in (kept, dropped))
        assert one == other and one[2] is Finish.STOP, number
        known = 40 + len(work.tokens) - 1 if not number else OBSERVED
        assert kept.load().prefilled_tokens - before.prefilled_tokens == known
        work = turn(0, [*one[0], *prompt_of(number, OBSERVED)])
    assert kept.load().reused_tokens > dropped.load().reused_tokens == 0


@pytest.mark.parametrize("seed", few(range(6), 2))
def test_whatever_comes_and_goes_the_tokens_are_those_of_an_engine_that_keeps_nothing(seed: int) -> None:
    """Episodes of groups come and go in random order on few slots, and weights change in between."""
    models = [make_model(seed=n) for n in range(2)]
    engines = [make_exact_engine(models[0], keep_kv=keep, slots=4) for keep in (True, False)]
    rng, due = random.Random(seed), [turn(tid, group=tid // 3) for tid in range(12)]
    for number in range(14):
        rng.shuffle(due)
        works, due = due[: rng.randint(1, 6)], due[6:] + due[rng.randint(1, 6) : 6]
        results = [played(engine, works) for engine in engines]
        assert results[0] == results[1], number
        for work in works:
            tokens, _, finish = results[0][work.trajectory_id]
            if finish is Finish.STOP and len(tokens) < 150:
                due.append(
                    turn(work.trajectory_id, [*tokens, *prompt_of(number, OBSERVED)], group=work.group_id)
                )
        due = list({work.trajectory_id: work for work in due}.values())
        if rng.random() < 0.2:
            for engine in engines:
                weights_into(engine, models[number % 2])
                engine.swap(engine.version + 1)
        if not due:
            break
    assert engines[0].load().reused_tokens > 0 and engines[0].load().evicted_tokens > 0
    assert engines[0].load().prefilled_tokens < engines[1].load().prefilled_tokens


def test_new_weights_leave_nothing_of_the_old() -> None:
    model, new = make_model(seed=1), make_model(seed=2)
    engine = make_exact_engine(model, keep_kv=True)
    work = answered(engine, turn(0))
    weights_into(engine, new)
    engine.swap(1)
    before = engine.load()
    found = played(engine, [work])
    assert engine.load().prefilled_tokens - before.prefilled_tokens == 40 + len(work.tokens) - 1
    assert engine.load().reused_tokens == 0
    assert found[0][0] == played(make_exact_engine(new), [work])[0][0]


def test_a_turn_that_went_on_under_new_weights_with_old_keys_keeps_none() -> None:
    engine = make_engine(make_model(seed=1), keep_kv=True, recompute=False)
    engine.submit([turn(0)])
    for _ in range(2):
        engine.step()
    weights_into(engine, make_model(seed=2))
    engine.swap(1)
    assert [part.finish for part in drain(engine)] == [Finish.STOP]
    assert prefilled(engine, [turn(0, prompt_of(5, 20))]) == 40 + 20 - 1
    assert engine.load().reused_tokens == engine.load().evicted_tokens == 0


def test_sleep_drops_what_was_kept() -> None:
    model = make_model()
    engine = make_engine(model, keep_kv=True)
    work = answered(engine, turn(0))
    engine.sleep()
    engine.wake()
    weights_into(engine, model)
    engine.swap(1)
    assert prefilled(engine, [work]) == 40 + len(work.tokens) - 1


def test_other_tokens_than_those_that_were_kept_are_computed() -> None:
    engine = make_engine(make_model(), keep_kv=True)
    work = answered(engine, turn(0))
    other = turn(0, work.tokens, group=1)  # has another prompt
    assert prefilled(engine, [other]) == 40 + len(other.tokens) - 1


def test_a_turn_that_a_budget_cut_is_not_kept() -> None:
    engine = make_engine(make_model(), keep_kv=True, slots=1, eos_ids=())
    work = make_work(0, prompt_of(0, 40), Sampling(max_tokens=5))
    assert played(engine, [work])[0][2] is Finish.LENGTH
    played(engine, [turn(1)])
    assert engine.load().evicted_tokens == 0


def test_running_trajectories_take_every_slot_that_they_need() -> None:
    engine = make_engine(make_model(), keep_kv=True, slots=3)
    works = [answered(engine, turn(tid)) for tid in range(3)]
    endless = Sampling(max_tokens=12, ignore_eos=True)
    engine.submit([make_work(tid, prompt_of(tid, 40), endless) for tid in (10, 11, 12)])
    engine.step()
    assert engine.load().running == 3
    drain(engine)
    assert engine.load().evicted_tokens == sum(40 + len(work.tokens) - OBSERVED - 1 for work in works)


@pytest.mark.parametrize("slots", [3, 11])
def test_on_a_gpu_padded_rows_write_behind_what_is_kept(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    model, works = make_model(), [turn(tid) for tid in range(3)]
    flash_double.install(monkeypatch)
    kept, dropped = (make_engine(model, keep_kv=keep, slots=slots) for keep in (True, False))
    for number in range(3):
        for work in works:  # one after another: the others' slots are padded rows meanwhile
            assert (
                played(kept, [work])[work.trajectory_id][0] == played(dropped, [work])[work.trajectory_id][0]
            )
        works = [
            turn(work.trajectory_id, [*work.tokens, *prompt_of(number, OBSERVED)], group=work.group_id)
            for work in works
        ]


# ---------------------------------------------------------------- who goes


class Slots:
    """Three slots of one position's numbers, and a clock."""

    def __init__(self) -> None:
        import torch

        self.cache = KVCache((1, 3, 1, 64, 2), torch.float32, torch.device("cpu"))
        self.now_s = 0.0
        self.kept = KeptSequences(self.cache, keeps=True, now=lambda: self.now_s)

    def enter(self, tid: int, *behind: int) -> int:
        """`tid` gets a slot while `behind` wait. Returns how many of its positions were kept."""
        queue = [self.continuation(one) for one in (tid, *behind)]
        return self.cache.lengths[self.kept.allocate(queue)]

    def end(self, slot: int, tid: int) -> None:
        self.cache.extend(slot, 8 - self.cache.lengths[slot])
        one = self.continuation(tid)
        one.finish = Finish.STOP
        self.kept.release(slot, one)

    @staticmethod
    def continuation(tid: int) -> Continuation:
        work = make_work(tid, [tid + 2] * 9, Sampling(max_tokens=20))
        rules = {"eos_ids": frozenset({1}), "max_sequence_tokens": 64, "decode": None}
        return Continuation(work, vocab=VOCAB, engine="the engine", **rules)

    def wait_until(self, now_s: float, tid: int) -> None:
        self.now_s = now_s
        self.enter(tid)
        self.end(0, tid)


def slots_with_gaps_of_a_second() -> Slots:
    """After a hundred gaps of about a second."""
    slots = Slots()
    for number in range(100):
        slots.now_s += 1.0 + 0.3 * (number % 3)
        assert slots.enter(0) == (8 if number else 0)
        slots.end(0, 0)
    slots.kept.forget()
    return slots


def test_the_trajectory_that_is_expected_back_latest_goes_first() -> None:
    slots = slots_with_gaps_of_a_second()
    began_s = slots.now_s
    slots.wait_until(began_s + 1.0, 1)  # at 60 long overdue
    slots.wait_until(began_s + 59.0, 2)  # due
    slots.wait_until(began_s + 59.5, 3)
    slots.now_s = began_s + 60.0
    slots.enter(4)
    assert slots.kept.evicted_tokens == 8
    slots.now_s += 0.1
    assert [slots.enter(tid) for tid in (2, 3)] == [8, 8]


def test_those_that_are_back_and_wait_for_a_slot_go_last_the_last_of_the_queue_first() -> None:
    slots = slots_with_gaps_of_a_second()
    for second, tid in enumerate((1, 2, 3)):
        slots.wait_until(slots.now_s + 0.1 * second, tid)
    slots.enter(4, 1, 2)  # 3 has to go, though 1 has been away for longest
    assert slots.enter(5, 1, 2) == 0  # then 2
    assert slots.enter(1, 2) == 8
    assert slots.kept.evicted_tokens == 16


def test_numbers_move_with_their_sequences() -> None:
    slots = slots_with_gaps_of_a_second()
    for tid in (1, 2, 3):
        slots.enter(tid)
        slot = slots.cache.used - 1
        slots.cache.keys[:, slot] = slots.cache.values[:, slot] = float(tid)
    for tid in (1, 3, 2):  # slot 0 is freed, and the last one moves in
        numbers = [float(slots.cache.keys[0, slot, 0, 0, 0]) for slot in range(slots.cache.used)]
        slots.end(numbers.index(tid), tid)
    for tid in (2, 3, 1):
        assert slots.enter(tid) == 8
        keys, values = slots.cache.numbers(slots.cache.used - 1, 8)
        assert (keys == tid).all() and (values == tid).all()
