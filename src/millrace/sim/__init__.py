"""Simulation: virtual time, faults and costs as data, and roles without hardware."""

from millrace.sim.costs import Costs
from millrace.sim.faults import Crash, Failures, Faults, Lag, Latency, Slow
from millrace.sim.loop import DeadlockError, VirtualLoop, run
from millrace.sim.trace import TraceDigest
from millrace.sim.workload import Workload
from millrace.sim.world import World

__all__ = [
    "Costs",
    "Crash",
    "DeadlockError",
    "Failures",
    "Faults",
    "Lag",
    "Latency",
    "Slow",
    "TraceDigest",
    "VirtualLoop",
    "Workload",
    "World",
    "run",
]
