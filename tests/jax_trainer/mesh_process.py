"""A trainer's process with two devices: `python mesh_process.py INDEX PORT DIRECTORY`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather


def main(index: int, port: int, directory: Path) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{port}", num_processes=2, process_id=index, initialization_timeout=120
    )
    from mesh_doubles import STEPS, mesh_policy, named, uneven_batch

    from millrace_jax.devices.programs import Programs

    Programs(directory / "programs")
    policy = mesh_policy(directory / "model", 4, (2, 2, 1))
    for version in range(STEPS):
        result = policy.step(uneven_batch(version), rejected_dir=directory)
    weights = process_allgather(policy.state.weights, tiled=True)
    if index == 0:
        np.savez(directory / "weights.npz", **named(weights), loss=result.metrics["loss"])
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
