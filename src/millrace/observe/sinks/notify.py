"""Notifies people who do not watch a run, through a command or a webhook.

`apprise` supports many services. It does not give the reason of a failure, and depends on `requests`.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Callable
from http.client import InvalidURL
from pathlib import Path
from typing import Any

from millrace.core.errors import ConfigError
from millrace.core.events import Event, Events

DEADLINE_S = 10.0
"""The deadline of one delivery, and of the deliveries that wait when the run ends."""
APART_S = 60.0
"""The shortest time between two messages of one kind. The end and every finding are always sent."""
_QUEUED_MAX = 100

Deliver = Callable[[str], None]


class Notifier:
    """A sink. A thread sends the messages, so a slow or failing hook never delays the run. The first failure
    is reported as one `warned` event."""

    def __init__(self, events: Events, target: str, run: Path) -> None:
        self._events, self._run = events, run
        self._deliver = deliverer(target)
        self._version = 0
        self._sent_s: dict[str, float] = {}
        self._left_out: dict[str, int] = {}  # messages left out since the last, by kind
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._num_put = self._num_done = 0
        self._failure = ""
        self._has_warned = False
        self._thread = threading.Thread(target=self._send_all, name="notify", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if event.kind == "step":
            self._version = event.fields["version"]
        text = message_text(event)
        if text and self._is_due(event):
            self._put(self._message(event, text), always=event.kind == "run_ended")
        self._warn()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(DEADLINE_S + 1)
        if self._thread.is_alive():
            lost = f"{self._num_put - self._num_done} messages may be lost"
            self._failure = self._failure or f"it did not end within {DEADLINE_S:g} s of the run: {lost}"
        self._warn()

    def _is_due(self, event: Event) -> bool:
        """At most one message of a kind per minute. The next message counts those left out."""
        if event.kind in ("finding", "withdrawn"):
            return True
        if event.time_s < self._sent_s.get(event.kind, float("-inf")) + APART_S:
            self._left_out[event.kind] = self._left_out.get(event.kind, 0) + 1
            return False
        self._sent_s[event.kind] = event.time_s
        return True

    def _message(self, event: Event, text: str) -> str:
        message = {
            "run": str(self._run),
            "kind": event.kind,
            "text": f"{self._run.name} at step {self._version}: {text}",
            "version": self._version,
            "wall_s": event.wall_s,
            "left_out": self._left_out.pop(event.kind, 0),
            "fields": event.fields,
        }
        return json.dumps(message, default=repr)

    def _put(self, message: str, *, always: bool) -> None:
        if always or self._queue.qsize() < _QUEUED_MAX:
            self._num_put += 1
            self._queue.put(message)
        else:
            self._failure = self._failure or f"{_QUEUED_MAX} messages wait already: one was left out"

    def _send_all(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self._deliver(message)
            except InvalidURL:  # its text has the URL, which may be a secret
                self._failure = (
                    self._failure or "InvalidURL: it has a character, a name or a port that no URL has"
                )
            except Exception as error:
                self._failure = self._failure or f"{type(error).__name__}: {error}"
            self._num_done += 1

    def _warn(self) -> None:
        if self._failure and not self._has_warned:
            self._has_warned = True
            self._events.emit("warned", source="notify", reason=self._failure)


def message_text(event: Event) -> str:
    """The text of a message about an event; empty: the event has no message."""
    fields: dict[str, Any] = event.fields
    match event.kind:
        case "stalled":
            return f"no progress for {fields['quiet_s']:.0f} s: {'; '.join(fields['waits'])}"
        case "worker_died":
            return f"{fields['name']} died and is restarted: {fields['cause']}"
        case "finding":
            return f"doctor: {fields['fault']}: {'; '.join(fields['evidence'])}"
        case "withdrawn":
            return f"doctor: {fields['reason']}"
        case "run_ended":
            return f"ended: {fields['reason']}"
    return ""


def deliverer(target: str) -> Deliver:
    """The delivery to a URL or a command line, or to `$NAME`, an environment variable with one of the two.

    Raises: ConfigError: there is no such variable or command.
    """
    setting = f"`observe.notify` ({target})"
    if target.startswith("$"):
        target = os.environ.get(target[1:], "")
        if not target:
            raise ConfigError(f"{setting}: the environment has no such variable, or it is empty")
    if target.startswith(("http://", "https://")):
        return lambda message: _post(target, message)
    try:
        words = shlex.split(target)
    except ValueError as error:
        raise ConfigError(f"{setting} is no command line: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(
            f"{setting}: there is no such command\n  Name a program, or an http:// or https:// URL."
        )
    return lambda message: _run(words, message)


def _post(url: str, message: str) -> None:
    request = urllib.request.Request(
        url, message.encode(), {"Content-Type": "application/json", "User-Agent": "millrace"}
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        answer.read(1)


def _run(command: list[str], message: str) -> None:
    """Run the command without a shell. Its process group is killed at the deadline."""
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            _, said = process.communicate(message.encode(), timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            raise TimeoutError(f"the command did not end within {DEADLINE_S:g} s") from None
    if process.returncode:
        words = said.decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"the command ended with {process.returncode}{': ' + words[-1] if words else ''}")
