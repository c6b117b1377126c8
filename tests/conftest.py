"""Makes this folder importable, so that the tests of every backend share `conformance`, and holds what the
tests of whole runs share: a start, a run that nothing disturbed, and a quick way to start workers."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from millrace.run_directory.run_directory import RunDirectory

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # which find each other as scripts do
sys.path.append(str(Path(__file__).parents[1] / "studies"))
# A shell that starts tests in the background, or nohup, has signals ignored, and all processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in signal.SIGHUP, signal.SIGQUIT:
    signal.signal(number, signal.SIG_DFL)
# Where there is no GPU, Triton interprets. It asks at its first import, which may be in any test.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# The garbage of one test may be collected in any other. Pytest's own hook raises where the stack is full.
sys.unraisablehook = lambda _: None


if find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("any machine", deadline=None, derandomize=True)
    settings.load_profile("any machine")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: the garbage collector need not look at it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


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
    from tests.warm import end, imported

    warm, server = imported()
    yield warm
    end(warm, server)


@contextmanager
def _forked(imported: Any) -> Iterator[None]:
    if imported is None:
        yield
        return
    from tests.warm import forked

    with forked(imported):
        yield


@pytest.fixture(scope="module")
def warm(_imported: object) -> Iterator[None]:
    """Forkservers of this process, commands of Millrace and every `script.py` need not import torch."""
    with _forked(_imported):
        yield


@pytest.fixture(scope="session")
def undisturbed(start: Path, _imported: object, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The small run as it stands, to the end. Tests that change it change a copy."""
    from tests.runs import train

    with _forked(_imported):
        return train(start, tmp_path_factory.mktemp("undisturbed") / "run")
