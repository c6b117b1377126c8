"""A server whose model is one number, in the dialects `fake_vllm_server` and `fake_sglang_server`.

The log-prob of every token is minus the number in the weights that were loaded last. The n-th token after a
prompt is its length plus n, modulo `VOCAB`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from safetensors.numpy import load_file

from http_double import JsonHandler, Part

VOCAB = 50
PATIENCE_S = 30.0
BROKEN = 9999.0  # a number that gives log-probs that are none


@dataclass
class FakeServer:
    """`loading`: the routes of a load; the first `pausing` of them pause."""

    generate: ClassVar[str]
    loading: ClassVar[Sequence[str]]
    pausing: ClassVar[int] = 1

    url: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    label: str = "default"
    number: float = 0.0
    processed: bool = True
    fails: dict[str, int] = field(default_factory=dict)  # path: status
    foreign: str = ""  # a path that answers as another program would
    calls: list[str] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)  # that stream
    tokens_max: int = 10**9  # of a stream, before `then`
    then: str = "hang"  # or "cut", "end", "error", "abort"
    paused: bool = False
    left: int = 0  # streams whose client went away
    pauses: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def until(self, true: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(true, PATIENCE_S)

    def set(self, **fields: Any) -> None:
        with self.changed:
            for name, value in fields.items():
                setattr(self, name, value)
            self.changed.notify_all()

    # ------------------------------------------------------------ what it does

    def pause(self) -> None:
        self.set(paused=True, pauses=self.pauses + 1)

    def resume(self) -> None:
        self.set(paused=False)

    def load(self, directory: str) -> str:
        self.set(number=float(load_file(Path(directory) / "model.safetensors")["number"][0]))
        return ""

    def parts(self, length: int, tokens_max: int, ends: Sequence[int]) -> Iterator[Part]:
        """After a prompt of `length` tokens. Without an end: the handler misbehaves as `then` says."""
        self.until(lambda: not self.paused)
        begun, sent = self.pauses, 0
        while True:
            self.until(lambda n=sent: n < self.tokens_max or self.then != "hang" or self.pauses > begun)
            over = sent >= self.tokens_max
            if self.pauses > begun or (over and self.then == "abort"):
                yield [], "abort"
                return
            if over:
                return
            token = (length + sent) % VOCAB
            sent += 1
            reason = "stop" if token in ends else "length" if sent == tokens_max else None
            yield [(token, -self.number)], reason
            if reason is not None:
                return

    def end(self) -> None:
        self.set(then="end", paused=False, pauses=self.pauses + 1)


class Faulty(JsonHandler):
    """A mixin: the faults of `fake`, before the dialect answers."""

    fake: FakeServer

    def take(self, path: str, given: dict[str, Any]) -> None:
        self.fake.calls.append(path)
        if given.get("stream"):
            self.fake.requests.append(given)
        if path in self.fake.fails:
            self.answer({}, self.fake.fails[path])
        elif path == self.fake.foreign:
            self.answer(b"<html>")
        else:
            super().take(path, given)

    def broken(self) -> None:
        if self.fake.then == "error":
            self.say({"error": {"message": "the engine is dead"}})
        if self.fake.then == "cut":
            self.close_connection = True
            self.connection.close()
        else:
            self.end_stream(done=False)

    def finish(self) -> None:
        """A client that went away in the middle of a stream is no error here."""
        if self.wfile.closed:
            return
        super().finish()
