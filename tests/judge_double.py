"""A double of a judge: an OpenAI-compatible server that answers as a test says, and counts."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from http_double import JsonHandler, serving

HANG_S = 30.0


@dataclass
class Judge:
    """`says(body, asked)`: an answer's text, or a status, `"close"`, `"hang"` or a whole message. `asked` is
    how often this body came before."""

    says: Callable[[dict[str, Any], int], Any]
    url: str = ""
    status_text: str = "overloaded"
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)
    _asked: Counter[str] = field(default_factory=Counter)

    def begin(self, body: dict[str, Any], key: str | None) -> int:
        with self.lock:
            self.requests.append(body)
            self.keys.add(key)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            text = json.dumps(body, sort_keys=True)
            self._asked[text] += 1
            return self._asked[text] - 1

    def end(self) -> None:
        with self.lock:
            self.at_once -= 1


class _Handler(JsonHandler):
    judge: ClassVar[Judge]

    def take(self, path: str, given: dict[str, Any]) -> None:
        judge = self.judge
        asked = judge.begin(given, self.headers.get("Authorization"))
        try:
            said = judge.says(given, asked) if path == "/v1/chat/completions" else 404
        finally:
            judge.end()
        match said:
            case "close":
                self.close_connection = True
            case "hang":
                judge.ended.wait(HANG_S)
                self.close_connection = True
            case int():
                self.answer({"error": judge.status_text}, said)
            case dict():
                self.answer({"choices": [said]})
            case _:
                message = {"role": "assistant", "content": said}
                self.answer({"choices": [{"message": message, "finish_reason": "stop"}]})


@contextmanager
def judging(says: Callable[[dict[str, Any], int], Any]) -> Iterator[Judge]:
    """A judge that serves."""
    judge = Judge(says)
    with serving(_Handler, judge=judge) as url:
        judge.url = f"{url}/v1"
        try:
            yield judge
        finally:
            judge.ended.set()
