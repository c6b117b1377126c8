"""Router replay: the experts that a token was sampled with are those that it is trained with."""

from __future__ import annotations

import pickle

import msgspec
import numpy as np
import pytest
import torch
from engine_models import drain, make_engine, make_work, prompt_of
from hypothesis import given
from hypothesis import strategies as st
from trainer_doubles import VOCAB, make_trainer, tiny_model

from millrace.core.completion.columns import TokenColumns, pack, unpack
from millrace.core.completion.routing import Routing
from millrace.core.errors import DataError
from millrace.core.types import Batch, Sampling, TrainGroup, TrainSequence
from millrace.ledger.codec import pack_plain, pack_squeezed, pack_versions, unpack_columns
from millrace.trainer import model
from millrace.trainer.batch.packing import Branch, Tree
from millrace.trainer.batch.packing import pack as pack_rows
from millrace.trainer.model import install_replay, recompute_layers
from millrace.trainer.recorded import OWN, routing_of

FAMILIES = ["qwen3_moe", "qwen3_moe, a dense layer", "gpt_oss"]
LENGTH, GROUP = 12, 4


def model_of(family: str = FAMILIES[0], **changes):
    """As `load_model` makes it."""
    model = tiny_model(family, **changes)
    install_replay(model)
    return model


def sampled(model, *, records: bool = True, length: int = LENGTH) -> Batch:
    """A batch of one group that the engine sampled from `model`."""
    engine, prompt = make_engine(model), [token % VOCAB for token in prompt_of(1, 7)]
    sampling = Sampling(max_tokens=length, ignore_eos=True, routing=records)
    engine.submit([make_work(i, prompt, sampling, group_id=0) for i in range(GROUP)])
    columns = {i: TokenColumns() for i in range(GROUP)}
    for progress in drain(engine):
        columns[progress.trajectory_id].extend(progress.columns)
    sequences = [TrainSequence(i, columns[i], float(i % 2), truncated=False) for i in range(GROUP)]
    return Batch(0, [TrainGroup(0, prompt, sequences)])


def without_records(batch: Batch) -> Batch:
    groups = []
    for group in batch.groups:
        sequences = []
        for sequence in group.sequences:
            columns = sequence.columns[:]
            columns.routing = None
            sequences.append(msgspec.structs.replace(sequence, columns=columns))
        groups.append(msgspec.structs.replace(group, sequences=sequences))
    return Batch(batch.version, groups)


def gradient(model, batch: Batch) -> dict[str, torch.Tensor]:
    trainer = make_trainer(model=model, token_budget=64)
    trainer.accumulate(batch)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(found: dict[str, torch.Tensor], due: dict[str, torch.Tensor]) -> float:
    flat, of_due = (torch.cat([each.flatten() for each in one.values()]) for one in (found, due))
    return float((flat - of_due).norm() / of_due.norm())


def perturb(model) -> None:
    """Routers that would choose other experts."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                parameter.add_(torch.randn(parameter.shape, generator=generator))


def chosen_by(model, batch: Batch) -> list[torch.Tensor]:
    """The experts that each layer with experts computes in the pass over `batch`: (T, K) each."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
        for layer in model.base_model.layers
        if hasattr(layer.mlp, "experts")
    ]
    gradient(model, batch)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_at_staleness_0_the_gradient_is_that_of_a_run_that_recorded_nothing(family, recompute):
    model = model_of(family)
    batch = sampled(model)
    assert all(sequence.columns.routing is not None for sequence in batch.groups[0].sequences)
    if recompute:
        recompute_layers(model)
    assert error(gradient(model, batch), gradient(model, without_records(batch))) < 1e-5


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_the_experts_that_were_sampled_are_those_that_are_trained(recompute):
    model = model_of()
    batch = sampled(model)
    perturb(model)
    if recompute:
        recompute_layers(model)
    group = batch.groups[0]
    branches = [
        Branch(np.asarray(sequence.columns.tokens), np.ones(LENGTH, bool), i * LENGTH, records)
        for i, (sequence, records) in enumerate(
            zip(group.sequences, routing_of(group.sequences), strict=True)
        )
    ]
    [row] = pack_rows([Tree(group.prompt, branches)], 4096)
    first, second, *again = chosen_by(model, batch)
    prompt, num_tokens = len(group.prompt) - 1, len(row.tokens_T)
    for chosen, layer in ((first, 0), (second, 1)):
        due = row.routing_TW[:, 2 * layer : 2 * layer + 2]
        assert (due[prompt:] != OWN).all() and (due[:prompt] == OWN).all()
        assert chosen[prompt:num_tokens].tolist() == due[prompt:].tolist()
    assert len(again) == (2 if recompute else 0)
    if recompute:  # the backward pass computes the last layer first
        assert torch.equal(again[0], second) and torch.equal(again[1], first)
    own = chosen_by(model, without_records(batch))[0]
    assert own[prompt:num_tokens].tolist() != first[prompt:num_tokens].tolist()


def test_every_router_keeps_its_gradient_when_none_of_its_own_choices_is_used():
    """Shares are taken from logits of all experts: of a cut softmax they would have no slope."""
    model = model_of()
    batch = sampled(model)
    for sequence in batch.groups[0].sequences:
        routing = sequence.columns.routing
        flipped = [3 - expert for expert in routing.experts]  # of 4 experts, others than were chosen
        routing.experts = type(routing.experts)("B", flipped)
    found = gradient(model, batch)
    slopes = [each.abs().sum() for name, each in found.items() if name.endswith("mlp.gate.weight")]
    assert slopes and all(slope > 0 for slope in slopes)


