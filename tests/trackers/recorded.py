"""What each tracker has of a run, by its own package: (version, scalars) in the order of arrival."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Steps = list[tuple[int, dict[str, float]]]

_BLOCK, _HEADER, _IDENT = 32 * 1024, 7, 7


def of_tensorboard(run: Path) -> Steps:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    points = [(point.step, tag, point.value) for tag in read.Tags()["scalars"] for point in read.Scalars(tag)]
    return _by_step(points)


def of_mlflow(store: Path, experiment: str) -> Steps:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{store}/mlflow.db")
    found = client.get_experiment_by_name(experiment)
    runs = client.search_runs([found.experiment_id]) if found else []
    if not runs:
        return []
    (run,) = runs
    histories = [client.get_metric_history(run.info.run_id, name) for name in run.data.metrics]
    points = [(point.step, point.key, point.value) for history in histories for point in history]
    return _by_step(points)


def of_trackio(project: str) -> Steps:
    """Of the directory that TRACKIO_DIR named when the package was first imported."""
    from trackio.sqlite_storage import SQLiteStorage

    runs = SQLiteStorage.get_runs(project)
    if not runs:
        return []
    (run,) = runs
    return [
        (log["step"], {name: value for name, value in log.items() if "/" in name})
        for log in SQLiteStorage.get_logs(project, run)
        if "reward/mean" in log
    ]


def of_wandb(run: Path) -> Steps:
    """Of all offline sessions of one W&B run, the oldest first."""
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    assert len({file.name for file in files}) <= 1, "a resumed run has another id"
    rows = [row for file in files for row in _rows(file)]
    return [
        (int(row["version"]), {name: value for name, value in row.items() if "/" in name})
        for row in rows
        if "reward/mean" in row
    ]


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record

    for data in _records(file.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(data: bytes) -> Iterator[bytes]:
    """Of W&B's file: blocks of 32 KiB, and in each records as (checksum, length, kind). A record that needs
    several blocks has a first, middle and last of them. A file may end in the middle."""
    at, whole = _IDENT, b""
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0 or at + _HEADER + length > len(data):
            return
        whole += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 4):  # full, last
            yield whole
            whole = b""


def _by_step(points: list[tuple[int, str, float]]) -> Steps:
    """A step that was logged twice has two values of a name, and comes twice."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    times: dict[tuple[int, str], int] = defaultdict(int)
    for step, name, value in points:
        found.setdefault((step, times[step, name]), {})[name] = value
        times[step, name] += 1
    return [(step, found[step, time]) for step, time in sorted(found)]
