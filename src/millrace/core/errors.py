"""One tree of errors. A message says what is wrong, with which values, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MillraceError(Exception):
    """Root of every error that Millrace raises on purpose."""

    raised_in = ""
    """The worker and the command that raised it; empty where this process did."""


class ConfigError(MillraceError, ValueError):
    """A run with this configuration is not possible."""


class DataError(MillraceError, ValueError):
    """A prompt, trajectory, dataset row or model file is not what it should be."""


class LedgerError(MillraceError, RuntimeError):
    """The ledger cannot be opened, written or trusted."""


class StorageError(MillraceError, OSError):
    """A file of the run cannot be written: the disk is full, read-only, failing or gone."""


class WeightsError(MillraceError, RuntimeError):
    """Weights cannot be published, staged, pulled or verified."""


class UnknownVersionError(WeightsError, LookupError):
    """The version is not here: it was never published, or is already overwritten."""


class TornVersionError(WeightsError):
    """The slot was overwritten while it was being read. Pull a newer version."""


class DigestMismatchError(WeightsError):
    """Weights differ from what was published. Fatal: the run must not go on with them."""


class SamplingError(WeightsError):
    """An engine does not sample from the distribution whose log-probs it reports. As bad as wrong weights."""


class WrongBaseError(WeightsError):
    """A delta was made against other bytes than those here. Fetch a delta to another base, or no delta."""


class CorruptDeltaError(WeightsError):
    """A delta is damaged: fetch the delta again, or the bytes that it encodes."""


class WorkerError(MillraceError, RuntimeError):
    """Something went wrong with a worker process."""


class WorkerDied(WorkerError):
    """The worker is gone; calls and streams in flight end with this error."""


class HostLost(WorkerError):
    """The node that was a host of the run is gone, and no other can take its place."""


class OutOfMemory(WorkerError, MemoryError):
    """A worker's work needs more memory, of the host or of a device, than there is."""


class RemoteError(WorkerError):
    """An exception of a foreign type raised inside a worker, with its remote traceback."""


class StaleEpochError(WorkerError):
    """A command was meant for an earlier incarnation of the worker."""


class ClusterError(MillraceError, ConnectionError):
    """The cluster itself is gone: no worker can be commanded or started again."""


class DeadlineExceeded(MillraceError, TimeoutError):
    """A wait reached its deadline. The message names who waited for whom."""


class TrainingError(MillraceError, ArithmeticError):
    """A loss or gradient is not finite, or an optimizer step cannot be made."""


class RewardError(MillraceError, RuntimeError):
    """A reward function cannot be loaded or broke its contract."""


class SandboxError(MillraceError, RuntimeError):
    """A sandbox cannot be had here, or failed. It says nothing about the program that was to run in it."""


REMOTE_TRACEBACK = "remote traceback:\n"
"""The first words of a note with the traceback of an error in its worker."""


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors in a tree of exception groups; an error that is no group is the only one."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def alone(error: BaseException) -> BaseException:
    """The only error in nested exception groups, as a task group wraps it, or else the group."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


@contextmanager
def boundary(role: str, what: str, kind: type[MillraceError] = WorkerError) -> Iterator[None]:
    """Turn a foreign exception into a MillraceError that names the role and its work. A MillraceError passes
    through unchanged. So do cancellation, interrupts, and errors for `needing_memory`.
    """
    try:
        yield
    except MillraceError:
        raise
    except Exception as error:
        if _lacks_memory(error):
            raise
        raise kind(f"{role}: {what}: {type(error).__name__}: {error}") from error


@contextmanager
def after(first: BaseException | None) -> Iterator[None]:
    """A failure after the `first` error becomes a note on the first error, which is to be reported."""
    try:
        yield
    except MillraceError as later:
        if first is None:
            raise
        first.add_note(f"then: {later}")


@contextmanager
def needing_memory(role: str, what: str, advice: str) -> Iterator[None]:
    """Turn a failed allocation, of Python, torch or a device, into OutOfMemory. Other errors pass through."""
    try:
        yield
    except Exception as error:
        if isinstance(error, MillraceError) or not _lacks_memory(error):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise OutOfMemory(f"{role} has no memory left for {what}: {lines[0]}\n  {advice}") from error


def _lacks_memory(error: Exception) -> bool:
    """torch has its own exception class for memory of devices, and none for memory of the host."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


GO_ON = (
    "Free space or put the permissions right, then `millrace train --resume`: the ledger has everything up "
    "to its last flush."
)
OTHER_FILE = "Name a file in a directory that is there and can be written, with --out."


@contextmanager
def writing(path: object, advice: str = GO_ON) -> Iterator[None]:
    """Turn errors of the operating system while a file is written into StorageError. The default `advice` is
    for files of the run."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}\n  {advice}") from error
