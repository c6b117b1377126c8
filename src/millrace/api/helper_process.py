"""A process that works for a script: torch, processes and event loops stay out of the script or notebook.
Messages of the API go to stderr, because stdout is the script's.

The process never imports the script, so a script needs no `if __name__ == "__main__"`. The process has its
own event loop, so the script may run one too.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import operator
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from millrace.core import errors
from millrace.core.errors import MillraceError, RemoteError, WorkerDied
from millrace.observe.terminal import Terminal

LAST_LINES = 12
END_S = 70.0  # a run that is asked to stop has 60 s to finish its step

_alive: set[WorkProcess] = set()


class WorkProcess:
    """One piece of work in another process. That process ends when this process ends, or before.

    Signals of a terminal do not reach the other process: the caller decides what an interrupt means.
    While the process lives, it holds a lock on its log, also when this process is gone: see `is_in_use`.
    """

    def __init__(
        self,
        work: str,
        arguments: dict[str, Any],
        log: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._log, request = log, _request(work, arguments)
        self._answers = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed in `result`
        log_file = None if log is None else log.open("ab")
        if log_file is not None:
            with suppress(BlockingIOError):  # who may work on a run is the ledger's decision
                fcntl.flock(log_file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of the open file, which is inherited
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "millrace.api.work"],
                stdin=subprocess.PIPE,
                stdout=self._answers,
                stderr=log_file,
                start_new_session=True,
                env={**os.environ, **(environ or {})},
            )
        finally:
            if log_file is not None:
                log_file.close()
        _alive.add(self)
        assert self._process.stdin is not None
        self._process.stdin.write(request)
        self._process.stdin.flush()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        """Ask the work to end. A run finishes its step and saves."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """End the work now. A run keeps everything that is in its ledger."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)

    def result(self) -> Any:
        """Wait for the answer. Raises what the work raised: the same class with the same message."""
        code = self._process.wait()
        self.stop()
        _alive.discard(self)
        self._answers.seek(0)
        text = self._answers.read()
        self._answers.seek(0)
        if not text.endswith("\n"):
            raise WorkerDied(f"the process that works for this one ended: exit code {code}{self._words()}")
        answer = json.loads(text)
        if "error" in answer:
            raise _error(answer["error"], answer["message"])
        return answer["result"]

    def _words(self) -> str:
        if self._log is None:
            return ""
        lines = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return f":\n  {self._log} ends with\n" + "\n".join(lines)


def is_in_use(log: Path) -> bool:
    """Whether a process that began with this log is alive, or one of its children that write there."""
    try:
        with log.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def ask(work: str, arguments: dict[str, Any]) -> Any:
    """Do the work in another process, and wait. An interrupt ends the process."""
    process = WorkProcess(work, arguments)
    try:
        return process.result()
    except BaseException:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process._process.wait(END_S)  # it writes nothing afterwards
        raise


def _request(work: str, arguments: dict[str, Any]) -> bytes:
    """A line of JSON. Whole numbers of NumPy are numbers."""
    return json.dumps({"work": work, **arguments}, default=operator.index).encode() + b"\n"


def _error(name: str, message: str) -> Exception:
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, MillraceError):
        return kind(message)
    return RemoteError(f"{name} in the process that worked for this one:\n{message}")


@atexit.register
def _end_all() -> None:
    """When the script ends, its runs finish their steps, save and end."""
    for process in list(_alive):
        process.stop()
    for process in list(_alive):
        with suppress(subprocess.TimeoutExpired):
            process._process.wait(END_S)
        process.kill()


# ---------------------------------------------------------------- messages


_console = Terminal(stderr=True, soft_wrap=True)


def info(text: str) -> None:
    _console.print(text)


def warn(text: str) -> None:
    _console.print(f"Warning: {text}.", style="yellow")
