"""What a user's code prints never stands between the answers of a command that answers in JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.long import covering

pytestmark = pytest.mark.usefixtures("warm")
LOUD = """
import ctypes, os, subprocess, sys

def shout(where):
    print("printed", where)
    sys.__stdout__.write("written\\n")
    os.write(1, b"by number\\n")
    ctypes.CDLL(None).puts(b"by C")
    ctypes.CDLL(None).fflush(None)
    subprocess.run(["echo", "by a process"])

shout("import")

def rows():
    shout("rows")
    return [{"prompt": f"{digit}>", "answer": str(digit)} for digit in range(4)]

def plain(completion, answer):
    shout("plain")
    return float(completion == answer)

async def waiting(completion, answer):
    return plain(completion, answer)

class Asked:
    def reset(self, row):
        shout("reset")
        self.answer = row["answer"]

    def step(self, action):
        shout("step")
        return float(action == self.answer)
"""
REWARDS = {
    "plain": ("function", "plain"),
    "async": ("function", "waiting"),
    "environment": ("environment", "Asked"),
}


def configured(start: Path, directory: Path, reward: str) -> list[str]:
    (directory / "loud.py").write_text(LOUD)
    kind, name = REWARDS[reward]
    tables = {
        "task": f'{{kind="function",path="{directory}/loud.py:rows"}}',
        "reward": f'{{kind="{kind}",path="{directory}/loud.py:{name}"}}',
        "steps": "1",
    }
    return [str(start), *(word for key, value in tables.items() for word in ("--set", f"{key}={value}"))]


def answer(*arguments: str) -> str:
    command = [sys.executable, "-m", "millrace", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "by a process" in done.stderr and "by C" in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("reward", "command"), covering(REWARDS, ["try-task -n 1", "eval --prompts 1 --samples 1"])
)
def test_the_standard_output_is_json_alone(start, tmp_path, reward, command):
    name, *more = command.split()
    json.loads(answer(name, *configured(start, tmp_path, reward), *more, "--json"))


def test_the_standard_output_of_a_run_is_lines_of_json_alone(start, tmp_path):
    run = ["--run-dir", str(tmp_path / "run"), "--log", "json"]
    lines = answer("train", *configured(start, tmp_path, "plain"), *run).splitlines()
    assert [json.loads(line)["kind"] for line in lines][-1]
