"""Pipelines in the world of a configuration: the same devices, batch and lengths."""

from __future__ import annotations

from dataclasses import replace

from millrace_sim.config import SimulatedConfig
from millrace_sim.costs.cluster import Cluster
from millrace_sim.costs.workload import RowDifficulty
from millrace_sim.setup import cluster_of, scenario
from published.kept import ALIKE
from published.pipelines import Batch, Pipelines


def pipelines(config: SimulatedConfig, *, rows: int = 0) -> Pipelines:
    """Weights travel over a collective. `rows`: as `kept.played`."""
    whole, workload = cluster_of(config), scenario(config).workload
    if rows:
        difficulty = RowDifficulty(rows, config.batch.group_size, longer=ALIKE)
        workload = replace(workload, difficulty=difficulty)
    replicas = config.cluster.replicas
    costs = Cluster(whole.generation, whole.training, replicas, "collective").costs(workload.quantum)
    units = config.workload.max_tokens // workload.quantum
    batch = Batch(config.batch.prompts, config.batch.group_size, units, workload, config.seed)
    return Pipelines(costs, replicas, config.cluster.slots, batch)
