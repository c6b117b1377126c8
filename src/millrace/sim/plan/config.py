"""What `millrace plan` is asked: a model, devices, lengths and a staleness budget."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from millrace.config.schema import Section
from millrace.config.simulated import LengthsSection, LogNormalLengths, Transport, WorkloadSection


class PlanBatch(Section):
    prompts: tuple[int, ...] = (512,)
    """Groups per optimizer step: the values that may be chosen from."""
    group_size: int = Field(default=16, ge=2)
    """Trajectories per group."""


class Search(Section):
    simulations: int = Field(default=10, ge=1)
    """Simulated runs at most. Each takes seconds to a minute."""
    steps: int = Field(default=9, ge=3)
    """Optimizer steps of each; the first third is warm-up."""
    replicas_max: int = Field(default=16, ge=1)
    """Larger plans are simulated with this many replicas, everything else in proportion."""
    dtypes: tuple[Literal["bf16", "fp8"], ...] = ("bf16",)
    """Of generation: `fp8` halves the weights a decode step reads, and widens the log-prob gap."""
    transports: tuple[Transport, ...] = ("relay",)
    """Ways of weights to replicas that are at hand; more than one are compared."""


class PlanConfig(Section):
    """A question to the planner."""

    model: str
    """A name of `sim/costs/models.py`, or a directory with a Hugging Face `config.json`."""
    devices: dict[str, int]
    """How many of each kind (`H800 = 64`): names of `sim/costs/hardware.py`; several kinds may be mixed."""
    staleness_max: int = Field(default=4, ge=0)
    """Optimizer steps that a trained token may be behind; 0 asks for synchronous training."""
    batch: PlanBatch = PlanBatch()
    lengths: LengthsSection = LogNormalLengths()
    workload: WorkloadSection = WorkloadSection()
    search: Search = Search()
    base: str | None = None
    """A training configuration with model, task and reward, which the plan's choices are laid over; None: the
    plan's configuration names a model directory and a file of rows that are to be replaced."""
    seed: int = 0
    """Of the simulations."""
