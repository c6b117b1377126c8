"""What is installed is the package, all of it, and nothing else."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import millrace
from tests.tidy.sources import ROOT, tracked_files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    (built,) = WheelBuilder(str(ROOT)).build(
        directory=str(tmp_path_factory.mktemp("dist")), versions=["standard"]
    )
    assert Path(built).name == f"millrace-{millrace.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(built)


def test_the_wheel_has_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    source = ROOT / "src"
    tracked = {str(path.relative_to(source)) for path in tracked_files() if source in path.parents}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert tracked <= packed
    packages = {path.name for path in source.iterdir() if (path / "__init__.py").exists()}
    assert all(name.partition("/")[0] in packages and "__pycache__" not in name for name in packed)


def test_the_wheel_has_the_command_the_license_and_the_extras(wheel: zipfile.ZipFile) -> None:
    about = {
        name.rpartition("/")[2]: wheel.read(name).decode()
        for name in wheel.namelist()
        if ".dist-info/" in name
    }
    assert "millrace = millrace.cli.app:main" in about["entry_points.txt"]
    assert "LICENSE" in about
    for extra in ("wandb", "mlflow", "trackio", "prometheus"):
        assert f"Provides-Extra: {extra}" in about["METADATA"]
