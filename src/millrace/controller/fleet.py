"""The workers of a run, and on which hosts they are."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.controller.supervisor import WorkerSpec


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers of a run. `relays`: one for each host that has a rank of the trainer or a replica."""

    trainer: WorkerSpec
    relays: tuple[WorkerSpec, ...]
    replicas: tuple[WorkerSpec, ...]
    environments: tuple[WorkerSpec, ...]

    @property
    def hosts(self) -> dict[str, str]:
        """Of every replica, by its name."""
        return {spec.name: spec.place.host for spec in self.replicas}
