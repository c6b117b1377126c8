"""The page about an agent does what it says, in small sizes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.long import long

from millrace.cli.app import run

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8").partition("## An agent by its URL")[0]
FILES = ("calculator.py", "start.py", "agent.toml")
BLOCK = re.compile(r"```(?:python|toml)\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^    ((?:millrace|python) .+)$", re.MULTILINE)
SMALLER = {
    "train": "--set steps=2 --set batch.prompts=2 --set batch.group_size=2",
    "eval": "--prompts 2 --samples 1",
}

pytestmark = pytest.mark.usefixtures("warm")


@long
def test_every_command_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in zip(FILES, BLOCK.findall(PAGE), strict=True):
        Path(name).write_text(text.replace("STEPS = 300", "STEPS = 3").replace("10_000", "100"))
    outputs = []
    for line in COMMAND.findall(PAGE):
        program, *words = shlex.split(line)
        if program == "python":
            subprocess.run([sys.executable, *words], check=True, timeout=300)
            continue
        code = run([*words, *shlex.split(SMALLER.get(words[0], ""))])
        assert code == 0 or words[0] == "doctor", line  # it finds that a random model earns nothing
        outputs.append(capsys.readouterr().out)
    assert "Turn 1, the environment" in outputs[0] and "The episode ends with reward 0" in outputs[0]
    assert "missing a required argument: 'b'" in outputs[1] and "The episode goes on" in outputs[1]
    assert "completions without a reward 0" in " ".join(outputs[-1].split())
