"""Relays on hosts of their own, behind links of 1 Gbit/s: one is killed, frozen or cut off in a broadcast."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from tests import cables
from tests.long import few
from tests.namespaces import Host, hosts
from tests.relays import RelayProcess

from millrace.core.digest import NamedBuffer
from millrace.core.errors import WeightsError
from millrace.core.types import Staged
from millrace.weights.ring import open_reader, open_writer

NUM_BYTES = 48_000_000  # 0.4 s on such a link
DEADLINE_S = 120.0


def model(seed: int) -> list[NamedBuffer]:
    random = np.random.default_rng(seed)
    return [
        NamedBuffer(f"layers.{index}", "bfloat16", (NUM_BYTES // 32,), random.bytes(NUM_BYTES // 16))
        for index in range(16)
    ]


@contextmanager
def cluster(count: int, rate: str = "1gbit") -> Iterator[tuple[list[Host], list[RelayProcess]]]:
    with hosts(count, rate=rate) as places, ExitStack() as stack:
        relays = []
        for place in places:
            relays.append(RelayProcess(place.address, NUM_BYTES, prefix=place.prefix))
            stack.callback(relays[-1].kill)
        yield places, relays


def publish(head: RelayProcess, version: int) -> str:
    writer = open_writer(head.endpoint)
    tensors = [NamedBuffer(t.name, t.dtype, t.shape, np.frombuffer(t.data, np.uint8)) for t in model(version)]
    digest = writer.write(version, tensors)
    writer.close()
    assert head.call("stage", version, digest).versions == [version]
    return digest


def order(relays: list[RelayProcess], version: int, digest: str) -> None:
    """Down the chain, with all earlier ones as fallbacks."""
    for place in range(1, len(relays)):
        sources = [relay.endpoint.address for relay in relays[:place][::-1]]
        relays[place].ask("fetch", version, digest, sources)


def version_bytes(relay: RelayProcess, version: int) -> list[bytes]:
    with open_reader(relay.endpoint).view(version) as (_, tensors):
        return [bytes(tensor.data) for tensor in tensors]


def asked_until_it_answers(relay: RelayProcess, *order: object) -> Staged:
    """As the controller does; a host that was cut off is found again after a moment."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            return relay.call("fetch", *order)
        except WeightsError:
            assert time.monotonic() < deadline_s
            time.sleep(0.2)


@pytest.mark.parametrize("way", few(["cut off", "killed", "frozen"]))
def test_the_chain_closes_round_a_relay_that_is_lost_in_mid_broadcast(way: str) -> None:
    with cluster(4) as (places, relays):
        digest = publish(relays[0], 1)
        order(relays, 1, digest)
        time.sleep(0.15)
        if way == "killed":
            relays[1].kill()
        elif way == "frozen":
            relays[1].process.send_signal(signal.SIGSTOP)
        else:
            places[1].link(up=False)
        for relay in relays[2:]:
            staged = relay.answer()
            assert (staged.digest, staged.versions) == (digest, [1])
            assert staged.received_bytes < 1.5 * NUM_BYTES  # what had arrived was not asked for again
            assert version_bytes(relay, 1) == [tensor.data for tensor in model(1)]


def test_a_relay_that_was_cut_off_says_who_does_not_answer_and_goes_on_where_it_stopped() -> None:
    with cluster(2, rate="100mbit") as (places, (head, other)):  # 4 s: enough to cut it in
        digest = publish(head, 1)
        other.ask("fetch", 1, digest, [head.endpoint.address])
        time.sleep(0.15)
        places[1].link(up=False)
        with pytest.raises(WeightsError, match=f"the relay at {head.endpoint.address} "):
            other.answer()
        assert open_reader(other.endpoint).versions() == []
        places[1].link(up=True)
        staged = asked_until_it_answers(other, 1, digest, [head.endpoint.address])
        assert staged.versions == [1] and staged.received_bytes < 1.2 * NUM_BYTES


def test_a_stranger_who_takes_the_port_of_a_dead_relay_gets_no_weights() -> None:
    """It passes all that is said on to a relay of the run, which is asked directly after that."""
    with cluster(3) as (places, (head, dead, last)):
        digest, freed, address = publish(head, 1), dead.endpoint.address, head.endpoint.address
        dead.kill()
        command = [*places[1].prefix, sys.executable, cables.__file__, freed, address]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as stranger:
            assert stranger.stdout is not None and stranger.stdout.readline() == "listens\n"
            with pytest.raises(WeightsError, match=f"{freed} refuses this one"):
                last.call("fetch", 1, digest, [freed])
            assert last.call("fetch", 1, digest, [freed, address]).source == address
            passed = int(stranger.communicate()[0])
        assert 0 < passed < 200
