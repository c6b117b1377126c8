"""`[runtime]`: on which hosts a run's workers run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from millrace.config.tables.section import Section


class LocalHosts(Section):
    """Processes of this machine."""

    kind: Literal["local"] = "local"
    hosts: int = Field(default=1, ge=1, le=64)
    """Number of logical hosts that the machine's memory and GPUs are divided among. Each has a relay of its
    own. More than 1 shows on one machine what a cluster does; see docs/cluster.md."""


class RayCluster(Section):
    """The nodes of a Ray cluster. Needs the `ray` extra."""

    kind: Literal["ray"] = "ray"
    address: str = "local"
    """`HOST:PORT` of the cluster's head, as `ray start --head` prints it. It is never guessed from the
    environment. `"local"`: a cluster of this machine alone, for as long as the run. See docs/cluster.md."""


Runtime = Annotated[LocalHosts | RayCluster, Field(discriminator="kind")]
