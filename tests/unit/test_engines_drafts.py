"""Drafts change no token, no log-prob and no record, whatever is drafted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import flash_double
import pytest
import torch
from engine_models import (
    EOS,
    VOCAB,
    drain,
    make_engine,
    make_exact_engine,
    make_model,
    make_work,
    prompt_of,
    weights_into,
)

from millrace.core.completion.columns import TokenColumns
from millrace.core.errors import ConfigError, WeightsError
from millrace.core.types import Finish, Progress, Sampling, Work
from millrace.engines.own.architecture import architecture_of
from millrace.engines.own.drafts import drafter
from millrace.engines.own.drafts.drafter import Drafter
from millrace.engines.own.drafts.drafting_engine import DraftingEngine
from millrace.engines.own.drafts.earlier import EarlierCompletions, Followers
from millrace.engines.own.torch_engine import TorchEngine
from millrace.rollout.continuation import Continuation
from millrace.rollout.protocol import EngineOptions

Completions = dict[int, tuple[TokenColumns, Finish | None]]


class Guesses:
    """A drafter that knows every completion. `share` of its tokens are right."""

    wants_hidden = False

    def __init__(self, completions: Mapping[int, Sequence[int]], share: float) -> None:
        self._completions, self._share, self._random = completions, share, random.Random(0)
        self.notes: list[tuple[int, int]] = []

    def propose(
        self, rows: Sequence[Continuation], most: Sequence[int], hidden: torch.Tensor | None
    ) -> list[list[int]]:
        return [
            [
                token if self._random.random() < self._share else (token + 1) % VOCAB
                for token in self._completions[row.work.trajectory_id][row.completion_length :][:limit]
            ]
            for row, limit in zip(rows, most, strict=True)
        ]

    def note(self, row: Continuation, count: int, draft: Sequence[int], hidden: torch.Tensor | None) -> None:
        self.notes.append((count, len(draft)))

    def finish(self, row: Continuation) -> None: ...

    def swap(self) -> None: ...


def make_drafting(model: Any, drafter: Drafter | None = None, **options: Any) -> DraftingEngine:
    usual = {"model_path": "", "device": "cpu", "slots": 16, "max_sequence_tokens": 320, "drafts": "earlier"}
    decode, ends = options.pop("decode", None), options.pop("eos_ids", {EOS})
    try:
        engine = DraftingEngine(
            architecture_of(model.config),
            EngineOptions(**usual | {"exact": True, "keep_kv": False, "probe": False} | options),
            eos_ids=ends,
            decode=decode,
            drafter=drafter,
        )
    except ConfigError as error:
        pytest.skip(str(error))
    weights_into(engine, model)
    engine.swap(0)
    return engine


def completions(progress: Sequence[Progress]) -> Completions:
    found: Completions = {}
    for part in progress:
        columns, finish = found.get(part.trajectory_id, (TokenColumns(), None))
        columns.extend(part.columns)
        found[part.trajectory_id] = columns, part.finish or finish
    return found


def played(engine: TorchEngine, works: Sequence[Work]) -> Completions:
    engine.submit(works)
    return completions(drain(engine))


def text(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in tokens)


SAMPLINGS = [
    Sampling(max_tokens=40),
    Sampling(max_tokens=25, temperature=0.0, logprobs=3),
    Sampling(max_tokens=30, temperature=0.7, top_k=9, token_masks=True),
    Sampling(max_tokens=33, repetition_penalty=1.3, presence_penalty=0.5, banned_token_ids=(3, 4)),
    Sampling(max_tokens=50, stop=("ab", "c"), temperature=0.4),
    Sampling(max_tokens=60, top_p=0.8, stop_token_ids=tuple(range(80, VOCAB))),
]


def mixed_works(first: int = 0, *, routing: bool = False) -> list[Work]:
    """Groups of two, and a trajectory that goes on from a second turn."""
    samplings = [Sampling(**{**_fields(s), "routing": routing}) for s in SAMPLINGS]
    works = [
        make_work(first + i, prompt_of(i // 2, 9), sampling, group_id=first + i // 2)
        for i, sampling in enumerate(samplings)
    ]
    turn = {"tokens": prompt_of(5, 11), "turn_start": 11}
    return [*works, make_work(first + len(works), prompt_of(7, 5), samplings[5], **turn)]


def _fields(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


LONG = pytest.mark.long


@pytest.mark.parametrize("model", ["qwen2, windows", "qwen3_moe", pytest.param("qwen3 tied", marks=LONG)])
def test_no_token_and_no_record_depends_on_drafts(model: str) -> None:
    made, options = make_model(model), {"decode": text}
    works = mixed_works(routing=model == "qwen3_moe")
    plain = make_exact_engine(made, **options)
    expected = played(plain, works)
    assert {finish for _, finish in expected.values()} == {Finish.STOP, Finish.LENGTH}
    tokens = {work.trajectory_id: [*work.tokens, *expected[work.trajectory_id][0].tokens] for work in works}
    for share in (1.0, 0.6, 0.0):
        engine = make_drafting(made, Guesses(tokens, share), draft_tokens=5, **options)
        assert played(engine, works) == expected, share
        load = engine.load()
        assert load.generated_tokens == plain.load().generated_tokens
        assert (load.accepted_tokens == load.drafted_tokens > 0) == (share == 1.0)
        assert (load.accepted_tokens == 0) == (share == 0.0)
        assert load.steps_since_swap <= plain.load().steps_since_swap * (0.3 if share == 1.0 else 1.0)


def test_rows_that_repeat_are_drafted_from_their_earlier_completions() -> None:
    model = make_model()
    plain, drafting = make_exact_engine(model), make_drafting(model)
    for epoch in range(2):
        works = [
            make_work(
                10 * epoch + i, prompt_of(i // 2, 9), Sampling(max_tokens=30, temperature=0.2 * (i % 2))
            )
            for i in range(4)
        ]
        assert played(drafting, works) == played(plain, works), epoch
    load = drafting.load()
    assert load.accepted_tokens > 0.5 * load.drafted_tokens > 0
    assert load.steps_since_swap < 0.8 * plain.load().steps_since_swap


@pytest.mark.parametrize("recompute", [True, False])
def test_a_swap_in_the_middle_of_drafts_leaves_nothing_of_the_old_weights(recompute: bool) -> None:
    old, new, works = make_model(seed=1), make_model(seed=2), mixed_works()[:3]
    tokens = {key: columns.tokens for key, (columns, _) in played(make_exact_engine(old), works).items()}
    engine = make_drafting(old, Guesses(tokens, 0.8), recompute=recompute)
    engine.submit(works)
    for _ in range(4):
        engine.step()
    before = completions(engine.take_progress())
    weights_into(engine, new)
    engine.swap(1)
    found = completions(drain(engine))
    for columns, _ in found.values():
        assert [version for version, _ in columns.runs] == [1]
    if recompute:
        resumed = [
            make_work(w.trajectory_id, w.prompt, w.sampling, group_id=w.group_id, tokens=known)
            for w in works
            if len(known := before[w.trajectory_id][0].tokens) < w.sampling.max_tokens
        ]
        fresh = make_engine(new, 1, exact=True)
        assert played(fresh, resumed) == found


def test_sleep_and_release_in_the_middle_of_drafts() -> None:
    model, works = make_model(), mixed_works()[:4]
    expected = played(make_exact_engine(model), works)
    tokens = {key: columns.tokens for key, (columns, _) in expected.items()}
    engine = make_drafting(model, Guesses(tokens, 0.7))
    engine.submit(works)
    engine.step()
    engine.step()
    (released,) = engine.release([1])
    assert released.columns.tokens == tokens[1][: len(released.columns)] and len(released.columns) > 2
    engine.sleep()
    engine.wake()
    weights_into(engine, model)
    engine.swap(0)
    engine.submit([make_work(1, works[1].prompt, SAMPLINGS[1], lease=1, tokens=released.columns.tokens)])
    found = completions(drain(engine))
    for key in tokens:
        start = len(released.columns) if key == 1 else 0
        assert found[key][0] == expected[key][0][start:]


def test_wrong_drafts_switch_themselves_off() -> None:
    work = make_work(0, prompt_of(0, 9), Sampling(max_tokens=200, ignore_eos=True))
    model = make_model()
    tokens = {0: played(make_engine(model), [work])[0][0].tokens}
    engine = make_drafting(model, Guesses(tokens, 0.0), exact=False)
    played(engine, [work])
    assert 0 < engine.load().drafted_tokens <= 40


def test_drafts_are_made_in_the_tail_alone() -> None:
    model = make_model()
    works = [make_work(i, prompt_of(i, 5), Sampling(max_tokens=4 * i, ignore_eos=True)) for i in range(1, 9)]
    tokens = {key: columns.tokens for key, (columns, _) in played(make_engine(model), works).items()}
    drafter = Guesses(tokens, 1.0)
    engine = make_drafting(model, drafter, exact=False, draft_rows_max=3)
    engine.submit(works)
    for _ in range(20):
        assert not engine.load().drafted_tokens
        engine.step()
    drain(engine)
    assert engine.load().accepted_tokens == engine.load().drafted_tokens > 15
    assert max(drafted for _, drafted in drafter.notes) == 4


@pytest.mark.parametrize("recorded", [False, True])
def test_a_drafter_gets_the_states_that_tokens_were_sampled_from(
    monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    if recorded:
        flash_double.install(monkeypatch)
    model, work = make_model(), make_work(0, prompt_of(0, 9), Sampling(max_tokens=30, ignore_eos=True))
    known = played(make_engine(model), [work])[0][0].tokens
    with torch.inference_mode():
        states = model.model(torch.tensor([[*work.prompt, *known]])).last_hidden_state[0, 8:]

    class Watching(Guesses):
        wants_hidden = True

        def propose(self, rows, most, hidden):
            torch.testing.assert_close(hidden[0], states[rows[0].completion_length - 1])
            return super().propose(rows, most, hidden)

        def note(self, row, count, draft, hidden):
            super().note(row, count, draft, hidden)
            if recorded and not draft:
                return
            torch.testing.assert_close(hidden, states[row.completion_length - count : row.completion_length])

    drafter = Watching({0: known}, 0.7)
    engine = make_drafting(model, drafter, exact=False)
    played(engine, [work])
    assert sum(count for count, _ in drafter.notes) == 30 and engine.load().accepted_tokens > 5


def test_on_a_gpu_drafts_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model, works = make_model(), mixed_works()
    flash_double.install(monkeypatch)
    expected = played(make_engine(model, decode=text), works)
    tokens = {w.trajectory_id: [*w.tokens, *expected[w.trajectory_id][0].tokens] for w in works}
    engine = make_drafting(model, Guesses(tokens, 0.7), exact=False, decode=text)
    found = played(engine, works)
    assert engine.load().accepted_tokens > 0
    assert {key: columns.tokens for key, (columns, _) in found.items()} == {
        key: columns.tokens for key, (columns, _) in expected.items()
    }


def test_weights_that_give_no_numbers_are_refused() -> None:
    model, work = make_model(), make_work(0, prompt_of(0, 9), Sampling(max_tokens=30, ignore_eos=True))
    tokens = {0: played(make_engine(model), [work])[0][0].tokens}
    engine = make_drafting(model, Guesses(tokens, 1.0), exact=False)
    engine.submit([work])
    engine.step()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    weights_into(engine, model)
    engine.swap(1)
    with pytest.raises(WeightsError, match="not finite for trajectories"):
        drain(engine)


# ---------------------------------------------------------------- what followed


def test_the_longest_match_of_the_row_comes_first() -> None:
    table = Followers()
    for _ in range(3):
        table.learn(0, [1, 2, 3, 4, 5], 1)
        table.learn(1, [9, 2, 3, 4, 6, 7], 1)
        table.learn(1, [9, 2, 3, 4, 6, 7], 1)
    assert table.guess(0, [1, 2, 3, 4])[0] == 5
    assert table.guess(1, [9, 2, 3, 4])[0] == 6
    assert table.guess(2, [4, 6])[0] == 7  # of another row
    assert table.guess(2, [8]) == (0, 0.0)


def test_the_memory_is_bounded_and_the_oldest_is_forgotten() -> None:
    table, rng = Followers(contexts_max=500), random.Random(0)
    for row in range(40):
        table.learn(row, [rng.randrange(1000) for _ in range(100)], 1)
        table.learn(99, [1, 2, 3, 4, 5, 6], 1)
        assert len(table) <= 2 * 500 + 8
    assert table.guess(99, [1, 2, 3, 4, 5])[0] == 6  # was asked for all the time


def test_completions_wait_unread_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.engines.own.drafts.earlier.PENDING_TOKENS_MAX", 100)
    drafter, rules = EarlierCompletions(), {"eos_ids": frozenset({EOS}), "max_sequence_tokens": 64}
    for tid in range(20):
        work = make_work(tid, [tid, 2], Sampling(max_tokens=32), tokens=[tid] * 20)
        drafter.finish(Continuation(work, vocab=VOCAB, engine="the engine", decode=None, **rules))
    assert len(drafter._pending) == 4


def test_a_turn_is_learned_once_and_not_again_with_each_later_turn() -> None:
    class Counted(Followers):
        learned = 0

        def learn(self, row: int, tokens: Sequence[int], start: int) -> None:
            self.learned += len(tokens) - start
            super().learn(row, tokens, start)

    table, tokens, rules = Counted(), list[int](), {"eos_ids": frozenset({EOS}), "max_sequence_tokens": 64}
    drafter, prompt = EarlierCompletions(table), [5, 2]
    for lease in range(4):
        work = make_work(
            0, prompt, Sampling(max_tokens=60), tokens=tokens, lease=lease, turn_start=len(tokens)
        )
        row = Continuation(work, vocab=VOCAB, engine="the engine", decode=None, **rules)
        for token in (7, 8, 7, 8, EOS):
            row.append(token, -1.0, 0)
        drafter.finish(row)
        tokens = [*row.tokens[len(prompt) :], 9, 9, 9]  # an observation
        drafter.propose([], [], None)
    assert table.learned == 4 * 5 + 3 * 3
    fork = make_work(0, [*prompt, 7, 8], Sampling(max_tokens=60), lease=9)  # its prompt has what it follows
    row = Continuation(fork, vocab=VOCAB, engine="the engine", decode=None, **rules)
    row.append(11, -1.0, 0)
    drafter.propose([row], [1], None)
    assert table.learned == 4 * 5 + 3 * 3 + 1


@pytest.mark.parametrize("lease", [0, 1])
def test_a_trajectory_that_begins_again_is_learned_again(lease: int) -> None:
    """As in the next evaluation, or under another version. With its work a hint may come."""
    drafter, rules = EarlierCompletions(), {"eos_ids": frozenset({EOS}), "max_sequence_tokens": 64}
    for number, tokens in ((0, [7, 8, 9, 10, 11, 12]), (lease, [13, 14, 15, 16])):
        hints = {"earlier": [[17, 18, 19, 20]] * number}
        work = make_work(0, [5, 2], Sampling(max_tokens=60), lease=number, **hints)
        row = Continuation(work, vocab=VOCAB, engine="the engine", decode=None, **rules)
        for token in tokens:
            row.append(token, -1.0, 0)
        drafter.finish(row)
    again = make_work(1, [5, 2], Sampling(max_tokens=60), tokens=[13, 14])
    row = Continuation(again, vocab=VOCAB, engine="the engine", decode=None, **rules)
    assert drafter.propose([row], [1], None) == [[15]]
    assert drafter._followers.guess(hash((5, 2)), [5, 2, 17, 18])[0] == 19 * lease


def test_a_prompt_is_looked_up_once_and_not_in_every_step() -> None:
    class Counted(list[int]):
        reads = 0

        def __iter__(self) -> Iterator[int]:
            self.reads += 1
            return super().__iter__()

    prompt, rules = Counted([5, 2]), {"eos_ids": frozenset({EOS}), "max_sequence_tokens": 64}
    work = make_work(0, prompt, Sampling(max_tokens=32, ignore_eos=True))
    row = Continuation(work, vocab=VOCAB, engine="the engine", decode=None, **rules)
    drafter, prompt.reads = EarlierCompletions(), 0
    for token in (7, 8, 7, 8, 7):
        row.append(token, -1.0, 0)
        (draft,) = drafter.propose([row], [2], None)
    assert draft == [8, 7] and prompt.reads == 1


def test_what_does_not_pay_rests_and_is_tried_again() -> None:
    one, tries = drafter.Worth(), 0
    for _ in range(10 * drafter.REST):
        if one.tries():
            tries += 1
            one.note(0, 4)
    assert tries == 10
    while not one.tries():
        one.note(1, 1)
    assert one.share >= drafter.PAYS
