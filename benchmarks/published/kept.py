"""Simulated runs of published settings. What was played is kept, so an interrupted table goes on.

A result is found again by its configuration and by the source of the package: after any change of the code
everything is played anew.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from common import ROOT, kept_directory, say

from millrace.config.tables.schedules import FunctionSchedule
from millrace_sim.config import SimulatedConfig
from millrace_sim.costs.workload import RowDifficulty
from millrace_sim.measure import measure
from millrace_sim.setup import scenario

ALIKE = 1.0
"""Of rows that come back: one deviation of their difficulty makes their completions e times as long."""


def played(config: SimulatedConfig, *, rows: int = 0) -> dict[str, Any]:
    """The result of a simulated run. `rows`: so many rows that come back, epoch after epoch, and whose
    completions are alike in length; 0: each group has its own."""
    own = config.schedule.path.rpartition(":")[0] if isinstance(config.schedule, FunctionSchedule) else ""
    key = json.dumps([config.model_dump(mode="json"), rows, own and _digest((Path(own),))])
    name = hashlib.sha256(f"{key} {_source()}".encode()).hexdigest()[:24]
    file = kept_directory() / "rivals" / f"{name}.json"
    if not file.exists():
        began = time.process_time()
        world = scenario(config)
        if rows:
            difficulty = RowDifficulty(rows, config.batch.group_size, longer=ALIKE)
            world = replace(world, workload=replace(world.workload, difficulty=difficulty))
        result = measure(world)[0].as_dict()
        file.parent.mkdir(exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(result))
        partial.replace(file)
        say(f"{config.schedule.kind} on {config.cluster.model}: {time.process_time() - began:.0f} CPU s")
    return dict(json.loads(file.read_text()))


@cache
def _source() -> str:
    return _digest(tuple(sorted((ROOT / "src" / "millrace").rglob("*.py"))))


@cache
def _digest(files: tuple[Path, ...]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
