"""A run that is nearly all machinery: a random two-layer model, short completions, fast steps."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.runs import make_start

from millrace_chaos.child_run import ChildRun

FOR_EVER = 1_000_000


@contextmanager
def tiny_run(*overrides: str, prefix: Sequence[str] = ()) -> Iterator[ChildRun]:
    """Not started yet; whatever is left of it ends with the block. `prefix`: as of `ChildRun`."""
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as directory:
        run = ChildRun(make_start(Path(directory)), Path(directory) / "run", overrides, prefix=prefix)
        try:
            yield run
        finally:
            run.end()
