"""How long a version takes down a chain of relays, each on a host of its own behind a link of 1 Gbit/s.

    python benchmarks/relay_chain.py [--megabytes 64] [--rounds 5] [--transport nixl] [--json]

Hosts are network namespaces of this machine; it needs the right to make them. This process is the trainer: it
writes each version into the ring of the first host's relay. That relay stages it. Then all others are told at
the same moment whom to ask. A broadcast ends when the last of them has staged the version. Medians of all
rounds. NIXL goes over TCP here, unless UCX_TLS says otherwise: all of these hosts share one memory.

chainN   each relay asks the one before it
starN    all ask the first
ideal    bytes over bandwidth
deltaN   chainN, of a version in which 1 % of the elements differ by one from the version before
halves4  two hosts of the trainer with half of the tensors each, and two more relays after them: until all
         four have the version. The first host gets what it lacks from the last relay, which is otherwise idle
death4   chain4, in the middle of which a relay with two after it is killed: until the others have the version
stallN   what the trainer waits for when it publishes while the version before goes down a chain of N. It has
         a CPU of its own; all relays share the others, which they would not on hosts of their own
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from common import ROOT, median, parser_of, report, require, say, sized, table

from millrace.core.digest import BlockDigest, NamedBuffer, tensor_digest
from millrace.weights.manifest import make_manifest
from millrace.weights.ring import RingWriter, open_writer

sys.path.insert(0, str(ROOT))
from tests.namespaces import Host, hosts, refusal
from tests.relays import RelayProcess

BYTES_PER_S = 1e9 / 8
TENSOR_BYTES = 4 << 20
CHAINS, RELAYS_MAX = (1, 2, 4), 8
CHANGED = 0.01  # of the elements, in a version that is sent as a delta
STALLS = 3
MODELS = 4  # more than any ring holds: no version is as one that is held


def pin(process: int, cpus: set[int]) -> None:
    """Every thread of it."""
    for thread in os.listdir(f"/proc/{process}/task"):
        os.sched_setaffinity(int(thread), cpus)


class Trainer:
    """Writes versions into the ring of the first relay. Each differs from the one before in every tensor and
    nearly every byte, so that no delta makes it smaller; or, `alike`, in few elements."""

    def __init__(self, head: RelayProcess, num_bytes: int) -> None:
        self._head, self._writer = head, open_writer(head.endpoint)
        self._models = [list(random_tensors(num_bytes, seed)) for seed in range(MODELS)]
        self._model = 0
        self.version = 0

    def write(self, *, alike: bool = False) -> tuple[str, float]:
        """The next version: its digest, and how long the trainer waited."""
        self.version += 1
        if not alike:
            self._model += 1
        tensors, random = self._models[self._model % MODELS], np.random.default_rng(self.version)
        for tensor in tensors:
            tensor.data[0] = self.version % 256
            if alike:
                elements = tensor.data.view(np.uint16)
                elements[random.random(elements.size) < CHANGED] += 1
        started = time.perf_counter()
        digest = self._writer.write(self.version, tensors)
        return digest, time.perf_counter() - started

    def write_halves(self, others: RingWriter) -> str:
        """The next version, every second tensor into the ring of another host. Returns its digest."""
        self.version, self._model = self.version + 1, self._model + 1
        tensors = self._models[self._model % MODELS]
        manifest = make_manifest(tensors)
        pieces = [(t.name, BlockDigest((0,), tuple(t.shape), tensor_digest(t.data))) for t in tensors]
        for first, writer in enumerate((self._writer, others)):
            filling = writer.begin(self.version, manifest)
            writer.fill(filling, manifest, tensors[first::2])
            digest = writer.end(filling, manifest, pieces[first::2], pieces[1 - first :: 2])
        return digest

    def publish(self, *, alike: bool = False) -> str:
        digest, _ = self.write(alike=alike)
        self._head.call("stage", self.version, digest)
        return digest


def random_tensors(num_bytes: int, seed: int) -> Iterator[NamedBuffer]:
    random = np.random.default_rng(seed)
    for index, start in enumerate(range(0, num_bytes, TENSOR_BYTES)):
        size = min(TENSOR_BYTES, num_bytes - start)
        yield NamedBuffer(
            f"layers.{index}", "bfloat16", (size // 2,), random.integers(0, 256, size, np.uint8)
        )


def sent_bytes(host: Host) -> int:
    """On its link, headers and acknowledgements included."""
    counter = "/sys/class/net/eth0/statistics/tx_bytes"
    return int(subprocess.run([*host.prefix, "cat", counter], capture_output=True, check=True).stdout)


class Cluster:
    """A trainer with its relay, and relays on other hosts."""

    def __init__(self, places: Sequence[Host], num_bytes: int, transport: str) -> None:
        self._places, self._num_bytes, self._transport = places, num_bytes, transport
        self.relays = [self._relay(place) for place in range(len(places))]
        self.trainer = Trainer(self.relays[0], num_bytes)

    def broadcast(
        self,
        relays: int,
        *,
        star: bool = False,
        alike: bool = False,
        during: Callable[[], object] | None = None,
    ) -> float:
        """Seconds for one version to reach so many relays; `during` is called once all are told."""
        digest = self.trainer.publish(alike=alike)
        started = time.perf_counter()
        asked = self._order(relays, digest, star=star)
        if during is not None:
            during()
        for relay in asked:
            relay.answer()
        return time.perf_counter() - started

    def death(self, relays: int, victim: int, after_s: float) -> float:
        """As a chain, with a relay that is killed after so long, and is back for the next round."""
        digest = self.trainer.publish()
        started = time.perf_counter()
        asked = self._order(relays, digest, star=False)
        time.sleep(after_s)
        self.relays[victim].kill()
        for relay in asked:
            if relay is not self.relays[victim]:
                relay.answer()
        taken_s = time.perf_counter() - started
        self.relays[victim] = self._relay(victim)
        return taken_s

    def halves(self) -> tuple[float, float]:
        """(seconds, the most that a host sent) of a version that two hosts have in halves."""
        writer = open_writer(self.relays[1].endpoint)
        digest = self.trainer.write_halves(writer)
        before_bytes = [sent_bytes(host) for host in self._places[:4]]
        started = time.perf_counter()
        for place, sources in enumerate([(3, 2, 1), (0,), (1, 0), (2, 1, 0)]):
            addresses = [self.relays[source].endpoint.address for source in sources]
            self.relays[place].ask("fetch", self.trainer.version, digest, addresses)
        for relay in self.relays[:4]:
            relay.answer()
        taken_s = time.perf_counter() - started
        writer.close()
        sent = [sent_bytes(host) for host in self._places[:4]]
        return taken_s, max(after - before for before, after in zip(before_bytes, sent, strict=True))

    def stall(self, relays: int) -> float:
        """Of the trainer, which publishes in the middle of a broadcast of the version before."""
        found = list[float]()

        def publish() -> None:
            time.sleep(self._num_bytes / BYTES_PER_S / 4)
            found.append(self.trainer.write()[1])

        self.broadcast(relays, during=publish)
        return found[0]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """The trainer has a CPU, the relays have the others."""
        cpus = os.sched_getaffinity(0)
        first = {min(cpus)}
        try:
            pin(os.getpid(), first)
            for relay in self.relays:
                pin(relay.process.pid, cpus - first or cpus)
            yield
        finally:
            pin(os.getpid(), cpus)
            for relay in self.relays:
                pin(relay.process.pid, cpus)

    def _relay(self, place: int) -> RelayProcess:
        host = self._places[place]
        return RelayProcess(host.address, self._num_bytes, prefix=host.prefix, transport=self._transport)

    def _order(self, relays: int, digest: str, *, star: bool) -> list[RelayProcess]:
        addresses = [relay.endpoint.address for relay in self.relays]
        for place in range(1, relays + 1):
            sources = addresses[:1] if star else addresses[:place][::-1]
            self.relays[place].ask("fetch", self.trainer.version, digest, sources)
        return self.relays[1 : relays + 1]


def measure(num_bytes: int, rounds: int, transport: str) -> dict[str, float]:
    """Seconds of everything, the median of all rounds."""
    taken: dict[str, list[float]] = {}
    ideal_s = num_bytes / BYTES_PER_S
    with hosts(RELAYS_MAX + 1) as places:
        cluster = Cluster(places, num_bytes, transport)
        cluster.broadcast(RELAYS_MAX)
        for index in range(rounds):
            say(f"round {index + 1} of {rounds}")
            one = {f"chain{relays}": cluster.broadcast(relays) for relays in CHAINS}
            one |= {f"delta{relays}": cluster.broadcast(relays, alike=True) for relays in CHAINS}
            one["star4"] = cluster.broadcast(4, star=True)
            one["death4"] = cluster.death(4, 2, ideal_s / 2)
            one["halves4"], one["halves4_sent_bytes"] = cluster.halves()
            for name, value in one.items():
                taken.setdefault(name, []).append(value)
            with cluster.apart():
                for relays in (1, RELAYS_MAX) * STALLS:
                    taken.setdefault(f"stall{relays}", []).append(cluster.stall(relays))
        for relay in cluster.relays:
            relay.kill()
    return {"ideal": ideal_s} | {name: median(values) for name, values in taken.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, default=sized(64, 1))
    parser.add_argument("--rounds", type=int, default=sized(5, 1))
    parser.add_argument("--transport", choices=["tcp", "nixl"], default="tcp")
    args = parser.parse_args()
    why = refusal()
    require(not why, f"{why}")
    num_bytes = args.megabytes * 10**6
    os.environ.setdefault("UCX_TLS", "tcp")
    seconds = measure(num_bytes, args.rounds, args.transport)
    sent = seconds.pop("halves4_sent_bytes")
    table({"seconds": seconds})
    ratios = {f"chain{relays}_over_ideal": seconds[f"chain{relays}"] / seconds["ideal"] for relays in CHAINS}
    ratios |= {f"delta{relays}_over_ideal": seconds[f"delta{relays}"] / seconds["ideal"] for relays in CHAINS}
    ratios["star4_over_chain4"] = seconds["star4"] / seconds["chain4"]
    ratios["halves4_over_ideal"] = seconds["halves4"] / seconds["ideal"]
    ratios["halves4_sent_over_version"] = sent / num_bytes
    ratios["stall8_over_stall1"] = seconds["stall8"] / seconds["stall1"]
    ratios["relay_death_cost"] = (seconds["death4"] - seconds["chain4"]) / seconds["chain4"]
    report({**ratios, "seconds": seconds}, as_json=args.json)


if __name__ == "__main__":
    main()
