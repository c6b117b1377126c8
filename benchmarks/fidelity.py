"""A real run beside its own simulation, quantity by quantity."""

from __future__ import annotations

from pathlib import Path

from millrace.sim.calibrate.achieved import Achieved
from millrace.sim.calibrate.learn import calibrate
from millrace.sim.simulation import simulate

FRACTIONS = ("trainer_idle", "replica_idle")


def compare(run_dir: Path | str) -> dict[str, tuple[float, float]]:
    """Simulate a run under its own configuration. Returns quantity -> (real, simulated)."""
    calibration = calibrate(run_dir)
    simulated = Achieved.of(simulate(calibration.scenario()).events).as_dict()
    return {name: (real, simulated[name]) for name, real in calibration.achieved.as_dict().items()}


def largest_error(rows: dict[str, tuple[float, float]]) -> float:
    """Of `compare`: relative errors; of fractions of time the difference: 1 % idle is close to 2 %."""
    return max(
        abs(simulated - real) / (1.0 if name in FRACTIONS or not real else abs(real))
        for name, (real, simulated) in rows.items()
    )
