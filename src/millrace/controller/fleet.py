"""The workers of a run, and on which hosts they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millrace.controller.supervisor import WorkerSpec
from millrace.core.errors import ConfigError

Join = Callable[[Sequence[str], Sequence[WorkerSpec]], list[WorkerSpec]]
"""For these names, and the replicas that are there: further replicas, where there is room for all of them.
Raises: ConfigError."""


def no_room(names: Sequence[str], there: Sequence[WorkerSpec]) -> list[WorkerSpec]:
    raise ConfigError(f"{', '.join(names)} cannot join: the number of replicas is fixed ({len(there)})")


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers of a run. `relays`: one for each host that has a rank of the trainer or a replica. `join`
    makes replicas beside the first ones."""

    trainer: WorkerSpec
    relays: tuple[WorkerSpec, ...]
    replicas: tuple[WorkerSpec, ...]
    environments: tuple[WorkerSpec, ...]
    join: Join = no_room

    @property
    def hosts(self) -> dict[str, str]:
        """Of every replica, by its name."""
        return {spec.name: spec.place.host for spec in self.replicas}
