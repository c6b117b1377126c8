"""Whether an error is a worker's own, and whether the run can go on without that worker. Pure.

    raised in a worker, or by its supervision: it died,      the worker's
    did not answer, cannot start, serves wrong weights
    every other error: a bug of the controller, the          the run's, which ends
    ledger, the cluster, the data, cancellation

A worker that joined later and has done no work is given up, even with wrong weights. An error of a first
worker that has done no work ends the run at once: most often a setting is wrong. A worker that has worked is
given up if others do the same work, but wrong weights end the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from millrace.core.errors import (
    ClusterError,
    DeadlineExceeded,
    DigestMismatchError,
    MillraceError,
    OutOfMemory,
    RemoteError,
    WeightsError,
    WorkerError,
)

IRREPLACEABLE = ("trainer", "reference")
"""Roles whose errors end the run at once, unless the error is a death: another start would meet it again."""


def is_workers(error: BaseException) -> bool:
    """Whether an error that a worker's session raised is the worker's own error."""
    if isinstance(error, MillraceError) and error.raised_in:
        return True
    return isinstance(error, WorkerError | DeadlineExceeded | WeightsError)


def may_restart(error: BaseException, role: str, *, started: bool, worked: bool) -> bool:
    """Whether another incarnation of the worker may do better. `started`: an earlier incarnation has started.
    `worked`: an earlier incarnation did a part of the run's work."""
    if isinstance(error, OutOfMemory) and not started:
        return False
    if isinstance(error, WorkerError | DeadlineExceeded) and not isinstance(error, RemoteError):
        return True
    return (
        worked
        and (role not in IRREPLACEABLE or isinstance(error, RemoteError))
        and not isinstance(error, WeightsError)
    )


def may_go_on_without(error: BaseException, *, first: bool, worked: bool, others: bool) -> bool:
    """Whether the run goes on without the worker that raised `error`. `first`: the worker is of the run's
    start. `others`: other workers do the same work."""
    if not is_workers(error):
        return False
    if worked:
        return others and not isinstance(error, DigestMismatchError)
    return not first


@contextmanager
def starting(name: str) -> Iterator[None]:
    """An error of the runtime while it starts worker `name` becomes the worker's own. ClusterError and errors
    of foreign types do not."""
    try:
        yield
    except ClusterError:
        raise
    except MillraceError as error:
        error.raised_in = error.raised_in or f"{name}: start"
        raise
    except OSError as error:
        raise WorkerError(f"{name} cannot be started: {error}") from error
