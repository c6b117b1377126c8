"""The rules of every runtime: how to name a worker's class, call its methods and carry its errors.

Runtimes differ in how a message travels. The meaning of a message is the same, and is here.
"""

from __future__ import annotations

import difflib
import inspect
import pickle
import traceback
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

from millrace.config.objects import find_object
from millrace.core import errors
from millrace.core.errors import (
    REMOTE_TRACEBACK,
    DeadlineExceeded,
    MillraceError,
    RemoteError,
    WorkerDied,
    WorkerError,
)
from millrace.core.progress import CallProgress, CallVitals, of

PING = "__ping__"
"""The built-in method that answers heartbeats with `core.types.Vitals`."""

STREAM_WINDOW = 16
"""How many items a stream's generator may be ahead of its consumer."""

CREDIT_STEP = STREAM_WINDOW // 2
"""The consumer returns credits in halves of the window, so that the pipe never runs empty."""


def load_class(target: str) -> Callable[..., Any]:
    """Import "package.module:Class".

    Raises: WorkerError: `target` is malformed, lies in `__main__`, or the module has no such class; whatever
    importing the module raises.
    """
    if target.startswith("__main__:"):
        raise WorkerError(
            f"worker target {target!r}: workers do not run your script again; move the class to a module"
        )
    worker_class, _ = find_object(target, "worker target", kind=WorkerError)
    return cast(Callable[..., Any], worker_class)


def bind(worker: Any, method: str) -> Callable[..., Any]:
    """The method of `worker` that a command names. Names with a leading underscore are private.

    Raises: WorkerError naming the class, the method and the nearest public one.
    """
    bound = None if method.startswith("_") else getattr(worker, method, None)
    if callable(bound):
        return bound
    public = [name for name in dir(worker) if not name.startswith("_")]
    near = difflib.get_close_matches(method, public, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise WorkerError(f"{type(worker).__name__} has no method {method!r} that can be called{hint}")


class ExecutedCalls:
    """The calls that a worker executes, each with its progress."""

    def __init__(self) -> None:
        self._progress = list[CallProgress]()

    def vitals(self) -> list[CallVitals]:
        return [progress.vitals() for progress in self._progress]

    async def run(self, worker: Any, method: str, args: tuple[Any, ...]) -> Any:
        """Raises: WorkerError: there is no such method, or it is not async; whatever the method raises."""
        answer, progress = bind(worker, method)(*args), CallProgress(method)
        if not inspect.isawaitable(answer):
            raise WorkerError(f"{type(worker).__name__}.{method} is not an async method")
        self._progress.append(progress)
        try:
            with of(progress):
                return await answer
        finally:
            self._progress.remove(progress)


def begin_stream(worker: Any, method: str, args: tuple[Any, ...]) -> AsyncGenerator[Any, None]:
    """Raises: WorkerError: there is no such method, or it is not an async generator."""
    items = bind(worker, method)(*args)
    if not isinstance(items, AsyncGenerator):
        if inspect.iscoroutine(items):
            items.close()
        raise WorkerError(f"{type(worker).__name__}.{method} is not an async generator")
    return items


def crossing(error: BaseException, where: str) -> MillraceError:
    """The error that the caller sees for `error`, raised by the worker at `where`.

    A MillraceError keeps its class, and gets `where` and the remote traceback as notes. If it does not
    survive pickling, it becomes its nearest class in `core.errors`. Any other error becomes a RemoteError
    with the remote traceback.
    """
    remote = "".join(traceback.format_exception(error))
    if not isinstance(error, MillraceError):
        foreign = RemoteError(f"{where}: {type(error).__name__}: {error}\n\n{REMOTE_TRACEBACK}{remote}")
        foreign.raised_in = where
        return foreign
    try:
        copy: MillraceError = pickle.loads(pickle.dumps(error))
        faithful = type(copy) is type(error) and str(copy) == str(error)
    except Exception:
        faithful = False
    if not faithful:
        copy = _core_class(error)(str(error))
    copy.raised_in = where
    copy.add_note(f"raised in {where}")
    copy.add_note(REMOTE_TRACEBACK + remote)
    return copy


def _core_class(error: MillraceError) -> type[MillraceError]:
    return next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)


def where(name: str, epoch: int, method: str) -> str:
    """How messages name a command: `replica-0 (epoch 2): submit`."""
    return f"{name} (epoch {epoch}): {method}"


def late(name: str, epoch: int, method: str, timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"{where(name, epoch, method)} did not answer within {timeout_s:g} s")


def died(name: str, epoch: int, method: str, cause: str) -> WorkerDied:
    return WorkerDied(f"{where(name, epoch, method)}: the worker is gone: {cause}")
