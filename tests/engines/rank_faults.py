"""What goes wrong in one rank of vLLM while it reads weights. The ranks import this module."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import current_process
from pathlib import Path

from millrace.core.digest import NamedBuffer
from millrace.core.errors import TornVersionError, UnknownVersionError
from millrace.core.protocols import WeightsReader

DEADLINE_S = 60.0
View = AbstractContextManager[tuple[str, list[NamedBuffer]]]
Fault = Callable[[WeightsReader, int], View]


class FaultyReader:
    """As `whole`, but in `rank` it is `fault` that gives the view. Rank -1: in every rank."""

    def __init__(self, whole: WeightsReader, rank: int, fault: Fault) -> None:
        self._whole, self._rank, self._fault = whole, rank, fault

    def view(self, version: int) -> View:
        name, _, rank = current_process().name.partition("-")
        if name == "VllmWorker" and self._rank in (-1, int(rank)):
            return self._fault(self._whole, version)
        return self._whole.view(version)

    def close(self) -> None:
        self._whole.close()


def torn(whole: WeightsReader, version: int) -> View:
    raise TornVersionError("overwritten")


def unknown(whole: WeightsReader, version: int) -> View:
    raise UnknownVersionError("overwritten")


@contextmanager
def stale(whole: WeightsReader, version: int) -> Iterator[tuple[str, list[NamedBuffer]]]:
    """The version before."""
    with whole.view(version) as (digest, _), whole.view(version - 1) as (_, buffers):
        yield digest, buffers


def killed(whole: WeightsReader, version: int) -> View:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class Together:
    """A view begins when two ranks want it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, whole: WeightsReader, version: int) -> View:
        (self._directory / current_process().name).touch()
        end_s = time.monotonic() + DEADLINE_S
        while len(list(self._directory.iterdir())) < 2:
            if time.monotonic() > end_s:
                raise TornVersionError("the other rank does not load")
            time.sleep(0.01)
        return whole.view(version)
