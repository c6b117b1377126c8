"""A process that works for this one: torch, processes and event loops stay out of a script or notebook.

The process never imports the script, so a script needs no `if __name__ == "__main__"`; and it has an event
loop of its own, so nothing here minds one that runs already.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from millrace.core import errors
from millrace.core.errors import MillraceError, RemoteError, WorkerDied

LAST_LINES = 12
END_S = 70.0  # a run that is asked to stop has 60 s to finish its step

_alive: set[Asked] = set()


class Asked:
    """One piece of work in another process. It ends at the latest when this process does.

    Signals of a terminal do not reach it: who asked decides what an interrupt means.
    """

    def __init__(self, work: str, arguments: dict[str, Any], log: Path | None = None) -> None:
        self._log = log
        self._answers = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed in `result`
        says = None if log is None else log.open("ab")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "millrace.api.work"],
                stdin=subprocess.PIPE,
                stdout=self._answers,
                stderr=says,
                start_new_session=True,
            )
        finally:
            if says is not None:
                says.close()
        _alive.add(self)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"work": work, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        """Ask it to end. A run finishes its step and saves."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """End it now. What a run has in its ledger is kept."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)

    def result(self) -> Any:
        """Wait for the answer. Raises what the work raised: the same class with the same message."""
        code = self._process.wait()
        self.stop()
        _alive.discard(self)
        self._answers.seek(0)
        said = self._answers.read()
        self._answers.seek(0)
        if not said.endswith("\n"):
            raise WorkerDied(f"the process that works for this one ended: exit code {code}{self._words()}")
        answer = json.loads(said)
        if "error" in answer:
            raise _error(answer["error"], answer["message"])
        return answer["result"]

    def _words(self) -> str:
        if self._log is None:
            return ""
        lines = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return f":\n  {self._log} ends with\n" + "\n".join(lines)


def ask(work: str, arguments: dict[str, Any]) -> Any:
    """Have it done, and wait. An interrupt ends it."""
    asked = Asked(work, arguments)
    try:
        return asked.result()
    except BaseException:
        asked.kill()
        raise


def _error(name: str, message: str) -> Exception:
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, MillraceError):
        return kind(message)
    return RemoteError(f"{name} in the process that worked for this one:\n{message}")


@atexit.register
def _end_all() -> None:
    """Runs that a script leaves behind end with it, their step finished and saved."""
    for asked in list(_alive):
        asked.stop()
    for asked in list(_alive):
        with suppress(subprocess.TimeoutExpired):
            asked._process.wait(END_S)
        asked.kill()
