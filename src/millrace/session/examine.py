"""What the doctor finds in a run directory."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

from millrace.core.errors import DataError
from millrace.ledger.reader import LedgerReader
from millrace.observe.doctor.evidence import Evidence
from millrace.observe.doctor.rules import diagnose
from millrace.observe.jsonl import retell
from millrace.session.run_directory import RunDirectory


def examine(run: RunDirectory) -> dict[str, Any]:
    """JSON types. Raises: DataError, ConfigError, LedgerError: a record is missing or damaged."""
    config = run.read_config()
    if not run.events.is_file():
        raise DataError(f"{run.path} has no events.jsonl: the doctor reads the events that a run wrote")
    algorithm = config.algorithm
    evidence = Evidence(
        config.model.dtype,
        schedule=config.schedule.kind,
        algorithm=algorithm.kind,
        corrects=getattr(algorithm, "correction", None) is not None,
    )
    retell(run.events, evidence, partial(diagnose, evidence))
    with LedgerReader(run.ledger) as reader:
        evidence.failures.clear()
        evidence.failures.update(
            {why: num for (state, why), num in reader.reasons().items() if state == "failed"}
        )
        committed = reader.overview().version
    return {
        "run": str(run.path),
        "steps": len(evidence.by_version),
        "committed": committed,
        "schedule": config.schedule.kind,
        "dtype": config.model.dtype,
        "end": evidence.end or "it goes on, or was killed",
        "healthy": not (findings := diagnose(evidence)),
        "findings": [asdict(finding) for finding in findings],
    }
