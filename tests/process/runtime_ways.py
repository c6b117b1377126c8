"""The two ways in which the local runtime starts a worker. A test of one is a test of both."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from millrace.core.placement import HERE, Place
from millrace.runtime.local.local_runtime import LocalRuntime

_PATH = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
WAYS = {"forked": HERE, "spawned": Place(python=sys.executable, environ={"PYTHONPATH": _PATH})}
WAY = "RUNTIME_WAY"
"""Names, in the environment of a script that imports this module, how its runtime starts workers."""

DEFAULTS = LocalRuntime.spawn.__kwdefaults__
if WAY in os.environ:
    DEFAULTS["place"] = WAYS[os.environ[WAY]]
