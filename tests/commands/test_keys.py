"""`millrace keys` explains the keys of every file that Millrace reads."""

from __future__ import annotations

import pytest

from millrace.cli import app


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert app.run(["keys", *words]) == 0
    return capsys.readouterr().out


def test_one_key_has_its_type_its_default_and_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "batch.group_size")
    assert text.startswith("batch.group_size: integer ≥ 2; default 8\n  Trajectories per group.")


def test_a_key_of_several_kinds_is_explained_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "schedule.staleness_max")
    assert 'schedule.staleness_max (kind "laminar")' in text
    assert 'schedule.staleness_max (kind "millrace")' in text


def test_a_table_has_its_kinds_and_its_keys_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "schedule").splitlines()
    heads = [line for line in lines if not line.startswith(" ")]
    assert 'schedule.kind = "millrace":' in " ".join(heads)
    assert all(line.startswith("schedule.") for line in heads)


def test_a_preset_has_its_defaults_and_its_paper(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "algorithm.kind")
    assert 'algorithm.kind = "dr_grpo": preset; default scale = "none", normalize = "max_tokens"' in text
    assert "(2503.20783)" in text


def test_other_files_have_keys_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert "optuna.sampler:" in said(capsys, "optuna", "--of", "sweep")
    assert "cluster.device:" in said(capsys, "cluster", "--of", "simulate")
    assert "| `batch_tokens` |" in said(capsys, "--of", "sft", "--markdown")


def test_a_key_that_is_none_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["keys", "shcedule.ahead"]) == 2
    assert "Did you mean `schedule.ahead`?" in capsys.readouterr().err
