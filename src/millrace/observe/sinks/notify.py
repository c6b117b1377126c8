"""Telling somebody who does not watch: a command or a webhook for what they would want to know.

`apprise` knows many services, but says of a failure only that there was one, and brings `requests`.
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
"""Of one delivery, and of those that wait when the run ends."""
APART_S = 60.0
"""Between two messages of one kind. The end is always told, and each finding: it comes once."""
_QUEUED_MAX = 100

Deliver = Callable[[str], None]


class Notifier:
    """A sink. Messages go out on a thread of their own: a slow or failing hook never delays the run. The
    first failure is told as one `warned` event."""

    def __init__(self, events: Events, target: str, run: Path) -> None:
        self._events, self._run = events, run
        self._deliver = deliverer(target)
        self._version = 0
        self._sent_s: dict[str, float] = {}
        self._held: dict[str, int] = {}  # messages left out since the last, by kind
        self._queue: queue.Queue[str | None] = queue.Queue(_QUEUED_MAX)
        self._failure = ""
        self._has_warned = False
        self._thread = threading.Thread(target=self._send_all, name="notify", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if event.kind == "step":
            self._version = event.fields["version"]
        text = told(event)
        if text and self._is_due(event):
            self._put(self._message(event, text))
        self._warn()

    def close(self) -> None:
        self._put(None)
        self._thread.join(DEADLINE_S + 1)
        if self._thread.is_alive() and not self._failure:
            self._failure = f"it did not end within {DEADLINE_S:g} s of the run"
        self._warn()

    def _is_due(self, event: Event) -> bool:
        """At most one of a kind per minute; those left out are counted in the next. Findings are few."""
        if event.kind in ("finding", "withdrawn"):
            return True
        if event.time_s < self._sent_s.get(event.kind, float("-inf")) + APART_S:
            self._held[event.kind] = self._held.get(event.kind, 0) + 1
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
            "left_out": self._held.pop(event.kind, 0),
            "fields": event.fields,
        }
        return json.dumps(message, default=repr)

    def _put(self, message: str | None) -> None:
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            self._failure = self._failure or f"{_QUEUED_MAX} messages wait already: one was left out"

    def _send_all(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self._deliver(message)
            except InvalidURL:  # it quotes the URL, which may be a secret
                self._failure = (
                    self._failure or "InvalidURL: it has a character, a name or a port that no URL has"
                )
            except Exception as error:
                self._failure = self._failure or f"{type(error).__name__}: {error}"

    def _warn(self) -> None:
        if self._failure and not self._has_warned:
            self._has_warned = True
            self._events.emit("warned", source="notify", reason=self._failure)


def told(event: Event) -> str:
    """What a message says of an event; empty: nobody is told of it."""
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
    """For a URL or a command line, or `$NAME` of an environment variable that holds one.

    Raises: ConfigError: there is no such variable or command.
    """
    asked = f"`observe.notify` ({target})"
    if target.startswith("$"):
        target = os.environ.get(target[1:], "")
        if not target:
            raise ConfigError(f"{asked}: the environment has no such variable, or it is empty")
    if target.startswith(("http://", "https://")):
        return lambda message: _post(target, message)
    try:
        words = shlex.split(target)
    except ValueError as error:
        raise ConfigError(f"{asked} is no command line: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(
            f"{asked}: there is no such command\n  Name a program, or an http:// or https:// URL."
        )
    return lambda message: _run(words, message)


def _post(url: str, message: str) -> None:
    request = urllib.request.Request(
        url, message.encode(), {"Content-Type": "application/json", "User-Agent": "millrace"}
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        answer.read(1)


def _run(command: list[str], message: str) -> None:
    """Without a shell. Its process group is killed at the deadline."""
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
