"""Needs the trackers' real packages: `make test-trackers`."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

if not all(map(find_spec, ("wandb", "mlflow", "trackio", "sqlalchemy"))):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where MLflow and Trackio write, in every process that has `offline` as its environment."""
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module")
def offline(stores: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),  # its processes have another directory
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{stores}/mlflow.db",
        "TRACKIO_DIR": str(stores / "trackio"),
    }
