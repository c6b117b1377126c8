"""The ledger against the operating system: kill -9, full disks, two writers, readers beside them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
from ledger_writer import GROUP_SIZE, TOKENS, token

from millrace.core.errors import LedgerError
from millrace.core.types import State
from millrace.ledger import SqliteLedger
from millrace.ledger.reading import LedgerReader

WRITER = Path(__file__).with_name("ledger_writer.py")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@contextmanager
def writer(path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(WRITER), str(path), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def promised(process: subprocess.Popen[str], num_lines: int) -> tuple[int, int, int]:
    """What the writer said last, after at least `num_lines` lines."""
    assert process.stdout is not None
    line = ""
    for _ in range(num_lines):
        line = process.stdout.readline()
        assert line, process.communicate()[1]
    admitted, trained, version = map(int, line.split())
    return admitted, trained, version


def test_kill_9_at_any_moment_loses_nothing_that_was_flushed(path: Path) -> None:
    for kill in range(5):
        with writer(path) as process:
            promised(process, 20 + 13 * kill)
            process.send_signal(signal.SIGKILL)
            rest, _ = process.communicate()
        whole_lines = [line for line in rest.splitlines(keepends=True) if line.endswith("\n")]
        least = tuple(map(int, whole_lines[-1].split())) if whole_lines else (0, 0, 0)
        check_kept(path, least)


def check_kept(path: Path, least: tuple[int, ...]) -> None:
    ledger = SqliteLedger(path, run={})
    recovered, steps = ledger.recover(), ledger.steps_after(0)
    accounting = ledger.flush()
    assert accounting.balanced
    assert (accounting.admitted, accounting.trained, recovered.version) >= least
    assert accounting.trained == recovered.version * GROUP_SIZE
    trained = [i for record in steps for i in record.trajectory_ids]
    assert len(trained) == len(set(trained)) == accounting.trained
    assert recovered.next_group_id * GROUP_SIZE == accounting.admitted
    assert recovered.unused_group_ids == []
    for group in [*recovered.groups, *(ledger.group(i) for record in steps for i in record.group_ids)]:
        for member in group.members:
            expected = [token(member.trajectory_id, i) for i in range(len(member.columns))]
            assert member.columns.tokens.tolist() == expected
            assert member.state is not State.TRAINED or len(expected) == TOKENS
    ledger.close()


def test_a_full_disk_stops_the_run_and_nothing_flushed_is_lost(path: Path) -> None:
    with writer(path, str(400_000)) as process:
        lines, errors = process.communicate(timeout=280)
    assert process.returncode == 1
    assert "LedgerError" in errors and "disk is full or failing" in errors
    check_kept(path, tuple(map(int, lines.splitlines()[-1].split())))


def test_a_full_file_system_stops_the_run_and_nothing_flushed_is_lost(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "millrace-test", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs privileges")
    try:
        path = tmp_path / "ledger.sqlite"
        with writer(path) as process:
            lines, errors = process.communicate(timeout=280)
        assert "disk is full or failing (0 MiB free)" in errors
        subprocess.run(["mount", "-o", "remount,size=8m", str(tmp_path)], check=True)
        check_kept(path, tuple(map(int, lines.splitlines()[-1].split())))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_second_process_is_refused_and_told_who_writes(path: Path) -> None:
    with writer(path) as process:
        promised(process, 1)
        with pytest.raises(LedgerError, match=f"in use by process {process.pid} on "):
            SqliteLedger(path, run={})
        process.kill()
        process.communicate()
    SqliteLedger(path, run={}).close()


def test_a_run_can_be_read_while_it_is_written(path: Path) -> None:
    with writer(path) as process:
        promised(process, 5)
        with LedgerReader(path) as reader:
            versions = []
            for _ in range(20):
                promised(process, 5)
                state = reader.overview()
                assert state.accounting.balanced
                versions.append(state.version)
        assert versions == sorted(versions) and versions[0] < versions[-1]


def test_reading_a_stopped_or_killed_writer_changes_no_file(path: Path) -> None:
    with writer(path) as process:
        _, _, version = promised(process, 20)
        stop_between_writes(process, path)
        unchanged_by_reading(path, version)
        process.kill()
        process.communicate()
    unchanged_by_reading(path, version)


def stop_between_writes(process: subprocess.Popen[str], path: Path) -> None:
    """Stopped within a write, a writer leaves an index that nobody can read before it goes on."""
    while True:
        process.send_signal(signal.SIGSTOP)
        try:
            return LedgerReader(path).close()
        except LedgerError as error:
            assert "in the middle of a write" in str(error)
            process.send_signal(signal.SIGCONT)
            promised(process, 1)


def unchanged_by_reading(path: Path, version: int) -> None:
    before = files(path.parent)
    with LedgerReader(path) as reader:
        assert reader.overview().version >= version
        assert reader.trajectory(0).columns
    assert files(path.parent) == before


def files(directory: Path) -> dict[str, tuple[str, int]]:
    return {p.name: (sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in directory.iterdir()}
