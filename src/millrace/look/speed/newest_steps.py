"""The time use of a run's newest steps, from the end of its event log alone: fast for a run of any length."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from millrace.compose.examine import bottleneck_of, time_use_log
from millrace.config.schema import Config
from millrace.core import files
from millrace.core.errors import DataError, boundary
from millrace.observe.sinks.jsonl import event_of
from millrace.observe.sinks.log_files import parts
from millrace.observe.slow.bottleneck import Bottleneck
from millrace.observe.slow.time_use import KINDS, TimeUse

BYTES_MAX = 6 << 20
"""The newest bytes of the log that are read."""

_STARTS = tuple(f'{{"kind":"{kind}"'.encode() for kind in KINDS)


def newest_use(events: Path, config: Config) -> tuple[TimeUse, Bottleneck]:
    """Raises: DataError: there are no events, or one is damaged."""
    log = time_use_log(config)
    for line in _newest_lines(events):
        if line.startswith(_STARTS):
            event = event_of(line, str(events))
            with boundary(str(events), f"not a whole {event.kind!r} event", DataError):
                log(event)
    use = log.use()
    return use, bottleneck_of(config, use)


def _newest_lines(log: Path) -> Iterator[bytes]:
    """Whole lines of the last bytes of all parts, the oldest first. The first and the last may be cut, and
    are left out then."""
    names = parts(log)
    if not names:
        raise DataError(f"{log.parent} has no {log.name}: there are no events that a run wrote")
    chosen: list[tuple[Path, int]] = []  # with the byte where reading begins
    left = BYTES_MAX
    for name in reversed(names):
        size = os.stat(name).st_size
        chosen.append((name, max(0, size - left)))
        left -= size
        if left <= 0:
            break
    for name, start in reversed(chosen):
        with files.opened(name) as file:
            file.seek(start)
            if start:
                file.readline()
            yield from (line for line in files.lines(file, name) if line.endswith(b"\n"))
