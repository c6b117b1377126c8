"""The drafter beside the policy: it learns, it changes nothing of the policy, and it resumes bit for bit."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from trainer_doubles import (
    VOCAB,
    make_batch,
    make_trainer,
    save_checkpoint,
    tiny_model,
    weights_of,
    whole_sequences,
)

from millrace.core.completion.columns import TokenColumns
from millrace.core.types import Batch, TrainGroup, TrainSequence
from millrace.trainer import drafter_training
from millrace.trainer.drafter_training import DraftingTrainer, published_tensors
from millrace.trainer.files.checkpoint import load_checkpoint


def drafting(**changes):
    plain = make_trainer(**changes)
    return DraftingTrainer(7, plain.model, plain.algorithm, plain.settings, reference=plain.reference)


def state_of(trainer):
    """Weights and everything that the optimizer keeps."""
    states = [trainer.optimizer.state[p] for p in trainer.model.parameters()]
    return [*weights_of(trainer), *(value for state in states for _, value in sorted(state.items()))]


def apply(trainer, batches, directory):
    return [trainer.step(batch, rejected_dir=directory) for batch in batches]


def equal(some, others):
    return len(some) == len(others) and all(map(torch.equal, some, others))


def same(tensors, others):
    return tensors.keys() == others.keys() and all(
        torch.equal(tensors[name], others[name]) for name in tensors
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"token_budget": 60, "minibatches": 2, "epochs": 2},
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"published": torch.bfloat16, "reference": True}, marks=pytest.mark.long),
    ],
    ids=["several updates and rows", "one update", "rounded weights and a reference"],
)
def test_the_policy_is_the_same_bit_for_bit_with_a_drafter_beside_it(changes, tmp_path):
    batches = [make_batch(version) for version in range(4)]
    plain, beside = make_trainer(**changes), drafting(**changes)
    due, found = apply(plain, batches, tmp_path), apply(beside, batches, tmp_path)
    beside.drafter.finish()
    assert equal(state_of(plain), state_of(beside))
    assert [result.metrics for result in due] == [result.metrics for result in found]
    first = drafting(**changes).drafter.head
    assert not torch.equal(beside.drafter.head.fuse, first.fuse)


def test_a_resumed_trainer_publishes_the_same_drafter(tmp_path):
    batches = [make_batch(version) for version in range(5)]
    straight, broken = drafting(token_budget=60), drafting(token_budget=60)
    apply(broken, batches[:3], tmp_path)
    path = save_checkpoint(broken, tmp_path)
    resumed = drafting(model=tiny_model(seed=9), token_budget=60)
    load_checkpoint(resumed, path)
    apply(straight, batches[:3], tmp_path)
    for batch in (None, *batches[3:]):
        for trainer in (straight, resumed) if batch else ():
            apply(trainer, [batch], tmp_path)
        due, found = (published_tensors(trainer, torch.float32) for trainer in (straight, resumed))
        assert "drafter.fuse" in due and same(due, found)
    assert same(straight.drafter.tensors(), resumed.drafter.tensors())


def test_a_checkpoint_with_a_drafter_serves_a_run_without_one_and_the_reverse(tmp_path):
    trainer, other = drafting(), make_trainer(model=tiny_model(seed=9))
    apply(trainer, [make_batch()], tmp_path)
    load_checkpoint(other, save_checkpoint(trainer, tmp_path / "with"))
    assert equal(state_of(trainer), state_of(other))
    anew = drafting(model=tiny_model(seed=9))
    load_checkpoint(anew, save_checkpoint(other, tmp_path / "without"))
    assert torch.equal(anew.drafter.head.fuse, drafting().drafter.head.fuse)


def test_a_batch_of_which_nothing_is_trained_changes_no_drafter(tmp_path):
    trainer = drafting(algorithm=whole_sequences())
    apply(trainer, [make_batch()], tmp_path)
    before, group = trainer.drafter.tensors(), make_batch(1).groups[0]
    cut = [replace(sequence, truncated=True) for sequence in group.sequences]
    apply(trainer, [Batch(1, [replace(group, sequences=cut)])], tmp_path)
    assert same(before, trainer.drafter.tensors())


@pytest.mark.parametrize("reference", [False, True])
def test_a_batch_without_an_advantage_teaches_the_drafter(reference, tmp_path):
    batch, trainer = make_batch(0), drafting(reference=reference)
    equal_rewards = [
        replace(group, sequences=[replace(one, reward=1.0) for one in group.sequences])
        for group in batch.groups
    ]
    before = trainer.drafter.head.fuse.clone()
    apply(trainer, [replace(batch, groups=equal_rewards)], tmp_path)
    trainer.drafter.finish()
    assert not torch.equal(trainer.drafter.head.fuse, before)


def test_hidden_states_are_kept_of_a_bounded_number_of_tokens(monkeypatch):
    monkeypatch.setattr(drafter_training, "TOKENS_MIN", 8)
    trainer = drafting()
    trainer.accumulate(make_batch())
    passage = trainer.drafter.states.take()
    assert len(passage.states_NH) == len(passage.tokens_N) == 8
    assert passage.goes_on_N.any() and not passage.goes_on_N[-1]


def repeated(version):
    """Completions that count upwards, with rewards that cancel: a policy to imitate, and little to learn."""
    sequences = []
    for index in range(8):
        tokens = [(5 * index + place) % VOCAB for place in range(24)]
        columns = TokenColumns.of(tokens, [-1.0] * 24, [version] * 24)
        sequences.append(TrainSequence(index, columns, float(index % 2), False, [True] * 24))
    return Batch(version, [TrainGroup(0, [1, 2, 3], sequences)])


def share_of_guesses(trainer, batch):
    """How often the head's second guess is the most likely token of the policy."""
    drafter = trainer.drafter
    drafter.states.forget()
    trainer.accumulate(batch)
    trainer.forget_gradient()
    passage, embedding = drafter.states.take(), trainer.model.get_input_embeddings().weight
    goes_on = passage.goes_on_N
    starts = torch.nonzero(goes_on[:-1] & goes_on[1:])[:, 0]
    with torch.no_grad():
        state = passage.states_NH[starts]
        for place in (starts, starts + 1):
            state = drafter.head(state, embedding[passage.tokens_N[place]])
        due = drafter._logits(passage.states_NH[starts + 2]).argmax(-1)
        return (drafter._logits(state).argmax(-1) == due).float().mean().item()


def test_the_drafter_learns_what_the_policy_would_say(tmp_path):
    trainer = drafting()
    before = share_of_guesses(trainer, repeated(0))
    apply(trainer, [repeated(version) for version in range(12)], tmp_path)
    trainer.drafter.finish()
    assert share_of_guesses(trainer, repeated(12)) > before + 0.3
