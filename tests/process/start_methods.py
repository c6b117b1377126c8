"""The two ways in which the local runtime starts a worker. `make test-long` runs every test with both."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from millrace.core.placement import HERE, Place
from millrace.runtime.local.local_runtime import LocalRuntime

_PATH = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
METHODS = {"forked": HERE, "spawned": Place(python=sys.executable, environ={"PYTHONPATH": _PATH})}
METHOD = "RUNTIME_START_METHOD"
"""Names, in the environment of a script that imports this module, how its runtime starts workers."""

DEFAULTS = LocalRuntime.spawn.__kwdefaults__
if METHOD in os.environ:
    DEFAULTS["place"] = METHODS[os.environ[METHOD]]
