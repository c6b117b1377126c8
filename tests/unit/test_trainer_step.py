from __future__ import annotations

import math
import sys
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from trainer_doubles import (
    make_batch,
    make_trainer,
    sequence_logprobs,
    tiny_model,
    weights_of,
    whole_sequences,
)

from millrace.algorithms import Algorithm, build
from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.training import Optimizer
from millrace.core.completion.columns import TokenColumns
from millrace.core.errors import DataError, TrainingError, WeightsError
from millrace.core.types import Batch
from millrace.trainer.batch.batch_step import SAVED_MAX, save_rejected
from millrace.trainer.batch.flat_batch import flatten
from millrace.trainer.batch.packing import pack
from millrace.trainer.model import recompute_layers, row_logprobs


def replaced(batch, **changes):
    """The batch with fields of its first sequence changed."""
    group = batch.groups[0]
    first = msgspec.structs.replace(group.sequences[0], **changes)
    group = msgspec.structs.replace(group, sequences=[first, *group.sequences[1:]])
    return Batch(batch.version, [group, *batch.groups[1:]])


def gradient(trainer, batch):
    trainer.accumulate(batch)
    return torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])


ALGORITHMS = [
    PolicyGradient(),
    PolicyGradient(normalize="sequence", kl=0.1),
    PolicyGradient(kind="dr_grpo"),
    PolicyGradient(kind="aipo"),
    whole_sequences(),
]


def with_logprobs(columns, logprobs):
    return TokenColumns.of(columns.tokens, logprobs, columns.versions())


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["grpo", "grpo-kl", "dr_grpo", "aipo", "by sequence"])
def test_the_token_budget_changes_no_gradient(algorithm):
    needs_reference = getattr(algorithm, "kl", 0) > 0
    batch, found = make_batch(version=1, groups=6), []
    for budget in (10_000, 100, 40, 1):
        trainer = make_trainer(algorithm, token_budget=budget, reference=needs_reference)
        found.append(gradient(trainer, batch))
    assert found[0].abs().max() > 1e-4
    for other in found[1:]:
        assert (other - found[0]).abs().max() < 1e-6


def without_signal(batch, *groups):
    """The batch with equal rewards in `groups`."""
    changed = [
        msgspec.structs.replace(
            group, sequences=[msgspec.structs.replace(s, reward=1.0) for s in group.sequences]
        )
        if index in groups
        else group
        for index, group in enumerate(batch.groups)
    ]
    return Batch(batch.version, changed)


@pytest.mark.parametrize("budget", [10_000, 100, 40])
@pytest.mark.parametrize(
    ("algorithm", "passes"),
    [
        (PolicyGradient(), False),
        (PolicyGradient(kind="aipo"), False),
        (PolicyGradient(normalize="sequence", kl=0.1), True),  # a penalty has a slope of its own
    ],
    ids=["grpo", "aipo", "grpo-kl"],
)
def test_a_row_without_a_slope_has_no_backward_pass_and_the_gradient_stays(
    algorithm, passes, budget, monkeypatch
):
    equal = without_signal(make_batch(version=1, groups=6), 0, 2, 3)
    options = {"token_budget": budget, "reference": passes}
    trainer, all_passes = make_trainer(algorithm, **options), make_trainer(algorithm, **options)
    trainer._rows = replace(trainer._rows, apart=0)
    all_passes._rows = replace(all_passes._rows, apart=sys.maxsize)
    calls = []
    backward = torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", lambda *args, **to: calls.append(backward(*args, **to)))
    found = gradient(trainer, equal)
    trees = trainer._prepared(equal, 1)
    advantages = trees.flat.advantages_C
    idle = [row for rows in trees.rows for row in rows if not advantages[row.flat_N].any()]
    num_rows = sum(map(len, trees.rows))
    assert idle
    assert len(calls) == 2 * num_rows - (0 if passes else len(idle))  # of each row's loss, and of the row
    expected = gradient(all_passes, equal)
    assert expected.abs().max() > 1e-4
    assert (found - expected).abs().max() < 1e-6


