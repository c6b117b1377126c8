"""What of slots, prefill and groups is this engine's own. The rest is in tests/engines."""

from __future__ import annotations

import pytest
import torch
from engine_models import EOS, make_engine, make_model, make_work, prompt_of, run

from millrace.core.errors import DataError
from millrace.core.turns.stop_strings import StopStrings
from millrace.core.types import Finish, Sampling
from millrace.engines.own.cache import KVCache

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


def test_kv_use_is_what_running_trajectories_have_computed() -> None:
    engine = make_engine(make_model(), slots=4, max_sequence_tokens=100)
    engine.submit([make_work(i, prompt_of(i, 10), LONG) for i in range(2)])
    engine.step()
    assert engine.load().kv_used_tokens == 20
    assert engine.load().kv_capacity_tokens == 4 * 100


def test_each_of_several_end_of_sequence_tokens_stops() -> None:
    model, prompt = make_model(scale=1.2), prompt_of(0, 5)
    free, _, _ = run(make_engine(model), [make_work(0, prompt, LONG)])[0]
    stop = free[6]
    engine = make_engine(model, eos_ids={EOS, stop})
    tokens, _, finish = run(engine, [make_work(0, prompt, LONG)])[0]
    assert tokens == free[: free.index(stop) + 1] and finish is Finish.STOP


def test_a_stop_string_is_found_inside_a_token_and_across_bytes_of_a_character() -> None:
    pieces = {0: b"fo", 1: b"o END", 2: b"x\xc3", 3: b"\xa9!"}

    def decode(tokens: list[int]) -> str:
        return b"".join(pieces[token] for token in tokens).decode(errors="replace")

    stop = StopStrings(decode, ["oo E", "é"])
    assert [stop.hit([0][:n]) for n in (0, 1)] == [False, False]
    assert stop.hit([0, 1])
    assert not stop.hit([0, 2]) and stop.hit([0, 2, 3])


@pytest.mark.parametrize("last", ["D", "D of a long line", "ND"])
def test_a_stop_string_is_found_behind_tokens_that_stand_for_no_text(last: str) -> None:
    """Ids that pad a model's vocabulary have no text, and a model may sample them."""
    pieces = ["a", "", "E", "N", last]
    stop = StopStrings(lambda tokens: "".join(pieces[token] for token in tokens), ["END"])
    before = [0, 2] if last == "ND" else [0, 2, 1, 1, 1, 3]
    assert stop.hit([*before, *[1] * 40, 4])
    assert not stop.hit([*before, *[1] * 40, 0, 4])


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], LONG, "empty prompt"),
        ([5] * 400, LONG, "more than `rollout.max_sequence_tokens`"),
        ([5, 101], LONG, "token ids outside"),
        ([5], Sampling(max_tokens=3, stop=("x",)), "no tokenizer"),
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
