"""Ctrl-C while a run starts: nothing is there to finish, so it ends at once, in order."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.long import few

from millrace.run.interrupt import INTERRUPTED

IMPORTS = """
import os, runpy, signal, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
runpy.run_module("millrace", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["typer", "millrace.cli.train"])
def test_an_interrupt_while_modules_are_imported_is_one_line(module: str) -> None:
    ended = subprocess.run([sys.executable, "-c", IMPORTS, module], capture_output=True, text=True)
    assert ended.returncode == INTERRUPTED
    assert ended.stderr.strip() == "Interrupted by the user; nothing was started."


@pytest.mark.parametrize("after", few(["Run directory", "events.jsonl"]))
def test_an_interrupt_before_the_first_step_ends_the_run(start: Path, tmp_path: Path, after: str) -> None:
    command = [sys.executable, "-m", "millrace", "train", str(start), "--run-dir", str(tmp_path / "run")]
    more = ["--set", "steps=100000"]
    with subprocess.Popen(
        [*command, *more], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr is not None
        while after == "Run directory" and "Run directory" not in run.stderr.readline():
            pass
        while after == "events.jsonl" and not (tmp_path / "run" / "events.jsonl").exists():
            time.sleep(0.01)
        run.send_signal(signal.SIGINT)
        said = "".join(run.communicate(timeout=280))
    assert run.returncode == INTERRUPTED, said
    assert "Traceback" not in said and "by an error" not in said
    if after == "events.jsonl":
        assert "ended: interrupted by the user" in said
        assert (
            json.loads((tmp_path / "run" / "summary.json").read_text())["reason"] == "interrupted by the user"
        )
