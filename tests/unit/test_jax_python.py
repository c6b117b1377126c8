"""Commands about checkpoints of the trainer in JAX, where the Python in use has no JAX."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from millrace.cli.app import run as millrace
from millrace.core.errors import ConfigError, DataError
from millrace.run_directory import models
from millrace.run_directory.models import run_with_jax


def program(path: Path, text: str) -> str:
    path.write_text(f"#!{sys.executable}\nimport sys\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_command_runs_in_the_python_of_the_trainer(tmp_path: Path) -> None:
    python = program(tmp_path / "python", "print(sys.argv[1:])")
    assert run_with_jax(python, "export", tmp_path, 2) == f"['-m', 'millrace', 'export', '{tmp_path}', '2']\n"


def test_its_error_is_the_error(tmp_path: Path) -> None:
    python = program(tmp_path / "python", "sys.exit('DataError: state/d is damaged')")
    with pytest.raises(DataError, match="DataError: state/d is damaged"):
        run_with_jax(python, "export")


def test_without_such_a_python_the_remedy_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("millrace.cli.model_files.has_jax", lambda: False)
    assert millrace(["convert", str(tmp_path / "v00000002"), str(tmp_path), "--to", "jax"]) == 2
    assert "`millrace convert` needs JAX and Orbax" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"`trainer\.python` \(.*absent\) cannot be started"):
        run_with_jax(str(tmp_path / "absent"), "convert")


def test_jax_is_there_only_with_orbax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: None if name == "orbax" else name)
    assert not models.has_jax()