def test_a_batch_without_any_signal_is_a_step_with_its_statistics(tmp_path):
    batch = without_signal(make_batch(version=1), *range(len(make_batch().groups)))
    trainer = make_trainer()
    trainer.version = 1
    before = [p.detach().clone() for p in trainer.model.parameters()]
    result = trainer.step(batch, rejected_dir=tmp_path)
    assert result.version == 2
    assert result.metrics["grad_norm"] == 0.0
    assert result.metrics["groups_without_signal"] == 1.0
    assert sum(count for _, _, count in result.logprob_gap.values()) == result.trained_tokens
    assert all(torch.equal(p, was) for p, was in zip(trainer.model.parameters(), before, strict=True))


def test_what_is_not_to_be_trained_is_masked_and_stays_in_its_group():
    batch, algorithm = make_batch(version=1), whole_sequences()
    masked = [
        msgspec.structs.replace(
            group,
            sequences=[
                msgspec.structs.replace(s, mask=[False] * len(s.columns)) if s.truncated else s
                for s in group.sequences
            ],
        )
        for group in batch.groups
    ]
    assert any(s.truncated for group in batch.groups for s in group.sequences)
    one = gradient(make_trainer(algorithm), batch)
    assert torch.equal(one, gradient(make_trainer(algorithm), Batch(1, masked)))


def test_an_own_advantage_that_reads_no_group_is_told_what_it_is_given():
    algorithm = Algorithm(
        advantages=lambda rewards: rewards - rewards.mean(), objective=ALGORITHMS[-1].objective
    )
    with pytest.raises(DataError, match="the rewards are its `rewards_G`"):
        make_trainer(algorithm).accumulate(make_batch())


def test_an_advantage_may_be_one_for_each_token():
    def by_token(group):
        return [np.linspace(-1, 1, length) for length in group.lengths_G]

    def spread(xp, logprobs, advantages_N):
        return -advantages_N * logprobs.current_N

    batch = make_batch(version=1)
    plain = tiny_model(attention="eager")
    total = torch.zeros(())
    for group in batch.groups:
        for s in group.sequences:
            logprobs = sequence_logprobs(plain, group.prompt, s.columns.tokens.tolist())
            total = total - (torch.linspace(-1, 1, len(s.mask)) * logprobs * torch.tensor(s.mask)).sum()
    count = sum(sum(s.mask) for group in batch.groups for s in group.sequences)
    (total / count).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])
    found = gradient(make_trainer(Algorithm(advantages=by_token, objective=spread)), batch)
    assert (found - expected).abs().max() < 1e-6


def test_recomputed_layers_give_the_same_gradient():
    batch = make_batch(version=1)
    model = tiny_model()
    recompute_layers(model)
    assert torch.equal(gradient(make_trainer(model=model), batch), gradient(make_trainer(), batch))


def test_recomputed_layers_keep_less_for_the_backward_pass():
    def kept_bytes(model):
        found = {}

        def keep(tensor):
            found[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address comes twice
            return tensor

        row, *_ = pack(
            flatten(make_batch(version=1), build(PolicyGradient()), max_tokens=24).minibatches[0], 4096
        )
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            row_logprobs(model, row, temperature=1.0, dtype=torch.float32)
        weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        return sum(t.untyped_storage().nbytes() for ptr, t in found.items() if ptr not in weights)

    recomputing = tiny_model()
    recompute_layers(recomputing)
    assert kept_bytes(recomputing) < kept_bytes(tiny_model()) / 3


def test_the_order_of_groups_changes_no_gradient():
    batch = make_batch(version=1)
    turned = Batch(1, batch.groups[::-1])
    assert (gradient(make_trainer(), batch) - gradient(make_trainer(), turned)).abs().max() < 1e-6


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_loss_is_that_of_the_paper_written_out(temperature, tmp_path):
    batch = make_batch(version=1)
    trainer = make_trainer(PolicyGradient(kind="aipo", rho=3.0), temperature=temperature)
    plain = tiny_model(attention="eager")
    total, count = torch.zeros(()), 0
    for group in batch.groups:
        baseline = np.mean([s.reward for s in group.sequences])
        for s in group.sequences:
            logprobs = sequence_logprobs(plain, group.prompt, s.columns.tokens.tolist(), temperature)
            weight = (logprobs.detach() - torch.tensor(s.columns.logprobs.tolist())).exp().clamp(max=3.0)
            mask = torch.tensor(s.mask)
            total = total - (weight * (s.reward - baseline) * logprobs * mask).sum()
            count += int(mask.sum())
    (total / count).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])
    assert (gradient(trainer, batch) - expected).abs().max() < 1e-6
    trainer.optimizer.zero_grad()
    result = trainer.step(batch, rejected_dir=tmp_path)
    assert result.metrics["loss"] == pytest.approx((total / count).item(), abs=1e-6)
    assert result.trained_tokens == count


