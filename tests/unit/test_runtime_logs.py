"""Logs are bounded, however much a worker prints and however often it is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millrace.runtime.logs import KEPT_LOGS, bound_log, open_log


def test_a_log_that_is_too_long_keeps_its_last_part_and_its_writer_goes_on(tmp_path: Path) -> None:
    path, fd = open_log(tmp_path, "reward-worker-0", 1)
    os.write(fd, b"a" * 3000 + b"b" * 1000)
    bound_log(path, 4000, 1000)
    assert path.stat().st_size == 4000
    os.write(fd, b"c")
    bound_log(path, 4000, 1000)
    assert (tmp_path / f"{path.name}.1").read_bytes() == b"b" * 999 + b"c"
    os.write(fd, b"goes on")
    os.close(fd)
    text = path.read_text()
    assert text.startswith("(too long") and text.endswith("goes on") and len(text) < 200


def test_a_log_that_is_gone_is_left_alone(tmp_path: Path) -> None:
    bound_log(tmp_path / "none.log")


def test_only_the_newest_logs_of_a_worker_stay(tmp_path: Path) -> None:
    (tmp_path / "replica-0.1.log").touch()
    for epoch in range(1, KEPT_LOGS + 6):
        path, fd = open_log(tmp_path, "reward-worker-0", epoch)
        os.close(fd)
        os.utime(path, (epoch, epoch))
    left = sorted(int(log.name.split(".")[1]) for log in tmp_path.glob("reward-worker-0.*.log"))
    assert left == list(range(6, KEPT_LOGS + 6)) and (tmp_path / "replica-0.1.log").exists()


def test_a_log_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").touch()
    (tmp_path / "reward-worker-0.1.log").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="symbolic links"):
        open_log(tmp_path, "reward-worker-0", 1)
