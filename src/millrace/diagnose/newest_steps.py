"""The time use of a run's newest steps, from the end of its event log alone: fast for a run of any length."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from millrace.config.schema import Config
from millrace.core import files
from millrace.core.errors import DataError, boundary
from millrace.diagnose.bottleneck import STEPS_MIN, Bottleneck
from millrace.diagnose.examine import bottleneck_of, time_use_log
from millrace.diagnose.time_use import KINDS, STEPS_MAX, WARM_UP_STEPS, TimeUse
from millrace.observe.sinks.jsonl import event_of
from millrace.observe.sinks.log_files import opened

STEPS = STEPS_MAX + WARM_UP_STEPS
"""So many steps are looked for: as many as count, and those before them that may warm up."""
PAGE_BYTES = 64 << 20
"""The newest bytes of the log that a page reads: some seconds."""
CHUNK_BYTES = 1 << 20
"""Read at once, backwards."""
STEPS_FEW = 8
"""With so many steps in the newer parts, condensed parts are left out: they have no events of single
trajectories."""

_STARTS = tuple(f'{{"kind":"{kind}"'.encode() for kind in KINDS)
_MARK = re.compile(rb'\n\{"kind":"(step|run_started)"')
_MARK_BYTES = len(b'\n{"kind":"run_started"')

Logs = Sequence[tuple[Path, BinaryIO]]
"""The open parts of a log, oldest first."""


def newest_use(events: Path, config: Config, *, bytes_max: int | None = None) -> tuple[TimeUse, Bottleneck]:
    """Of `STEPS_MAX` steps, or of those that the newest `bytes_max` bytes have.

    Raises: DataError: there are no events, or one is damaged.
    """
    log = time_use_log(config)
    for line in newest_lines(events, bytes_max):
        event = event_of(line, str(events))
        with boundary(str(events), f"not a whole {event.kind!r} event", DataError):
            log(event)
    use = log.use()
    if bytes_max is not None and use.steps < STEPS_MIN and log.began_late:
        reason = f"the newest {bytes_max:,} bytes of events have {use.steps} whole steps"
        return use, Bottleneck("unknown", reason, "`millrace plan RUN` reads more")
    return use, bottleneck_of(config, use)


def newest_lines(log: Path, bytes_max: int | None = None) -> Iterator[bytes]:
    """Whole lines of `KINDS` from the end of all parts, the oldest first. The first and the last may be cut,
    and are left out then."""
    try:
        with opened(log) as logs:
            first, start = _begin(logs, bytes_max)
            for name, file in logs[first:]:
                file.seek(start)
                if start:
                    file.readline()
                start = 0
                for line in files.lines(file, name):
                    if line.startswith(_STARTS) and line.endswith(b"\n"):
                        yield line
    except FileNotFoundError:
        raise DataError(f"{log.parent} has no {log.name}: there are no events that a run wrote") from None


def _begin(logs: Logs, bytes_max: int | None) -> tuple[int, int]:
    """The part and the byte where the newest steps begin."""
    steps, left = 0, bytes_max
    for at in range(len(logs) - 1, -1, -1):
        if at < len(logs) - 2 and steps >= STEPS_FEW:
            return at + 1, 0
        file = logs[at][1]
        end = os.fstat(file.fileno()).st_size
        while end > 0:
            start = max(0, end - (CHUNK_BYTES if left is None else min(CHUNK_BYTES, left)))
            file.seek(start)
            marks = _MARK.finditer(file.read(end - start + _MARK_BYTES - 1))
            kinds = [mark[1] for mark in marks if start + mark.start() < end]
            steps += kinds.count(b"step")
            left = None if left is None else left - (end - start)
            if steps >= STEPS or b"run_started" in kinds or left == 0:
                return at, start
            end = start
    return 0, 0