def test_the_same_batch_and_weights_give_the_same_bits(tmp_path):
    trainers = [make_trainer(model=tiny_model("llama")) for _ in range(2)]
    results = [[t.step(make_batch(v), rejected_dir=tmp_path) for v in range(3)] for t in trainers]
    for one, other in zip(*map(weights_of, trainers), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(*results, strict=True):
        assert (one.metrics, one.logprob_gap) == (other.metrics, other.logprob_gap)


def test_masked_tokens_are_context_and_nothing_else():
    batch = make_batch(version=1)
    first = batch.groups[0].sequences[0]
    lies = [
        value if trained else math.nan
        for value, trained in zip(first.columns.logprobs, first.mask, strict=True)
    ]
    assert not all(first.mask)
    assert torch.equal(
        gradient(make_trainer(), batch),
        gradient(make_trainer(), replaced(batch, columns=with_logprobs(first.columns, lies))),
    )


def test_what_is_not_finite_never_reaches_the_optimizer(tmp_path):
    algorithm = PolicyGradient(scale="none", correction=1e6)
    trainer, good = make_trainer(algorithm), make_batch()
    before, columns = weights_of(trainer), good.groups[0].sequences[0].columns
    batch = replaced(good, reward=1e36, columns=with_logprobs(columns, [-1e4] * len(columns)), mask=None)
    with pytest.raises(TrainingError, match=r"step 0 -> 1: the loss is (nan|inf|-inf).*saved as rejected_v0"):
        trainer.step(batch, rejected_dir=tmp_path)
    (saved,) = tmp_path.glob("rejected_v0_*.msgpack")
    saved_columns = msgspec.msgpack.decode(saved.read_bytes())["groups"][0]["sequences"][0]["columns"]
    assert (saved_columns["tokens"], saved_columns["versions"]) == (
        columns.tokens.tolist(),
        [list(run) for run in columns.runs],
    )
    assert trainer.version == 0
    assert not trainer.optimizer.state
    for one, other in zip(before, weights_of(trainer), strict=True):
        assert torch.equal(one, other)
    after = trainer.step(good, rejected_dir=tmp_path)  # and nothing of it is left in the gradient
    assert after.metrics == make_trainer(algorithm).step(good, rejected_dir=tmp_path).metrics


def test_a_gradient_that_is_not_finite_is_refused(tmp_path):
    trainer = make_trainer()
    trainer.model.get_input_embeddings().weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(TrainingError, match="gradient norm is"):
        trainer.step(make_batch(), rejected_dir=tmp_path)
    assert trainer.version == 0


def test_weights_that_a_step_broke_are_noticed_at_once(tmp_path):
    trainer = make_trainer()

    def breaks():
        with torch.no_grad():
            trainer.model.get_input_embeddings().weight[0, 0] = math.nan

    trainer.optimizer.step = breaks
    with pytest.raises(WeightsError, match=r"step 0 -> 1: the weights \['model.embed_tokens.weight'\]"):
        trainer.step(make_batch(), rejected_dir=tmp_path)
    assert trainer.version == 0


def test_a_run_keeps_the_first_rejected_batches_only(tmp_path):
    messages = [save_rejected(make_batch(version), tmp_path) for version in range(SAVED_MAX + 1)]
    assert "not saved" in messages[-1]
    assert save_rejected(make_batch(0), tmp_path) == messages[0]
    assert len(list(tmp_path.iterdir())) == SAVED_MAX


def test_the_gap_is_measured_before_the_update_and_told_by_staleness(tmp_path):
    batch, trainer = make_batch(version=3), make_trainer()
    trainer.version = 3
    plain = tiny_model(attention="eager")
    expected: dict[int, list[float]] = {}
    for group in batch.groups:
        for s in group.sequences:
            current = sequence_logprobs(plain, group.prompt, s.columns.tokens.tolist()).tolist()
            for now, then, version, trained in zip(
                current, s.columns.logprobs, s.columns.versions(), s.mask, strict=True
            ):
                if trained:
                    expected.setdefault(3 - version, []).append(abs(now - then))
    found = trainer.step(batch, rejected_dir=tmp_path).logprob_gap
    assert sorted(found) == sorted(expected) == [0, 1]
    for age, gaps in expected.items():
        assert found[age] == pytest.approx((np.mean(gaps), max(gaps), len(gaps)), abs=1e-5)


def test_the_learning_rate_warms_up_linearly_to_its_value(tmp_path):
    trainer = make_trainer(optimizer=Optimizer(lr=0.4, warmup_steps=4))
    rates = [trainer.step(make_batch(v), rejected_dir=tmp_path).metrics["lr"] for v in range(6)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_clipping_scales_the_gradient_to_the_given_norm(tmp_path):
    trainer = make_trainer(optimizer=Optimizer(lr=0.0, grad_clip=1e-3))
    seen, step = [], trainer.optimizer.step

    def spy():
        seen.append(torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()]).item())
        step()

    trainer.optimizer.step = spy
    result = trainer.step(make_batch(), rejected_dir=tmp_path)
    assert result.metrics["grad_norm"] > 1e-2
    assert seen == [pytest.approx(1e-3, rel=1e-3)]


