"""The simulated roles, to be spawned by `sim.virtual.sim_runtime.SimRuntime` under the real controller.

All take the run's `World` (the environment does not need it), `Costs` and, where work is drawn,
`Workload`. Targets read `millrace_sim.roles:SimReplica` and so on.
"""

from __future__ import annotations

from millrace_sim.roles.sim_relay import SimRelay
from millrace_sim.roles.sim_replica import SimReplica
from millrace_sim.roles.sim_reward_worker import SimRewardWorker
from millrace_sim.roles.sim_trainer import SimTrainer

__all__ = ["SimRelay", "SimReplica", "SimRewardWorker", "SimTrainer"]
