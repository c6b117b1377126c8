"""The end of a process that had a run."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from millrace.observe.sinks.trackers import any_hangs


def leave(code: int) -> NoReturn:
    """End this process at once if a library may keep it from its end. Ray's threads may crash a process while
    the interpreter ends. At its exit, W&B waits for its service without a deadline."""
    if "ray" in sys.modules or any_hangs():
        for stream in sys.stdout, sys.stderr:
            stream.flush()
        os._exit(code)
    sys.exit(code)