def test_metrics_tell_the_batch(tmp_path):
    batch = make_batch(groups=2, group_size=2)
    metrics = make_trainer().step(batch, rejected_dir=tmp_path).metrics
    sequences = [s for group in batch.groups for s in group.sequences]
    assert metrics["reward"] == pytest.approx(np.mean([s.reward for s in sequences]))
    assert metrics["completion_tokens"] == pytest.approx(np.mean([len(s.columns) for s in sequences]))
    assert all(math.isfinite(value) for value in metrics.values())
    assert 0 < metrics["entropy"] < math.log(64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": [True] * 99}, "does not align"),
        ({"reward": math.nan}, "rewards of a group must be finite"),
        (
            {"columns": TokenColumns.of([1], [math.nan], 0), "mask": None},
            "log-probs that are not finite",
        ),
    ],
)
def test_a_malformed_batch_is_refused(changes, message, tmp_path):
    with pytest.raises(DataError, match=message):
        make_trainer().step(replaced(make_batch(), **changes), rejected_dir=tmp_path)


def test_a_token_from_the_future_is_refused(tmp_path):
    batch = make_batch(version=2)
    columns = batch.groups[0].sequences[0].columns
    with pytest.raises(DataError, match="newer than the trainer's version 2"):
        make_trainer().step(
            replaced(batch, columns=TokenColumns.of(columns.tokens, columns.logprobs, 3)),
            rejected_dir=tmp_path,
        )


def test_a_batch_without_a_trained_token_is_refused(tmp_path):
    batch = make_batch()
    groups = [
        msgspec.structs.replace(
            g, sequences=[msgspec.structs.replace(s, mask=[False] * len(s.columns)) for s in g.sequences]
        )
        for g in batch.groups
    ]
    with pytest.raises(DataError, match="no token to train on"):
        make_trainer().step(Batch(0, groups), rejected_dir=tmp_path)


@pytest.mark.parametrize("computing", [torch.float32, torch.bfloat16])
def test_gradients_are_of_the_weights_that_replicas_sample_with(computing) -> None:
    batch, rounded, model = make_batch(), tiny_model(), tiny_model()
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    trainer = make_trainer(model=model, dtype=computing, published=torch.bfloat16)
    masters = weights_of(trainer)
    expected = gradient(make_trainer(model=rounded, dtype=computing), batch)
    assert torch.equal(gradient(trainer, batch), expected)
    assert all(map(torch.equal, weights_of(trainer), masters))


def test_master_weights_come_back_from_a_batch_that_cannot_be_trained_on() -> None:
    trainer = make_trainer(PolicyGradient(scale="none", correction=1e6), published=torch.bfloat16)
    masters, good = weights_of(trainer), make_batch()
    columns = good.groups[0].sequences[0].columns
    broken = replaced(good, reward=1e36, columns=with_logprobs(columns, [-1e4] * len(columns)), mask=None)
    with pytest.raises(TrainingError):
        trainer.measure(broken)
    assert all(map(torch.equal, weights_of(trainer), masters))
