"""The workers of a run, and on which hosts they are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from millrace.controller.supervisor import WorkerSpec
from millrace.core.errors import ConfigError

Join = Callable[[Sequence[str], Sequence[WorkerSpec]], list[WorkerSpec]]
"""Places joining replicas with these names beside the present ones. Raises: ConfigError: there is no room for
all of them."""


def no_room(names: Sequence[str], present: Sequence[WorkerSpec]) -> list[WorkerSpec]:
    raise ConfigError(f"{', '.join(names)} cannot join: the number of replicas is fixed ({len(present)})")


def no_host(host: str) -> WorkerSpec:
    raise ConfigError(f"no relay can join on {host}: the hosts of this run are those of its start")


def standby_of(trainer: WorkerSpec) -> WorkerSpec:
    """A second trainer at the same place. Either of the two may train."""
    return replace(trainer, name=f"{trainer.name}-2")


async def no_news() -> None:
    """The hosts are those of the start."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers of a run. `relays`: one for each host that has a rank of the trainer or a replica. `join`
    places joining replicas. `relay` makes the relay of a new host. `look` updates the hosts for the next
    `join`, and raises MillraceError. `evaluator`: a replica for evaluations only.
    `evaluation_reward_workers`: one for each evaluation, in their order. `reference`: a worker that has the
    start weights, if the trainer has no copy. `standby`: a second trainer, see `live_trainers`."""

    trainer: WorkerSpec
    relays: tuple[WorkerSpec, ...]
    replicas: tuple[WorkerSpec, ...]
    reward_workers: tuple[WorkerSpec, ...]
    join: Join = no_room
    relay: Callable[[str], WorkerSpec] = no_host
    look: Callable[[], Awaitable[None]] = no_news
    evaluator: WorkerSpec | None = None
    evaluation_reward_workers: tuple[WorkerSpec, ...] = ()
    reference: WorkerSpec | None = None
    standby: WorkerSpec | None = None

    @property
    def hosts(self) -> dict[str, str]:
        """The host of every replica, by the replica's name."""
        return {spec.name: spec.place.host for spec in self.replicas}
