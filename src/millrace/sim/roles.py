"""The simulated roles, to be spawned by `runtime.sim.SimRuntime` under the real controller.

All take the run's `World` (the environment does not need it), `Costs` and, where work is drawn,
`Workload`. Targets read `millrace.sim.roles:SimReplica` and so on.
"""

from __future__ import annotations

from millrace.sim.environment import SimEnvironment
from millrace.sim.relay import SimRelay
from millrace.sim.replica import SimReplica
from millrace.sim.trainer import SimTrainer

__all__ = ["SimEnvironment", "SimRelay", "SimReplica", "SimTrainer"]
