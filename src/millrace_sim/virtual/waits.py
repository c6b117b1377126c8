"""The places where suspended tasks wait, for reports of deadlocks."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any

_SUSPENDABLE = (CoroutineType, AsyncGeneratorType, GeneratorType)
_ASYNCIO = Path(asyncio.__file__).parent


@dataclass(frozen=True, slots=True)
class Wait:
    """One suspended task. `place` is its innermost frame outside asyncio, then the one inside."""

    task: str
    place: str

    def __str__(self) -> str:
        return f"{self.task}: {self.place}"


def waits(tasks: Iterable[asyncio.Task[Any]]) -> tuple[Wait, ...]:
    """Describe every task that is not done, in the given order."""
    return tuple(Wait(task.get_name(), _place(task)) for task in tasks if not task.done())


def _place(task: asyncio.Task[Any]) -> str:
    frames = list(_frames(task.get_coro()))
    if not frames:
        return "not started"
    own = [frame for frame in frames if Path(frame.f_code.co_filename).parent != _ASYNCIO]
    ends = dict.fromkeys([own[-1] if own else frames[-1], frames[-1]])
    return " -> ".join(_describe(frame) for frame in ends)


def _describe(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def _frames(suspended: Any) -> Iterator[FrameType]:
    """Frames of a chain of awaits, outermost first."""
    while suspended is not None:
        frame = _first(suspended, "cr_frame", "ag_frame", "gi_frame")
        if frame is not None:
            yield frame
        suspended = _awaited(suspended)


def _awaited(suspended: Any) -> Any:
    if isinstance(suspended, _SUSPENDABLE):
        return _first(suspended, "cr_await", "ag_await", "gi_yieldfrom")
    if isinstance(suspended, asyncio.Future):
        return None
    # `__anext__` and `asend` awaitables do not name their generator; the collector knows it.
    return next(
        (referent for referent in gc.get_referents(suspended) if isinstance(referent, _SUSPENDABLE)), None
    )


def _first(thing: Any, *attributes: str) -> Any:
    return next((getattr(thing, name) for name in attributes if hasattr(thing, name)), None)
