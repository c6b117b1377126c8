"""Workers by a Python that has little of what the controller's has."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import millrace
import millrace_jax
from conformance import WAIT_S
from millrace.core.errors import WorkerDied, WorkerError
from millrace.core.placement import Place
from millrace.runtime.local.local_runtime import LocalRuntime
from millrace.runtime.process import UNSUITABLE_PYTHON, describe_exit

ORDERS = """
import asyncio, sys
from millrace.core.placement import Place
from millrace.runtime.local.local_runtime import LocalRuntime

async def run():
    runtime = LocalRuntime()
    try:
        for python in (None, sys.executable):
            worker = await runtime.spawn("worker", "runtime_workers:Process", place=Place(python=python))
            print(*await worker.call("order_of_a_set", timeout_s=WAIT_S))
    finally:
        await runtime.close()

asyncio.run(run())
"""
TELLS = """
import os, sys
from importlib.util import find_spec
import millrace, millrace_jax

class Tells:
    async def facts(self):
        has = [name for name in ("torch", "numpy", "pydantic", "typing_extensions") if find_spec(name)]
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        packages = [millrace.__file__, millrace_jax.__file__]
        return {"python": sys.executable, "has": has, "packages": packages, "devices": devices}
"""


def make_python(directory: Path, *, msgspec_too: bool) -> str:
    """A virtual environment without pip, whose only package is msgspec."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    (site,) = directory.glob("lib/python*/site-packages")
    if msgspec_too:
        (site / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    return str(directory / "bin" / "python")


@pytest.fixture(autouse=True)
def _nothing_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)


def failure(place: Place, log_dir: Path) -> tuple[str, str]:
    """The error of a worker that cannot start there, and what its log says."""

    async def run() -> str:
        runtime = LocalRuntime(log_dir=log_dir)
        try:
            with pytest.raises(WorkerDied) as caught:
                await runtime.spawn("worker", "millrace.runtime.probe:Probe", place=place)
            return str(caught.value)
        finally:
            await runtime.close()

    return asyncio.run(run()), (log_dir / "worker.1.log").read_text()


def test_a_worker_needs_msgspec_of_its_python_and_brings_millrace_and_its_wings(tmp_path: Path) -> None:
    python = make_python(tmp_path / "other", msgspec_too=True)
    (tmp_path / "tells.py").write_text(TELLS)
    place = Place(python=python, environ={"PYTHONPATH": str(tmp_path)}, devices=(2, 3))

    async def run() -> dict[str, Any]:
        runtime = LocalRuntime()
        try:
            worker = await runtime.spawn("worker", "tells:Tells", place=place)
            return dict(await worker.call("facts", timeout_s=WAIT_S))
        finally:
            await runtime.close()

    facts = asyncio.run(run())
    packages = [millrace.__file__, millrace_jax.__file__]
    assert facts == {"python": python, "has": [], "packages": packages, "devices": "2,3"}


def test_a_python_without_msgspec_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    python = make_python(tmp_path / "bare", msgspec_too=False)
    error, log = failure(Place(python=python), tmp_path / "logs")
    assert describe_exit(UNSUITABLE_PYTHON) in error
    assert log == f"{python} cannot run the worker worker: No module named 'msgspec'\n"


def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    error, log = failure(Place(python="/no/such/python"), tmp_path / "logs")
    assert describe_exit(UNSUITABLE_PYTHON) in error
    assert log == "/no/such/python cannot be started for worker: No such file or directory\n"


@pytest.mark.parametrize("place", [Place(host="elsewhere"), Place(ranks=0)])
def test_a_place_that_this_runtime_does_not_have_is_refused(place: Place) -> None:
    async def run() -> None:
        with pytest.raises(WorkerError, match="cannot spawn worker"):
            await LocalRuntime().spawn("worker", "millrace.runtime.probe:Probe", place=place)

    asyncio.run(run())


def test_a_forked_worker_sees_the_devices_of_its_place_only(tmp_path: Path) -> None:
    async def run() -> list[Any]:
        runtime = LocalRuntime(preload=("runtime_workers",))
        try:
            places = {"two": Place(devices=(1, 2)), "none": Place(devices=()), "any": Place()}
            workers = [await runtime.spawn(n, "runtime_workers:Process", place=p) for n, p in places.items()]
            return [
                await worker.call("variable", "CUDA_VISIBLE_DEVICES", timeout_s=WAIT_S) for worker in workers
            ]
        finally:
            await runtime.close()

    assert asyncio.run(run()) == ["1,2", "", os.environ.get("CUDA_VISIBLE_DEVICES")]


def test_sets_have_one_order_in_all_workers_of_all_runs() -> None:
    """Rows that a set orders are so the same in each worker, and after a resume."""
    orders = set[str]()
    for hash_seed in ("1", "2", "random"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parent)}
        command = [sys.executable, "-c", ORDERS.replace("WAIT_S", str(WAIT_S))]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        orders.update(lines := ended.stdout.splitlines())
        assert len(lines) == 2
    assert len(orders) == 1
