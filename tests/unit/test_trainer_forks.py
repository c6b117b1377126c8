"""A trajectory with forks is trained once: every sampled token in one sequence, and context in the others."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from test_algorithms_presets import MAX_TOKENS, PRESETS
from tests.long import few
from trainer_doubles import make_batch, make_trainer, sequence_logprobs, tiny_model, whole_sequences

from millrace.algorithms import build
from millrace.config.tables.algorithms import PolicyGradient
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.completion.forks import context
from millrace.core.completion.routing import Routing
from millrace.core.types import Batch, TrainGroup
from millrace.trainer.batch.flat_batch import flatten
from millrace.trainer.batch.packing import pack
from millrace.trainer.model import row_logprobs

SIZES = 10_000, 16


def in_turns(batch: Batch, *, seed: int = 0) -> Batch:
    """Trajectories of several turns, with other tokens and the same rewards."""
    random, groups = np.random.default_rng(seed), []
    for group in batch.groups:
        sequences = []
        for one in group.sequences:
            columns = TokenColumns()
            for turn in range(int(random.integers(1, 6))):
                count = int(random.integers(1, 5))
                if turn:
                    columns.observe(random.integers(0, 64, count).tolist())
                logprobs = random.uniform(-6, -2, count).tolist()
                columns.extend(TokenColumns.of(random.integers(0, 64, count).tolist(), logprobs, 0))
            sequences.append(msgspec.structs.replace(one, columns=columns, mask=columns.sampled()))
        groups.append(msgspec.structs.replace(group, sequences=sequences))
    return Batch(batch.version, groups)


def forked(batch: Batch, *, seed: int = 0, complete: bool = False) -> Batch:
    """The same trajectories, with a fork at observations. `complete`: after all that precedes."""
    random, groups = np.random.default_rng(seed), []
    for group in batch.groups:
        sequences = []
        for one in group.sequences:
            columns = TokenColumns()
            turns = one.columns.turns()
            for number, (start, stop, sampled) in enumerate(turns):
                if not sampled and complete:
                    columns.fork(start, 0)
                elif not sampled and random.random() < 0.7:
                    after = int(random.choice([0, *(end for _, end, own in turns[:number] if own)]))
                    columns.fork(after, 0 if after else int(random.integers(0, len(group.prompt) + 1)))
                columns.extend(one.columns[start:stop])
            sequences.append(msgspec.structs.replace(one, columns=columns))
        groups.append(msgspec.structs.replace(group, sequences=sequences))
    return Batch(batch.version, groups)


def seen_by(group: TrainGroup, columns: TokenColumns, position: int) -> list[int]:
    """All that the token at this position follows, one fork after the other."""
    fork = next((fork for fork in reversed(columns.forks) if fork.start <= position), None)
    if fork is None:
        return [*group.prompt, *columns.tokens[:position]]
    before = list(group.prompt)[: fork.kept]
    if fork.after:
        before = [*seen_by(group, columns, fork.after - 1), columns.tokens[fork.after - 1]]
    return [*before, *columns.tokens[fork.start : position]]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("whole", [False, True])
def test_every_sampled_token_is_trained_once_behind_what_its_own_sequence_saw(seed, whole):
    batch = forked(in_turns(make_batch(seed=seed, groups=2, group_size=2), seed=seed), seed=seed)
    model, plain = tiny_model(), tiny_model(attention="eager")
    algorithm = replace(whole_sequences(), trained=None) if whole else build(PolicyGradient())
    flat = flatten(batch, algorithm, max_tokens=99)
    expected = []
    for group in batch.groups:
        for one in group.sequences:
            for position, sampled in enumerate(one.columns.sampled() or [True] * len(one.columns)):
                before = seen_by(group, one.columns, position)
                token = [one.columns.tokens[position]]
                wanted = sequence_logprobs(plain, before, token).item() if sampled else np.nan
                expected.append(wanted)
    for budget in SIZES:
        found, times = np.full(len(expected), np.nan), np.zeros(len(expected), int)
        for row in pack(flat.minibatches[0], budget):
            logprobs_N = row_logprobs(model, row, temperature=1.0, dtype=torch.float32)[0]
            found[row.flat_N] = logprobs_N.detach().numpy()
            np.add.at(times, row.flat_N, 1)
        assert times.tolist() == (~np.isnan(expected)).astype(int).tolist()
        assert np.allclose(found, expected, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("seed", range(3))
def test_trees_are_told_apart_by_the_advantages_of_their_own_tokens(seed):
    first, *others = forked(in_turns(make_batch(seed=seed, groups=3), seed=seed), seed=seed).groups
    equal = [msgspec.structs.replace(one, reward=1.0) for one in first.sequences]
    batch = Batch(0, [*others, msgspec.structs.replace(first, sequences=equal)])
    flat = flatten(batch, build(PolicyGradient()), max_tokens=99)
    advantaged, idle = flat.by_advantage(flat.minibatches[0])
    assert idle and len(advantaged) + len(idle) == len(flat.minibatches[0])
    for tree in flat.minibatches[0]:
        slopes = [flat.advantages_C[row.flat_N].any() for row in pack([tree], 10_000)]
        assert any(slopes) == any(tree is one for one in advantaged)
    tokens = sum(branch.num_forwarded for tree in idle for branch in tree.branches)
    assert flat.by_advantage(flat.minibatches[0], tokens)[1] == idle
    assert flat.by_advantage(flat.minibatches[0], tokens + 1) == (flat.minibatches[0], [])


def gradient(batch, algorithm, budget):
    trainer = make_trainer(
        algorithm, token_budget=budget, max_tokens=MAX_TOKENS, reference=algorithm.needs_reference
    )
    loss = trainer.accumulate(batch)
    return loss, torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])


MORE = {
    "kl": PolicyGradient(kl=0.1),
    "max_tokens": PolicyGradient(normalize="max_tokens"),
    "by sequence": PolicyGradient(normalize="sequence", correction_of="sequence"),
    "drift": PolicyGradient(drift=0.1),
}


KINDS = "grpo", "dapo", "dr_grpo", "gspo", "mt_grpo", "ppo"
"""One of each normalisation, of a sequence-level ratio, of advantages by turn, and of a critic."""


@pytest.mark.parametrize("kind", few([*KINDS, *MORE], 6))
def test_several_rows_of_one_trajectory_have_the_loss_and_the_gradient_of_one_row(kind):
    algorithm = build(MORE[kind] if kind in MORE else PRESETS[kind]())
    batch = in_turns(make_batch(groups=2))
    _, one = gradient(batch, algorithm, SIZES[0])
    assert one.abs().max() > 1e-4
    for budget in SIZES:
        _, several = gradient(forked(batch, complete=True), algorithm, budget)
        assert (several - one).norm() <= 5e-6 * max(1.0, one.norm())


def test_experts_are_replayed_in_the_sequence_that_recorded_them():
    """Also in a sequence that shares no token with the prompt."""
    columns = TokenColumns.of([1, 2], [-1.0, -1.0], 0)
    columns.fork(0, 0)
    columns.observe([3, 4])
    columns.extend(TokenColumns.of([5], [-1.0], 0))
    columns.routing = Routing(1, Routing(1).experts.__class__("B", [10, 11, 255, 13, 14]))
    group = make_batch().groups[0]
    one = msgspec.structs.replace(group.sequences[0], columns=columns, mask=columns.sampled())
    group = TrainGroup(0, [8, 9], [one, msgspec.structs.replace(one, trajectory_id=1)])
    flat = flatten(Batch(0, [group]), build(PolicyGradient()), max_tokens=9)
    [row] = pack(flat.minibatches[0][:1], 100)
    assert row.tokens_T.tolist() == [3, 4, 8, 9, 1] and row.sources_N.tolist() == [1, 3, 4]
    assert row.routing_TW is not None and row.routing_TW[:, 0].tolist() == [13, 14, -1, 10, 11]


def test_the_context_of_a_fork_is_what_precedes_it():
    columns = TokenColumns.of([1, 2], [-1.0, -1.0], 0)
    columns.observe([3])
    columns.extend(TokenColumns.of([4], [-1.0], 0))
    columns.fork(2, 0)
    columns.observe([5])
    columns.extend(TokenColumns.of([6], [-1.0], 0))
    columns.fork(6, 0)
    columns.observe([7])
    columns.extend(TokenColumns.of([2], [-1.0], 0))
    columns.fork(0, 1)
    columns.observe([10])
    found = [
        context(token_array([8, 9]), columns.tokens, columns.forks, fork.start + 1).tolist()
        for fork in columns.forks
    ]
    assert found == [[8, 9, 1, 2, 5], [8, 9, 1, 2, 5, 6, 7], [8, 10]]
    assert columns.sequence_start == len(columns)
