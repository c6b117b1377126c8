"""The workers of a run, and on which hosts they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millrace.controller.supervisor import WorkerSpec
from millrace.core.errors import ConfigError

JoinSpec = Callable[[str, Sequence[WorkerSpec]], WorkerSpec]
"""For a name and the replicas that are there: a further replica, where there is room. Raises: ConfigError."""


def no_room(name: str, present: Sequence[WorkerSpec]) -> WorkerSpec:
    raise ConfigError(f"{name} cannot join: this run has a fixed number of replicas ({len(present)})")


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers of a run. `relays`: one for each host that has a rank of the trainer or a replica. `join`
    makes replicas beside the first ones."""

    trainer: WorkerSpec
    relays: tuple[WorkerSpec, ...]
    replicas: tuple[WorkerSpec, ...]
    environments: tuple[WorkerSpec, ...]
    join: JoinSpec = no_room

    @property
    def hosts(self) -> dict[str, str]:
        """Of every replica, by its name."""
        return {spec.name: spec.place.host for spec in self.replicas}
