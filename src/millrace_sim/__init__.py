"""A whole run without hardware: the real controller, schedule and ledger, in virtual time.

virtual      the event loop of virtual time, workers, messages, seeded faults
costs        costs of simulated work: devices, models, lengths, transports
roles        the simulated trainer, replica, relay and reward worker, and the world that they share
simulation   one run; `setup` makes it from a configuration, `measure` its result
compare      several schedules on the same seeds; `pool` shares their runs among processes
explore      seeded worlds with many faults, and the invariants of every run
calibrate    costs learnt from a real run
plan         the best layout for a model and devices
"""

from millrace_sim.costs.interface import Costs
from millrace_sim.costs.workload import Workload
from millrace_sim.roles.world import World
from millrace_sim.simulation import TraceDigest
from millrace_sim.virtual.faults import Crash, Failures, Faults, Lag, Latency, Slow
from millrace_sim.virtual.loop import DeadlockError, VirtualLoop, run

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
