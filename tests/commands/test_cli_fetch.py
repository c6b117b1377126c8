"""Fetching a model or a data set: what is asked of the hub, and what is said when it does not give it."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from millrace.checks.model_problems import model_problems
from millrace.cli.app import run


def give(monkeypatch: pytest.MonkeyPatch, *files: str) -> list[tuple]:
    asked = []

    def download(
        name: str, *, repo_type: str, revision: str | None, local_dir: Path, allow_patterns: list[str]
    ) -> None:
        given = [pattern in allow_patterns for pattern in ("*.safetensors", "*.bin")]
        asked.append((name, repo_type, revision, *given))
        for file in files:
            (local_dir / file).parent.mkdir(parents=True, exist_ok=True)
            (local_dir / file).write_text("{}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def refuse(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def download(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_model_is_fetched_into_a_directory_that_a_run_can_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = give(monkeypatch, "config.json", "model.safetensors", "tokenizer.json")
    assert run(["fetch", "owner/small", "--revision", "main"]) == 0
    assert asked == [("owner/small", "model", "main", True, False)]
    assert "path = 'models/small'" in capsys.readouterr().out


def test_the_files_of_a_data_set_are_told_as_a_task_s_paths(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = give(monkeypatch, "main/train-0.parquet", "main/test-0.parquet", ".cache/x.json", "README.md")
    assert run(["fetch", "owner/sums", "--data"]) == 0
    assert asked == [("owner/sums", "dataset", None, False, False)]
    stdout = capsys.readouterr().out
    assert [line.split("'")[1] for line in stdout.splitlines()[1:]] == [
        "data/sums/main/test-0.parquet",
        "data/sums/main/train-0.parquet",
    ]


def test_a_data_set_without_rows_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give(monkeypatch, "README.md", "sums.py")
    assert run(["fetch", "owner/sums", "--data"]) == 1
    assert "has no file of rows" in capsys.readouterr().err


def test_a_data_set_that_cannot_be_reached_gets_the_command_for_data_sets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(monkeypatch, ConnectionError("no route to host"))
    assert run(["fetch", "owner/sums", "--data"]) == 1
    assert "hf download --repo-type dataset owner/sums" in capsys.readouterr().err


def test_a_repository_without_weights_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give(monkeypatch, "config.json", "tokenizer.json")
    assert run(["fetch", "owner/small", "--to", "here"]) == 1
    assert "has no *.safetensors weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionError("no route to host"), "hf download owner/small"),
        (errors.LocalEntryNotFoundError("offline"), "HF_ENDPOINT"),
        (errors.OfflineModeIsEnabled("offline mode"), "HF_ENDPOINT"),
        (OSError(28, "No space left on device"), "Free space"),
    ],
)
def test_a_failure_is_one_message_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, said: str
) -> None:
    refuse(monkeypatch, error)
    assert run(["fetch", "owner/small"]) == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith("DataError:") and "owner/small could not be fetched" in stderr and said in stderr


@pytest.mark.parametrize("name", ["small", "a/b/c", "/small"])
def test_a_name_that_is_none_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fetch", name]) == 2
    assert "OWNER/NAME" in capsys.readouterr().err


def test_a_hub_s_name_in_place_of_a_path_gets_the_exact_command(tmp_path: Path) -> None:
    (problem,) = model_problems(tmp_path / "owner" / "small")
    assert f"`millrace fetch owner/small --to {tmp_path}/owner/small`" in problem
    (problem,) = model_problems(tmp_path / "small")
    assert f"`millrace fetch OWNER/MODEL --to {tmp_path}/small`" in problem
