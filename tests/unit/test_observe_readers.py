"""A run outlives those who read what it prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import pytest
from observe_events import event, run_ended, run_started

from millrace.core.events import Event, Events
from millrace.observe.live.live_view import LiveView, LostReaders, StructuredLog
from millrace.observe.terminal import Terminal


@pytest.fixture
def unread() -> Iterator[TextIO]:
    """A pipe whose other end is closed."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        yield stream


def structured(stream: TextIO) -> tuple[Any, Any]:
    log = StructuredLog(stream)
    return log, log


def live(stream: TextIO) -> tuple[Any, Any]:
    console = Terminal(file=stream, lasting=True)
    return LiveView(console), console


@pytest.mark.parametrize("open_outlet", [structured, live])
def test_a_run_goes_on_without_its_reader_and_says_so_once(
    unread: TextIO, open_outlet: Callable[[TextIO], tuple[Any, Any]]
) -> None:
    events, seen = Events(lambda: 1.0, lambda: 1.0), list[Event]()
    sink, outlet = open_outlet(unread)
    for each in (seen.append, sink, LostReaders(events, [outlet])):
        events.subscribe(each)
    for item in (
        run_started(),
        event("stalled", 1.0, quiet_s=20.0, waits=["a"]),
        run_ended(9.0),
        run_ended(9.5),
    ):
        events.emit(item.kind, **item.fields)
    [warned] = [each for each in seen if each.kind == "warned"]
    assert warned.fields["source"] == "output" and "the run goes on" in warned.fields["reason"]
    assert seen[-1].kind == "run_ended"
    print("what is still buffered must not fail at the end", file=unread, flush=True)


def test_another_command_ends_with_its_reader(unread: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", unread)
    with pytest.raises(SystemExit):
        Terminal(file=unread).print("much")
