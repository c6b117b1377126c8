"""Two hosts of a trainer with half of the weights each feed one chain, over networks of their own. What each
host sends is counted by its network interface."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import numpy as np
import pytest
from tests.long import long
from tests.namespaces import Host, hosts
from tests.netns.test_chain_links import NUM_BYTES, cluster, model, version_bytes
from tests.relays import RelayProcess
from tests.runs import events, summary, train, weights

from millrace.controller.state.chain import next_fetch
from millrace.controller.state.relays import Relays
from millrace.core.digest import NamedBuffer, digest_blocks
from millrace.core.placement import Host as Placed
from millrace.run import run_hosts as of_the_run
from millrace.weights.manifest import make_manifest
from millrace.weights.ring import open_writer

SMALL_SHARE = 1.1  # with headers of packets, acknowledgements and digests
GB = 1_000_000_000
RUN = ("steps=8", "trainer.shard=2", "rollout.replicas=3")


def sent_bytes(host: Host) -> int:
    path = "/sys/class/net/eth0/statistics/tx_bytes"
    counter = subprocess.run((*host.prefix, "cat", path), capture_output=True, text=True, check=True)
    return int(counter.stdout)


def publish(heads: Sequence[RelayProcess], version: int) -> str:
    """Every tensor's first half by the first head's rank, the rest by that of the second."""
    whole = [NamedBuffer(t.name, t.dtype, t.shape, np.frombuffer(t.data, np.uint8)) for t in model(version)]
    manifest, parts, digests = make_manifest(whole), [], set()
    for rank in range(len(heads)):
        rows = whole[0].shape[0] // len(heads)
        parts.append(
            [
                NamedBuffer(t.name, t.dtype, (rows,), t.data[2 * rows * rank :][: 2 * rows], (rows * rank,))
                for t in whole
            ]
        )
    pieces = [digest_blocks(part) for part in parts]
    for rank, head in enumerate(heads):
        writer = open_writer(head.endpoint)
        filling = writer.begin(version, manifest)
        writer.fill(filling, manifest, parts[rank])
        elsewhere = [piece for other, of in enumerate(pieces) if other != rank for piece in of]
        digests.add(writer.end(filling, manifest, pieces[rank], elsewhere))
        writer.close()
    (digest,) = digests
    return digest


def order(names: Sequence[str], relays: Sequence[RelayProcess], digest: str) -> None:
    """As the controller does."""
    known = Relays(names, roots=names[:2])
    for name, relay in zip(names, relays, strict=True):
        known.up(name, relay.endpoint)
    known.wrote(1, digest)
    for name, relay in zip(names, relays, strict=True):
        fetch = next_fetch(known.values(), name)
        assert fetch is not None
        relay.ask("fetch", fetch.version, digest, list(fetch.sources))


@long
@pytest.mark.parametrize("count", [2, 4])
def test_no_host_sends_more_than_one_version(count: int) -> None:
    with cluster(count) as (places, relays):
        before = list(map(sent_bytes, places))
        digest = publish(relays[:2], 1)
        order([place.name for place in places], relays, digest)
        staged = [relay.answer() for relay in relays]
        sent = [after - was for after, was in zip(map(sent_bytes, places), before, strict=True)]
        assert {one.digest for one in staged} == {staged[0].digest}
        assert all(version_bytes(relay, 1) == [tensor.data for tensor in model(1)] for relay in relays)
    assert [one.decoded_bytes for one in staged] == [NUM_BYTES // 2] * 2 + [NUM_BYTES] * (count - 2)
    assert max(sent) < SMALL_SHARE * NUM_BYTES, sent
    assert sum(sent) < SMALL_SHARE * NUM_BYTES * (count - 1), sent


@long
@pytest.mark.usefixtures("warm")
def test_ranks_on_hosts_of_a_network_train_to_the_same_weights_as_on_one_host(start, tmp_path, monkeypatch):
    undisturbed = train(start, tmp_path / "undisturbed", *RUN)
    with hosts(3) as made:
        found = tuple(Placed(host.name, 2, 8 * GB, 8 * GB, address=host.address) for host in made)
        monkeypatch.setattr(of_the_run, "hosts", lambda config, this: found)
        monkeypatch.setattr(of_the_run, "logical", lambda config: {host.name: host.prefix for host in made})
        run = train(start, tmp_path / "run", *RUN, "trainer.hosts=2")
        by_address = {host.address: host.name for host in made}
    assert weights(run) == weights(undisturbed)
    accounting = summary(run)["accounting"]
    assert accounting["trained"] == accounting["admitted"] == 16 * 8
    published = events(run, "published")
    sent = dict.fromkeys(by_address.values(), 0)
    for event in events(run, "fetched"):
        if event.fields["received_bytes"]:
            sent[by_address[event.fields["source"].partition(":")[0]]] += event.fields["received_bytes"]
    most = sum(event.fields["weights_bytes"] for event in published)
    assert all(0 < count <= SMALL_SHARE * most for count in sent.values()), (sent, most)
