"""The controller's limit on open files follows its workers."""

from __future__ import annotations

import resource

import pytest

from millrace.core.errors import WorkerError
from millrace.runtime import process

UNLIMITED = resource.RLIM_INFINITY


class Limits:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
        self.now = soft, hard
        monkeypatch.setattr(process.resource, "getrlimit", lambda _: self.now)
        monkeypatch.setattr(process.resource, "setrlimit", lambda _, limits: setattr(self, "now", limits))


@pytest.mark.parametrize(
    ("soft", "hard", "after"),
    [
        (1024, 20_000, 20_000),
        (1024, 10**9, process.FILES),
        (1024, UNLIMITED, process.FILES),
        (10**6, 10**9, 10**6),
        (UNLIMITED, UNLIMITED, UNLIMITED),
    ],
)
def test_the_soft_limit_is_raised_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, after: int
) -> None:
    limits = Limits(monkeypatch, soft, hard)
    process.allow_open_files(2000)
    assert limits.now == (after, hard)


def test_a_hard_limit_that_is_too_low_is_named_before_the_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(monkeypatch, 1024, 4096)
    with pytest.raises(WorkerError, match=r"2000 local workers need 4256 open files.*limit is 4096.\n"):
        process.allow_open_files(2000)
    assert limits.now == (1024, 4096)
    process.allow_open_files(1920)
    assert limits.now == (4096, 4096)
