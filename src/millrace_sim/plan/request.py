"""The request of `millrace plan`: a model, devices, lengths and a staleness budget."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from millrace.config.tables.section import Section
from millrace_sim.config import LengthsSection, LogNormalLengths, WorkloadSection
from millrace_sim.costs.hardware import DEVICE_MTBF_H
from millrace_sim.costs.transport import Transport


class PlanBatch(Section):
    prompts: tuple[int, ...] = (512,)
    """Groups per optimizer step. The planner chooses one of these numbers."""
    group_size: int = Field(default=16, ge=2)
    """Trajectories per group."""


class Search(Section):
    simulations: int = Field(default=10, ge=1)
    """Most simulated runs. Each takes seconds to a minute."""
    steps: int = Field(default=9, ge=3)
    """Optimizer steps of each simulated run. The first third is warm-up."""
    replicas_max: int = Field(default=16, ge=1)
    """A plan of more replicas is simulated with this many, everything else in proportion."""
    dtypes: tuple[Literal["bf16", "fp8"], ...] = ("bf16",)
    """Number formats of generation. `fp8` halves the bytes that a decode step reads, and widens the
    log-prob gap."""
    transports: tuple[Transport, ...] = ("relay",)
    """Ways of the weights to the replicas. The planner compares them if there are several."""


class PlanConfig(Section):
    """A question to the planner."""

    model: str
    """A name of `millrace_sim/costs/models.py`, or a directory with a `config.json`."""
    devices: dict[str, int]
    """How many devices of each kind, as `H800 = 64`. `millrace_sim/costs/hardware.py` has the names."""
    staleness_max: int = Field(default=4, ge=0)
    """Staleness bound, in versions. 0 asks for synchronous training."""
    batch: PlanBatch = PlanBatch()
    lengths: LengthsSection = LogNormalLengths()
    workload: WorkloadSection = WorkloadSection()
    search: Search = Search()
    device_mtbf_h: float = Field(default=round(DEVICE_MTBF_H), gt=0)
    """Mean hours between failures of one device, with its share of host, network and software. It decides
    `checkpoints.every`. The default is what Llama 3 published."""
    base: str | None = None
    """A training configuration with your model, task and reward. The planner replaces the keys that it chose.
    `"none"`: the written configuration names a model directory and a file of rows for you to replace."""
    seed: int = 0
    """Seed of the simulations."""
