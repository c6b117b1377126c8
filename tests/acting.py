"""An environment for whole runs, which also does harm. The file is copied beside the run's configuration.

An episode ends after 3 or 4 turns. Its answers depend on the row and the actions, and one in four begins
another sequence. Answers are counted in the file `answers`, by all processes together. If the count is one of
the file `points`, the answer does harm.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

from millrace import Done, Observation

HERE = Path(__file__).parent
PAUSE_S_MAX, BUSY_S = 60.0, 0.02
LETTERS = str.maketrans("0123456789abcdef", "ab>ab>ab>ab>ab>a")


def rows() -> list[dict[str, Any]]:
    return [{"prompt": "b" * length + ">", "number": length} for length in range(1, 9)]


def digest(*parts: object) -> str:
    return blake2b(repr(parts).encode()).hexdigest()


class Acting:
    def reset(self, row: dict[str, Any]) -> None:
        self.number, self.said = row["number"], list[str]()

    def step(self, action: str) -> Observation | Done:
        self.said.append(action)
        harm(digest(self.number, self.said[0]))
        answer = digest(self.number, self.said)
        last = len(self.said) == 3 + int(digest(self.number, self.said[:2])[0], 16) % 2
        after = int(answer[5], 16) % len(self.said) if answer[4] < "4" else None
        begin = "a" if after == 0 else ""  # no prompt begins so
        text = "" if last else begin + answer[:3].translate(LETTERS)
        with (HERE / "exchanges").open("a") as file:
            file.write(json.dumps([action, text]) + "\n")
        reward = (int(answer[3], 16) % 4) / 4
        return Done(reward) if last else Observation(text, reward=reward, after=after)


class Busy(Acting):
    """It takes its time, and meanwhile a file says so. After SIGKILL the files tell what it interrupted."""

    def step(self, action: str) -> Observation | Done:
        busy = HERE / f"busy-{os.getpid()}-{id(self)}"
        busy.touch()
        time.sleep(BUSY_S)
        answer = super().step(action)
        busy.unlink()
        return answer


class Lasting(Acting):
    recovery = "failed"


class Restoring(Acting):
    recovery = "restored"

    def snapshot(self) -> bytes:
        return json.dumps([self.number, self.said]).encode()

    def restore(self, row: dict[str, Any], snapshot: bytes) -> None:
        self.number, self.said = json.loads(snapshot)
        assert self.number == row["number"] and self.said
        (HERE / "restored").touch()


class BusyRestoring(Busy, Restoring):
    pass


def harm(episode: str) -> None:
    """The file `points`: {"what": "controller" is killed, or "held" until a file is there; "at": counts}. One
    episode does harm once: an episode that kills two workers fails, and rightly."""
    with (HERE / "answers").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        count = file.seek(0, os.SEEK_END) + 1
        file.write(b".")
    if not (points := HERE / "points").exists():
        return
    planned = json.loads(points.read_text())
    if count not in planned["at"] or (HERE / f"harmed-{episode}").exists():
        return
    (HERE / f"harmed-{episode}").touch()
    if planned["what"] == "controller":
        os.kill(int((HERE / "controller").read_text()), signal.SIGKILL)
    (HERE / f"held-{count}").write_text(str(os.getpid()))
    deadline_s = time.monotonic() + PAUSE_S_MAX
    while not (HERE / f"free-{count}").exists():  # whoever kills this process, or frees it
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
