"""Whose an error is, and whether a run can do without the worker whose it is. Pure.

    raised in a worker, or said of one: it died, did not     the worker's
    answer, cannot start, or serves wrong weights
    all else: a bug of the controller, the ledger, the       the run's, which ends
    cluster, the data, cancellation

What a joiner raises never ends a run. A worker of the start that never worked ends the run at once: most
often a setting is wrong. One that has worked is given up where others do the same work.
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

ALONE = ("trainer", "reference")
"""Roles whose errors end the run at once, unless they are deaths: what they are given is the run itself."""


def is_workers(error: BaseException) -> bool:
    """Whether an error that a worker's session raised is that worker's own."""
    if isinstance(error, MillraceError) and error.raised_in:
        return True
    return isinstance(error, WorkerError | DeadlineExceeded | WeightsError)


def may_pass(error: BaseException, role: str, *, made: bool, worked: bool) -> bool:
    """Whether another incarnation of the worker may do better. `made`: one was started before; `worked`: one
    did a part of the run's work."""
    if isinstance(error, OutOfMemory) and not made:
        return False
    if isinstance(error, WorkerError | DeadlineExceeded) and not isinstance(error, RemoteError):
        return True
    return (
        worked
        and (role not in ALONE or isinstance(error, RemoteError))
        and not isinstance(error, WeightsError)
    )


def may_go(error: BaseException, *, first: bool, worked: bool, others: bool) -> bool:
    """Whether the run goes on without the worker whose `error` this is. `first`: it is of the run's start.
    `others`: there are some that do the same work."""
    if not is_workers(error):
        return False
    if worked:
        return others and not isinstance(error, DigestMismatchError)
    return not first


@contextmanager
def starting(name: str) -> Iterator[None]:
    """What the runtime raises while it starts worker `name` is that worker's own, unless the cluster is gone
    or it is a bug."""
    try:
        yield
    except ClusterError:
        raise
    except MillraceError as error:
        error.raised_in = error.raised_in or f"{name}: start"
        raise
    except OSError as error:
        raise WorkerError(f"{name} cannot be started: {error}") from error
