"""The ranks of a sharded and tensor parallel model publish it without a rank that holds the whole."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tests.long import few, long
from torch import nn

from millrace.core.digest import MULTILINEAR, XXH3, NamedBuffer, digest_buffers, kind_of
from millrace.core.errors import MillraceError, UnknownVersionError, WeightsError
from millrace.core.types import Endpoint
from millrace.trainer.publish import publisher
from millrace.trainer.publish.publisher import PublishBuffers, Publisher, buffers_of
from millrace.trainer.ranks.blocks import owned_blocks
from millrace.trainer.ranks.mesh import Ranks
from millrace.weights.relay import RelayWorker
from millrace.weights.ring import open_reader, open_writer

SPAWN = multiprocessing.get_context("spawn")
DEADLINE_S = 120.0
WIDTH, INNER = 7, 12  # rows that no number of ranks divides, columns that two do


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH), nn.LayerNorm(WIDTH))
    return layers


def divided(ranks: Ranks) -> nn.Module:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = ranks.mesh
    assert mesh is not None
    whole = parallelize_module(model(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(whole, mesh=mesh["shard"])


def one_rank(endpoint: Endpoint, rank: int, rendezvous: str, kind: str, pipe: Connection) -> None:
    if kind == MULTILINEAR:  # as if this rank had a GPU
        publisher.has_own_memory, publisher.pinned = lambda _: True, lambda _: lambda: None
    ranks = Ranks(shard=2, tensor=2, rank=rank)
    ranks.join(rendezvous, torch.device("cpu"))
    trained = divided(ranks)
    weights = trained.state_dict()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    buffers, writer = buffers_of(weights, torch.bfloat16), open_writer(endpoint)
    publishing = Publisher(buffers, optimizer, ranks)
    outcomes = []
    for version in (0, 1):
        if version:
            trained(torch.ones(3, WIDTH)).square().sum().backward()
            optimizer.step()
        publishing.begin(lambda: writer, endpoint, version)
        digest = publishing.result().digest
        publishing.refuse_changed(version)
        whole = {name: weight.full_tensor().bfloat16() for name, weight in weights.items()}
        assert not version or not torch.equal(whole["2.weight"], model().state_dict()["2.weight"].bfloat16())
        outcomes.append((version, digest, buffers.weights_bytes, digest_buffers(as_bytes(whole), kind)))
        ranks.gather(None)

    def lost() -> object:
        if rank == 2:
            raise UnknownVersionError("the relay is gone")
        return writer

    def full(*_: object) -> None:
        raise WeightsError("no room in a slot")

    for opened, where in ((lost, replace(endpoint, path="another relay")), (lambda: writer, endpoint)):
        try:
            publishing.begin(opened, where, 2)  # type: ignore[arg-type]
        except MillraceError as error:
            outcomes.append((type(error), str(error)))
        writer.begin = full  # type: ignore[assignment, method-assign]
    num_values = sum(part.block.numel() for part in owned_blocks(weights))
    pipe.send((outcomes, num_values))
    pipe.recv()
    os._exit(0)


def as_bytes(weights: dict[str, torch.Tensor]) -> list[NamedBuffer]:
    return [
        NamedBuffer(
            name, "bfloat16", tuple(weight.shape), weight.contiguous().view(-1).view(torch.uint8).numpy()
        )
        for name, weight in weights.items()
    ]


@pytest.fixture(scope="module", params=few([XXH3, MULTILINEAR]))
def published(tmp_path_factory, request):
    """What the four ranks say, and what the relay and a replica say of the same versions."""
    relay = RelayWorker("relay", 3)
    slot_bytes = PublishBuffers(model().state_dict(), torch.bfloat16).weights_bytes
    endpoint = asyncio.run(relay.open(slot_bytes))
    rendezvous, pipes = f"file://{tmp_path_factory.mktemp('ranks') / 'meet'}", []
    for rank in range(4):
        ours, theirs = SPAWN.Pipe()
        SPAWN.Process(
            target=one_rank, args=(endpoint, rank, rendezvous, request.param, theirs), daemon=True
        ).start()
        theirs.close()
        pipes.append(ours)
    assert all(pipe.poll(DEADLINE_S) for pipe in pipes)
    answers = [pipe.recv() for pipe in pipes]
    yield relay, endpoint, slot_bytes, answers
    for pipe in pipes:
        pipe.send(None)


@long
def test_ranks_publish_what_the_whole_model_is(published):
    relay, endpoint, slot_bytes, answers = published
    first = answers[0][0]
    for version, digest, needed, whole in first[:2]:
        staged = asyncio.run(relay.stage(version, digest))
        into = as_bytes(
            {n: torch.zeros(w.shape, dtype=torch.bfloat16) for n, w in model().state_dict().items()}
        )
        found = open_reader(endpoint).read(version, into)
        assert found == staged.digest == whole == digest_buffers(into, kind_of(digest))
        assert needed == slot_bytes
    assert all(outcomes[:2] == first[:2] for outcomes, _ in answers)
    assert np.any(first[0][3] != first[1][3])


@long
def test_every_rank_holds_its_share_alone(published):
    *_, answers = published
    total = sum(weight.numel() for weight in model().state_dict().values())
    shares = [values for _, values in answers]
    assert sum(shares) == total
    assert max(shares) < total / 2, shares


def test_an_error_on_one_rank_is_raised_on_all(published):
    *_, answers = published
    assert [outcomes[2] for outcomes, _ in answers] == [(UnknownVersionError, "the relay is gone")] * 4
    assert [outcomes[3] for outcomes, _ in answers] == [(WeightsError, "no room in a slot")] * 4
