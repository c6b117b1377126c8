"""Digests of a few whole runs, as JSON, with any interpreter that has the light dependencies.

PYTHONPATH=src:. python3.12 -m tests.simulation.sim_digests > tests/simulation/sim_digests.json

The file is what every Python version has to give. Write it anew when a run is meant to go another way.
"""

from __future__ import annotations

import json

from millrace.config.tables.training import BatchShape
from millrace_sim.config import ClusterSection, SimulatedConfig
from millrace_sim.explore.verdicts import try_seed
from millrace_sim.setup import scenario
from millrace_sim.simulation import simulate

WORLDS = (0, 1, 2, 3, 5)
"""Seeds of the explorer, with faults: one for each schedule of rlax, llamarl, synchronous, areal, laminar."""


def digests() -> dict[str, str]:
    found = {f"world {seed}": try_seed(seed).digest for seed in WORLDS}
    return found | {"cluster": simulate(scenario(_cluster())).digest}


def _cluster() -> SimulatedConfig:
    return SimulatedConfig(
        steps=4,
        batch=BatchShape(prompts=16, group_size=8),
        cluster=ClusterSection(
            model="Qwen2.5-7B",
            device="H800",
            trainer_devices=4,
            replicas=4,
            slots=32,
            replica_mtbf_s=200.0,
        ),
    )


if __name__ == "__main__":
    print(json.dumps(digests(), indent=2))
