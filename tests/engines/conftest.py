"""One suite for every engine: `pytest tests/engines --engine NAME`, NAME as in `rollout.engine`, or `sglang`:
a server that speaks as SGLang does, or with `--installed` SGLang itself, of `.venv-sglang`.

Without a name: our own. Then the simulated engine, too, keeps the promises that have nothing to do with what
is computed: the tests without the mark `computed`. `--device cuda` and `--dtype bfloat16` say what computes.
`--within-process` tests vLLM inside this process; without it vLLM generates in a process of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from unittest.mock import patch

import bench as tested
import pytest
import torch
from bench import MODELS, Bench, OpenBench
from servers import SERVED, START, Servers

from millrace.rollout.engine_kinds import ENGINES, SERVERS
from millrace.rollout.protocol import Capabilities

SIMULATED = "simulated"
MakeBench = Callable[..., Bench]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", choices=[*ENGINES, "sglang"], help="which engine tests/engines tests")
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="what it computes on")
    parser.addoption("--dtype", choices=["float32", "bfloat16"], default="float32", help="of weights")
    parser.addoption("--within-process", action="store_true", help="vLLM computes in this process")
    parser.addoption("--installed", action="store_true", help="with --engine sglang: no stand-in")
    parser.addoption("--tensor", type=int, default=1, help="devices that share an engine's model")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "computed: only an engine that computes can show it")
    config.addinivalue_line(
        "markers", "stepwise: only an engine that computes in its steps alone can show it"
    )
    tested.DEVICE = config.getoption("--device", "cpu")
    tested.DTYPE = getattr(torch, config.getoption("--dtype", "float32"))
    key = (tested.DEVICE, tested.DTYPE)
    tested.TOLERANCE = tested.TOLERANCES.get(key, tested.TOLERANCE_BFLOAT16)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--engine", None)
        computed = metafunc.definition.get_closest_marker("computed")
        simulated = [] if asked or computed else [SIMULATED]
        metafunc.parametrize("kind", [asked or "own", *simulated], scope="session")


@pytest.fixture(scope="session")
def stepwise(request: pytest.FixtureRequest) -> bool:
    """Whether the engine computes in its steps alone. A server, and vLLM in a process of its own, go on
    between two steps: what a test wants to meet in its middle has often ended."""
    engine = request.config.getoption("--engine", None)
    asked = bool(request.config.getoption("--within-process", False))
    return engine in (None, "own") or (engine == "vllm" and asked)


@pytest.fixture(autouse=True)
def _skip_unless_stepwise(request: pytest.FixtureRequest, stepwise: bool) -> None:
    if request.node.get_closest_marker("stepwise") and not stepwise:
        pytest.skip("this engine goes on between two steps")


@pytest.fixture(autouse=True)
def _skip_unless_it_runs(request: pytest.FixtureRequest) -> None:
    """A family that an engine is not said to run is refused before a run starts."""
    model = getattr(request.node, "callspec", None) and request.node.callspec.params.get("model")
    if model:
        family, runs = MODELS[model].model_type, request.getfixturevalue("can").models
        if runs is not None and family not in runs.families:
            pytest.skip(f"{runs.computer} does not run {family}")


@pytest.fixture(scope="session")
def tensor(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--tensor", 1))


@pytest.fixture(scope="session")
def can(kind: str) -> Capabilities:
    if kind == SIMULATED:
        from simulated import CAN

        return CAN
    return SERVERS["SGLang"] if kind == "sglang" else ENGINES[kind].can


@pytest.fixture(scope="session")
def _make_bench(
    request: pytest.FixtureRequest, tensor: int, stepwise: bool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeBench]:
    servers = Servers(tmp_path_factory.mktemp("servers"))
    served_by = {"sglang": "sglang itself"} if request.config.getoption("--installed", False) else {}

    def make_bench(kind: str, model: str, **options: int) -> Bench:
        options = {"tensor": tensor, "stepwise": stepwise} | options
        if kind == "vllm" and not options["stepwise"] and model not in SERVED:
            pytest.skip("vLLM in a process of its own is tried with two models")
        directory, made = tmp_path_factory.mktemp("model"), Bench
        if kind in START:
            return servers.bench(served_by.get(kind, kind), directory, model, **options)
        if kind == SIMULATED:  # an engine's own interpreter has not what the simulator needs
            from simulated import SimulatedBench as made
        if kind == "vllm" and options["tensor"] == 1 and options["stepwise"]:
            _share_process_groups()
        return made(kind, directory, model, **options)

    yield make_bench
    servers.close()


def _share_process_groups() -> None:
    """All engines of vLLM in this process share the process groups of the first. It has a group for experts
    only if it has experts. One process alone is the same in every group. An engine that could not be opened
    would take the groups when it is garbage, at any time."""
    from vllm.distributed import parallel_state as groups
    from vllm.v1.engine import core

    core.cleanup_dist_env_and_memory = lambda: None
    if groups._TP is not None and groups._EP is None:
        groups._EP = groups._TP


@pytest.fixture(scope="session")
def _kept(_make_bench: MakeBench) -> Iterator[list[Bench]]:
    """Engines live until the end: one that is closed takes what all of vLLM's share, its process groups."""
    kept: list[Bench] = []
    yield kept
    with patch("gc.collect"):  # which each engine of vLLM calls twice, for seconds in all
        for bench in kept:
            bench.close()
    gc.collect()


@pytest.fixture(scope="session")
def _benches(_make_bench: MakeBench, _kept: list[Bench]) -> OpenBench:
    """Each model and each way to open it once: opening an engine may take seconds, a load takes none. Only a
    server is opened again and again, as it serves one bench at a time."""
    opened: dict[tuple, Bench] = {}

    def open_bench(kind: str, model: str, **options: int) -> Bench:
        key = (kind, model, *sorted(options.items()))
        if key not in opened or opened[key].closed:
            opened[key] = _make_bench(kind, model, **options)
            _kept.append(opened[key])
        return opened[key]

    return open_bench


@pytest.fixture
def bench_of(kind: str, _benches: OpenBench) -> Iterator[OpenBench]:
    """Benches whose engines are idle, before and after."""
    used: list[Bench] = []

    def open_bench(model: str = "qwen3 tied", **options: int) -> Bench:
        used.append(_benches(kind, model, **options))
        used[-1].used = True
        return used[-1]

    yield open_bench
    for bench in used:
        bench.clear()
        bench.used = False


@pytest.fixture
def fresh_bench(kind: str, tensor: int, _make_bench: MakeBench, _kept: list[Bench]) -> Iterator[OpenBench]:
    """Benches whose engines have served nothing yet, and serve no other test. An engine that has processes of
    its own shares nothing with others, and ends with the test."""
    opened: list[Bench] = []

    def open_bench(model: str = "qwen3 tied", **options: int) -> Bench:
        opened.append(_make_bench(kind, model, **options))
        opened[-1].used = True
        _kept.append(opened[-1])
        return opened[-1]

    yield open_bench
    for bench in opened:
        bench.used = False
        if tensor > 1 or (kind == "vllm" and not bench.options.stepwise):
            bench.close()
        elif not bench.closed:
            bench.clear()
