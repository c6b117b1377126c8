"""Slots, prefill, groups, stopping, leases, release."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from engine_models import EOS, collect, drain, make_engine, make_model, make_work, prompt_of, run

from millrace.core.errors import DataError, WeightsError
from millrace.core.types import Finish, Sampling
from millrace.rollout.cache import KVCache
from millrace.rollout.stop import StopStrings

LONG = Sampling(max_tokens=200, temperature=1.0)


def test_a_prompt_shared_by_a_group_is_prefilled_once() -> None:
    engine, prompt = make_engine(make_model()), prompt_of(0, 50)
    run(engine, [make_work(i, prompt, Sampling(max_tokens=5), group_id=9) for i in range(8)])
    assert engine.load().prefilled_tokens == 49  # all but the last token, which decoding feeds


def test_equal_prompts_of_different_groups_are_not_shared() -> None:
    engine, prompt = make_engine(make_model()), prompt_of(0, 50)
    run(engine, [make_work(i, prompt, Sampling(max_tokens=2)) for i in range(3)])
    assert engine.load().prefilled_tokens == 3 * 49


def test_a_resumed_member_shares_the_prompt_and_prefills_its_own_tokens_only() -> None:
    engine, prompt = make_engine(make_model()), prompt_of(0, 50)
    works = [make_work(0, prompt, LONG, group_id=1)]
    works += [make_work(1, prompt, LONG, group_id=1, tokens=prompt_of(5, 12))]
    engine.submit(works)
    for _ in range(3):
        engine.step()
    assert engine.load().prefilled_tokens == 49 + 12


def test_members_with_a_prompt_of_one_token_and_partial_tokens_do_not_wait_for_each_other() -> None:
    works = [make_work(i, [5], Sampling(max_tokens=9), group_id=1, tokens=[7, 8]) for i in range(3)]
    assert len(run(make_engine(make_model()), works)) == 3


def test_a_step_prefills_at_most_one_chunk_while_others_decode() -> None:
    engine = make_engine(make_model(), prefill_chunk=16)
    engine.submit([make_work(0, [5, 6], LONG)])
    engine.step()
    engine.submit([make_work(1, prompt_of(1, 100), LONG)])
    before = engine.load()
    engine.step()
    after = engine.load()
    assert after.prefilled_tokens - before.prefilled_tokens == 16
    assert after.generated_tokens - before.generated_tokens == 1


def test_more_work_than_slots_waits_and_is_all_done() -> None:
    engine = make_engine(make_model(), slots=3)
    engine.submit([make_work(i, prompt_of(i, 5 + i), Sampling(max_tokens=4 + i)) for i in range(10)])
    engine.step()
    assert (engine.load().running, engine.load().waiting) == (3, 7)
    assert len(collect(drain(engine))) == 10
    assert (engine.load().running, engine.load().kv_used_tokens) == (0, 0)


def test_kv_use_is_what_running_trajectories_have_computed() -> None:
    engine = make_engine(make_model(), slots=4, max_sequence_tokens=100)
    engine.submit([make_work(i, prompt_of(i, 10), LONG) for i in range(2)])
    engine.step()
    assert engine.load().kv_used_tokens == 20
    assert engine.load().kv_capacity_tokens == 4 * 100


def test_end_of_sequence_stops_and_belongs_to_the_completion() -> None:
    model = make_model(scale=1.2)
    results = run(make_engine(model), [make_work(i, prompt_of(i, 5), LONG) for i in range(8)])
    stopped = [tokens for tokens, _, finish in results.values() if finish is Finish.STOP]
    assert stopped and all(tokens[-1] == EOS and EOS not in tokens[:-1] for tokens in stopped)


def test_each_of_several_end_of_sequence_tokens_stops() -> None:
    model, prompt = make_model(scale=1.2), prompt_of(0, 5)
    free, _, _ = run(make_engine(model), [make_work(0, prompt, LONG)])[0]
    stop = free[6]
    engine = make_engine(model, eos_ids={EOS, stop})
    tokens, _, finish = run(engine, [make_work(0, prompt, LONG)])[0]
    assert tokens == free[: free.index(stop) + 1] and finish is Finish.STOP


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in tokens)


def test_a_stop_string_over_several_tokens_stops_with_the_token_that_completes_it() -> None:
    model, prompt = make_model(scale=1.2), prompt_of(0, 5)
    free, _, _ = run(make_engine(model), [make_work(0, prompt, LONG)])[0]
    string = letters(free[7:10])
    sampling = Sampling(max_tokens=200, stop_strings=("never there", string))
    tokens, _, finish = run(make_engine(model, decode=letters), [make_work(0, prompt, sampling)])[0]
    assert letters(tokens).endswith(string) and string not in letters(tokens[:-1])
    assert tokens == free[: len(tokens)] and finish is Finish.STOP


def test_a_stop_string_is_found_inside_a_token_and_across_bytes_of_a_character() -> None:
    pieces = {0: b"fo", 1: b"o END", 2: b"x\xc3", 3: b"\xa9!"}

    def decode(tokens: list[int]) -> str:
        return b"".join(pieces[token] for token in tokens).decode(errors="replace")

    stop = StopStrings(decode, ["oo E", "é"])
    assert [stop.hit([0][:n]) for n in (0, 1)] == [False, False]
    assert stop.hit([0, 1])
    assert not stop.hit([0, 2]) and stop.hit([0, 2, 3])


def test_the_token_budget_counts_from_the_prompt_and_truncates() -> None:
    engine = make_engine(make_model(), eos_ids=())
    work = make_work(0, [5, 6], Sampling(max_tokens=10), tokens=[7, 8, 9])
    tokens, _, finish = run(engine, [work])[0]
    assert len(tokens) == 7 and finish is Finish.LENGTH


def test_the_context_truncates_too() -> None:
    engine = make_engine(make_model(), eos_ids=(), max_sequence_tokens=64)
    tokens, _, finish = run(engine, [make_work(0, prompt_of(0, 60), LONG)])[0]
    assert len(tokens) == 4 and finish is Finish.LENGTH


@pytest.mark.parametrize(("tokens", "finish"), [([5, EOS], Finish.STOP), ([5] * 4, Finish.LENGTH)])
def test_work_that_is_already_complete_is_reported_finished(tokens: list[int], finish: Finish) -> None:
    engine = make_engine(make_model())
    engine.submit([make_work(0, [5, 6], Sampling(max_tokens=4), tokens=tokens)])
    (progress,) = drain(engine)
    assert (progress.start, len(progress.columns), progress.finish) == (len(tokens), 0, finish)


def test_streamed_progress_joins_without_gaps() -> None:
    engine = make_engine(make_model(), eos_ids=())
    works = [make_work(i, prompt_of(i, 9), Sampling(max_tokens=25), tokens=[3] * i) for i in range(3)]
    engine.submit(works)
    position = {i: i for i in range(3)}
    for part in drain(engine):
        assert part.start == position[part.trajectory_id]
        position[part.trajectory_id] += len(part.columns)
    assert set(position.values()) == {25}


def test_a_repeated_or_older_lease_changes_nothing() -> None:
    engine = make_engine(make_model(), eos_ids=())
    work = make_work(0, [5, 6], Sampling(max_tokens=12), lease=2)
    engine.submit([work])
    for _ in range(4):
        engine.step()
    engine.submit([work, make_work(0, [9], LONG, lease=1)])
    progress = drain(engine)
    engine.submit([work])
    assert not engine.has_work and not engine.has_finished
    assert sum(len(part.columns) for part in progress) == 12


def test_a_newer_lease_replaces_the_older_one() -> None:
    engine = make_engine(make_model(), eos_ids=())
    engine.submit([make_work(0, [5, 6], Sampling(max_tokens=12), lease=0)])
    engine.step()
    engine.submit([make_work(0, [5, 6], Sampling(max_tokens=12), lease=1)])
    progress = drain(engine)
    assert {part.lease for part in progress} == {1}
    assert sum(len(part.columns) for part in progress) == 12


def test_a_released_trajectory_gives_back_its_tokens() -> None:
    model, engine = make_model(), make_engine(make_model(), eos_ids=())
    works = [make_work(i, prompt_of(i, 5), Sampling(max_tokens=30)) for i in range(3)]
    engine.submit(works)
    for _ in range(8):
        engine.step()
    engine.take_progress()
    released = engine.release([1, 77])
    whole = run(make_engine(model, eos_ids=()), works)
    assert released[0].columns.tokens.tolist() == whole[1][0][:8] and len(released) == 1
    assert (released[0].start, len(released[0].columns)) == (0, 8)
    assert engine.release([1]) == []
    assert {key: value[0] for key, value in collect(drain(engine)).items()} == {
        key: whole[key][0][8:] for key in (0, 2)
    }


def test_a_waiting_trajectory_is_released_with_nothing_sampled() -> None:
    engine = make_engine(make_model(), slots=1)
    engine.submit([make_work(0, [5], LONG), make_work(1, [6], LONG, tokens=[7, 8])])
    engine.step()
    (progress,) = engine.release([1])
    assert (progress.start, len(progress.columns), progress.finish) == (2, 0, None)
    assert engine.load().waiting == 0


def test_a_finished_trajectory_released_before_its_report_gives_its_finish() -> None:
    engine = make_engine(make_model(), eos_ids=())
    engine.submit([make_work(0, [5], Sampling(max_tokens=2))])
    engine.step()
    engine.step()
    (progress,) = engine.release([0])
    assert progress.finish is Finish.LENGTH and engine.take_progress() == []


def test_weights_that_are_not_finite_stop_generation_by_name() -> None:
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    engine = make_engine(model, version=12)
    engine.submit([make_work(4, [5, 6], LONG)])
    with pytest.raises(WeightsError, match=r"version 12 .* trajectories \[4\]"):
        engine.step()


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], LONG, "empty prompt"),
        ([5] * 400, LONG, "more than `rollout.max_sequence_tokens`"),
        ([5, 101], LONG, "token ids outside"),
        ([5], Sampling(max_tokens=3, stop_strings=("x",)), "no tokenizer"),
    ],
)
def test_work_that_cannot_be_done_is_refused_and_nothing_of_its_call_is_queued(
    prompt: list[int], sampling: Sampling, message: str
) -> None:
    engine = make_engine(make_model())
    with pytest.raises(DataError, match=message):
        engine.submit([make_work(0, [5], LONG), make_work(1, prompt, sampling)])
    assert not engine.has_work


def test_a_released_slot_is_filled_with_the_last_one() -> None:
    cache = KVCache((1, 3, 1, 4, 2), torch.float32, torch.device("cpu"))
    for slot in range(3):
        assert cache.allocate() == slot
        cache.keys[:, slot] = slot
        cache.extend(slot, slot + 1)
    assert not cache.can_allocate
    assert cache.release(0) == 2
    assert cache.lengths == [3, 2]
    assert (cache.keys[0, 0, 0, :, :3] == 2).all()
    assert cache.release(1) == 1 and cache.lengths == [3]