def test_shares_are_those_of_a_softmax_over_the_logits_of_all_experts(monkeypatch):
    router = model_of().base_model.layers[0].mlp.gate
    hidden = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    logits, _, own = router(hidden)
    others = torch.tensor([sorted(set(range(4)) - set(own[0].tolist()))])
    monkeypatch.setattr(model._RECORDED, "experts_TK", others)
    _, shares, experts = router(hidden)
    probs = logits.exp()[0, others[0]]
    assert torch.equal(experts, others)
    torch.testing.assert_close(shares[0], probs / probs.sum())


def test_sequences_that_begin_alike_with_other_experts_share_no_position_from_there_on():
    tokens, mask = np.array([5, 6, 7, 8]), np.ones(4, bool)
    same = np.array([[0], [1], [2], [3]], np.int32)
    other = np.array([[0], [1], [9], [3]], np.int32)
    [row] = pack_rows([Tree([1, 2, 3], [Branch(tokens, mask, 0, same), Branch(tokens, mask, 4, other)])], 64)
    assert row.tokens_T.tolist() == [1, 2, 3, 5, 6, 7, 6, 7]
    assert row.routing_TW[:, 0].tolist() == [OWN, OWN, 0, 1, 2, 3, 9, 3]
    assert row.sources_N.tolist() == [2, 3, 4, 5, 2, 3, 6, 7]
    first = np.array([[7], [1], [2], [3]], np.int32)
    [row] = pack_rows([Tree([1, 2, 3], [Branch(tokens, mask, 0, same), Branch(tokens, mask, 4, first)])], 64)
    assert row.tokens_T.tolist() == [1, 2, 3, 5, 6, 7, 3, 5, 6, 7]
    assert row.positions_T.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5]


def test_tokens_that_no_engine_of_ours_sampled_are_routed_by_the_trainer():
    model = model_of()
    batch = sampled(model)
    columns = batch.groups[0].sequences[0].columns
    columns.extend(TokenColumns.of([3, 4], [-1.0, -1.0], 0))  # a turn of an environment, or of another engine
    [first, *_] = routing_of(batch.groups[0].sequences)
    assert (first[:LENGTH] != OWN).all() and (first[LENGTH:] == OWN).all()


def test_records_of_another_model_are_refused():
    batch = sampled(model_of(num_experts_per_tok=1))
    message = "2 recorded experts a token, up to number 3, and the model has 2 layers with 2 of 4 each"
    with pytest.raises(DataError, match=message):
        gradient(model_of(), batch)
    with pytest.raises(DataError, match=r"up to number .* the model has 2 layers with 2 of 2 each"):
        gradient(model_of(num_experts=2), sampled(model_of()))
    with pytest.raises(DataError, match="the model has 0 layers with 0 of 0 each"):
        gradient(tiny_model("qwen3"), batch)


# ---------------------------------------------------------------- the record


def recorded(positions: list[int | None], typecode: str = "B") -> TokenColumns:
    columns = TokenColumns()
    for position, expert in enumerate(positions):
        numbers = (
            np.array([expert, 1], np.uint8 if typecode == "B" else np.uint16) if expert is not None else None
        )
        routing = None
        if numbers is not None:
            routing = Routing(2)
            routing.experts = type(routing.experts)(typecode, numbers.tobytes())
        columns.append(position, -0.5, 4, None, None, routing)
    return columns


POSITIONS = st.lists(st.one_of(st.none(), st.integers(0, 200)), min_size=1, max_size=8)


@given(POSITIONS, st.integers(0, 8), st.sampled_from("BH"))
def test_parts_put_together_are_the_whole_and_survive_the_wire_and_the_ledger(positions, cut, typecode):
    whole, joined = recorded(positions, typecode), TokenColumns()
    joined.extend(whole[:cut])
    joined.extend(whole[cut:])
    assert joined == whole
    assert unpack(pack([whole, joined])) == [whole, joined]
    assert pickle.loads(pickle.dumps(whole, 5)) == whole == pickle.loads(pickle.dumps(whole, 2))
    for packed in (pack_plain(whole), pack_squeezed(whole)):
        assert unpack_columns(packed, pack_versions(whole.runs)) == whole


def test_a_token_takes_a_byte_for_each_layer_and_expert_and_two_where_experts_are_many():
    assert [Routing.typecode(num) for num in (128, 255, 256, 512)] == ["B", "B", "H", "H"]
    columns = sampled(model_of()).groups[0].sequences[0].columns
    assert columns.routing.width == 2 * 2 and len(columns.routing.experts.tobytes()) == LENGTH * 4
    assert sampled(model_of(), records=False).groups[0].sequences[0].columns.routing is None


def test_more_than_255_experts_are_recorded_as_they_are():
    model = model_of(num_experts=300)
    batch = sampled(model, length=40)
    experts = np.concatenate([np.asarray(s.columns.routing.experts) for s in batch.groups[0].sequences])
    assert experts.dtype == np.uint16 and 255 < experts.max() < 300
    assert error(gradient(model, batch), gradient(model, without_records(batch))) < 1e-5
