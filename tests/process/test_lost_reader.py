"""`millrace train ... | head`: a run outlives the reader of its output. What it leaves holds no secret."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.long import long
from tests.runs import events, summary

from millrace.run_directory.run_directory import RunDirectory

pytestmark = pytest.mark.usefixtures("warm")

URL = "http://who:SECRET@127.0.0.1:9/hook/SECRET?key=SECRET"


@long
@pytest.mark.parametrize("more", [[], ["--log", "json"]])
def test_a_run_whose_output_nobody_reads_any_more_gets_to_its_end(
    start: Path, tmp_path: Path, more: list[str]
) -> None:
    run = RunDirectory(tmp_path / "run")
    command = [sys.executable, "-m", "millrace", "train", str(start), "--run-dir", str(run.path), *more]
    command += ["--set", f"observe.notify={URL}"]
    with subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=300) == 0
    assert summary(run)["ok"] and summary(run)["steps"] == 4
    reasons = {event.fields["source"]: event.fields["reason"] for event in events(run, "warned")}
    assert "nobody reads it any more" in reasons["output"] and "URLError" in reasons["notify"]
    written = [path for path in run.path.rglob("*") if path.is_file()]
    assert len(written) > 5 and not [path for path in written if b"SECRET" in path.read_bytes()]
