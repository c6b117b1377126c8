"""Imports in a process whose memory is bounded, and its open files."""

from __future__ import annotations

import resource
import threading

from millrace.rewards import limits

DEADLINE_S = 60.0


def test_an_import_that_waits_for_another_thread_keeps_no_third_module_from_loading(monkeypatch) -> None:
    """Modules have locks of their own: with one more around all loading, two threads could wait for each
    other."""
    monkeypatch.setattr(limits, "_set_limit", lambda _: None)
    other_has_loaded, is_loading, found = threading.Event(), threading.Event(), []

    def load(name: str, *_: object) -> object:
        if name == "waits":
            is_loading.set()
            found.append(other_has_loaded.wait(DEADLINE_S))
        return name

    load_uncounted = limits._Uncounted(load)
    waiting = threading.Thread(target=load_uncounted, args=("waits",))
    other = threading.Thread(target=lambda: load_uncounted("other") and other_has_loaded.set())
    waiting.start()
    assert is_loading.wait(DEADLINE_S)
    other.start()
    waiting.join()
    other.join()
    assert found == [True]


def test_a_worker_may_open_as_many_files_as_the_system_permits() -> None:
    """An agent that waits takes two: often a process may have 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        limits.permit_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
