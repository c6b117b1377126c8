"""How errors reach people, and that nothing heavy is imported to tell them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import millrace
from millrace.cli import app, quickstart, train
from millrace.config.schema import Config
from millrace.core.errors import ConfigError, DataError, MillraceError, StorageError, after
from millrace.observe.terminal import typed
from millrace.run.interrupt import INTERRUPTED
from millrace.run_directory.run_directory import RunDirectory
from millrace.runtime.seam import crossing, where

CONFIG = '[model]\npath = "m"\n[task]\nkind = "gym"\nname = "gcd"\n[reward]\nkind = "gym"\n'


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(train, "load", broken)


def skip_the_first_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "try_first", lambda config: None)
    monkeypatch.setattr(train, "warnings", lambda config, first: [])


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"millrace {millrace.__version__}"


@pytest.mark.parametrize(("error", "code"), [(ConfigError("bad key"), 2), (DataError("bad row"), 1)])
def test_an_error_of_ours_is_one_message_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: MillraceError, code: int
) -> None:
    fail_with(monkeypatch, error)
    assert app.run(["train", "x.toml"]) == code
    said = capsys.readouterr().err
    assert said == f"{type(error).__name__}: {error}\n"


def test_an_error_of_a_worker_names_it_and_what_failed_later_is_told_after_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = crossing(DataError("bad row"), where("trainer.1", 2, "load"))
    with after(error):
        raise StorageError("the disk is full")
    fail_with(monkeypatch, error)
    assert app.run(["train", "x.toml"]) == 1
    assert capsys.readouterr().err == (
        "DataError: bad row\n  raised in trainer.1 (epoch 2): load\n  then: the disk is full\n"
    )


def test_an_error_that_a_task_group_wraps_is_told_like_any_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, ExceptionGroup("tasks", [ExceptionGroup("inner", [DataError("bad row")])]))
    assert app.run(["train", "x.toml"]) == 1
    assert capsys.readouterr().err == "DataError: bad row\n"


@pytest.mark.parametrize("arguments", [["train", "x.toml", "--debug"], ["--debug", "train", "x.toml"]])
def test_debug_shows_the_traceback_wherever_it_is_written(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    fail_with(monkeypatch, DataError("bad row"))
    with pytest.raises(DataError):
        app.run(arguments)


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        app.run(["train", "x.toml"])


def test_ctrl_c_during_the_checks_is_an_interrupt_and_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "run.toml").write_text(CONFIG)
    monkeypatch.setattr(train, "preflight", interrupted)
    assert app.run(["train", str(tmp_path / "run.toml")]) == INTERRUPTED
    assert capsys.readouterr().err == "\nInterrupted by the user; nothing was started.\n"


def test_wrong_usage_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["train"]) == 2
    assert app.run(["train", "x.toml", "--no-such-option"]) == 2
    for excluding in (
        ["--step", "1", "--trajectory", "2"],
        ["--step", "1", "--worst"],
        ["--best", "--worst"],
    ):
        assert app.run(["show", "runs/x", *excluding]) == 2
        assert "exclude each other" in capsys.readouterr().err


def test_a_message_with_square_brackets_is_printed_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, ConfigError("see [schedule] in [/tmp/run.toml:3]"))
    app.run(["train", "x.toml"])
    assert "see [schedule] in [/tmp/run.toml:3]" in capsys.readouterr().err


def test_a_stopped_run_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    monkeypatch.setattr(train, "preflight", lambda config, path: ["mind the gap"])
    skip_the_first_try(monkeypatch)
    monkeypatch.setattr(train, "_train", lambda config, run, again, from_version, log: False)
    arguments = ["train", str(tmp_path / "run.toml"), "--run-dir", str(tmp_path / "out"), "--set", "steps=3"]
    assert app.run(arguments) == INTERRUPTED
    said = capsys.readouterr().err
    assert "Warning: mind the gap." in said
    assert f"--set steps=3 --run-dir {tmp_path / 'out'} --resume" in said


def test_resuming_names_what_changed_and_refuses_what_may_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    monkeypatch.setattr(train, "preflight", lambda config, path: [])
    skip_the_first_try(monkeypatch)

    def finish(config: Config, run: RunDirectory, again: str, version: int | None, log: object) -> bool:
        run.write_config(config)
        run.model.mkdir(exist_ok=True)
        return True

    monkeypatch.setattr(train, "_train", finish)
    arguments = ["train", str(tmp_path / "run.toml"), "--run-dir", str(tmp_path / "out")]
    assert app.run(arguments) == 0
    assert app.run(arguments) == 2
    assert "Add --resume" in capsys.readouterr().err
    assert app.run([*arguments, "--resume", "--set", "steps=500"]) == 0
    assert "Changed: `steps`: 100 -> 500" in capsys.readouterr().err
    for more in ([], ["--dry-run"]):
        assert app.run([*arguments, "--resume", "--set", "seed=5", *more]) == 2
        assert "`seed`: 0 -> 5" in capsys.readouterr().err


def test_hints_name_the_command_as_it_was_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "millrace"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", "")
    assert typed() == str(program)
    monkeypatch.setenv("PATH", str(program.parent))
    assert typed() == "millrace"
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "millrace" / "__main__.py")])
    assert typed() == f"{sys.executable} -m millrace"


@pytest.mark.parametrize("key", ["rollout.quantization", "trainer.quantization"])
def test_the_quickstart_refuses_what_its_check_of_log_probs_cannot_hold(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ["rollout.engine=vllm", "model.dtype=bfloat16", f"{key}=fp8"]
    asked = [argument for key in sets for argument in ("--set", key)]
    assert app.run(["quickstart", "--run-dir", str(tmp_path / "made"), *asked]) == 2
    said = capsys.readouterr().err
    assert f"`{key}` (fp8): the quickstart checks" in said and "1e-04" in said


def test_the_last_line_of_the_quickstart_can_be_pasted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", [".venv/bin/millrace"])
    monkeypatch.setenv("PATH", "")
    assert quickstart.look_around(tmp_path / "my runs") == f".venv/bin/millrace show '{tmp_path}/my runs'"


def test_a_terminal_without_utf8_gets_a_question_mark_and_no_traceback() -> None:
    command = [sys.executable, "-m", "millrace", "train", "größe.toml"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        b"ConfigError: there is no configuration file gr??e.toml\n",
    )


def test_the_command_line_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, millrace.cli.app\n"
        "print([m for m in ('torch', 'transformers', 'reasoning_gym') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True)
    assert done.stdout.strip() == b"[]"


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("--set optimizer.lr 1", "--set optimizer.lr=1"),
        ("--set optimizer.lr", "--set optimizer.lr=VALUE"),
        ("--set optimizer.lr --dry-run", "--set optimizer.lr=VALUE"),
        ("--optimizer.lr=1", "--set optimizer.lr=1"),
        ("--optimizer.lr 1", "--set optimizer.lr=1"),
        ("optimizer.lr=1", "--set optimizer.lr=1"),
    ],
)
def test_a_key_that_is_not_set_with_set_is_told_how(
    capsys: pytest.CaptureFixture[str], words: str, remedy: str
) -> None:
    assert app.run(["train", "run.toml", *words.split()]) == 2
    assert f"Write {remedy}\n" in capsys.readouterr().err


def test_a_run_may_be_named_as_a_sweep_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    app.run(["show", "qwen.lr=1e-6"])
    assert "is a key of the configuration" not in capsys.readouterr().err
