"""The slots that the ranks of a trainer fill with one version: one on each of their hosts, in its relay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from millrace.core.digest import Filling, NamedBlock, TensorSpec
from millrace.core.protocols import WeightsWriter
from millrace.trainer.ranks.mesh import Ranks, agreed


def begin_on_hosts(
    ranks: Ranks,
    opened: Callable[[], WeightsWriter],
    version: int,
    manifest: Sequence[TensorSpec],
    *,
    stays: bool = False,
) -> list[Filling | None]:
    """The filling of each host, which its first rank begins. None: the version `stays` in its slot there."""

    def begin() -> Filling | None:
        writer = opened()
        return writer.begin(version, manifest) if ranks.rank == ranks.leader and not stays else None

    return agreed(ranks, begin)[:: ranks.world // ranks.hosts]


def end_on_host(
    ranks: Ranks,
    writer: WeightsWriter,
    filling: Filling | None,
    manifest: Sequence[TensorSpec],
    written: Sequence[Sequence[NamedBlock]],
) -> str:
    """The version's digest if this rank ends the version, else "". `written`: the blocks of each rank."""
    if filling is None or ranks.rank != ranks.leader:
        return ""
    every = chain.from_iterable
    here = slice(ranks.leader, ranks.leader + ranks.world // ranks.hosts)
    elsewhere = [*written[: here.start], *written[here.stop :]]
    return writer.end(filling, manifest, every(written[here]), every(elsewhere))
