"""Makes this folder importable, so that the tests of every backend share `conformance`, and holds what the
tests of whole runs share: a start, a run that nothing disturbed, and a quick way to start workers."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# A shell that starts tests in the background has SIGINT ignored, and every process of a test inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration file of a small run, beside the model that the run starts from."""
    from tests.runs import make_start

    return make_start(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="session")
def _imported() -> Iterator[object]:
    if find_spec("reasoning_gym") is None:  # an engine's own interpreter has not what whole runs need
        yield None
        return
    from tests.warm import imported

    warm, server = imported()
    yield warm
    warm.close()
    server.wait()


@pytest.fixture(scope="module")
def warm(_imported: object) -> Iterator[None]:
    """Forkservers of this process, commands of Millrace and every `script.py` need not import torch."""
    from millrace.runtime import launcher

    if _imported is None:
        yield
        return
    from tests.warm import popen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "_start", _imported.start)
        patch.setattr(subprocess, "Popen", popen(_imported))
        yield
