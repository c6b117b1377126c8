"""One suite for every engine: `pytest tests/engines --engine NAME`, NAME as in `rollout.engine`.

Without a name: our own. Then the simulated engine, too, keeps the promises that have nothing to do with what
is computed: the tests without the mark `computed`. `--device cuda` and `--dtype bfloat16` say what computes.
`--within-process` tests vLLM inside this process; without it vLLM generates in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import bench as tested
import pytest
import torch
from bench import MODELS, Bench, OpenBench
from servers import SERVED, Servers

from millrace.rollout.engine_kinds import ENGINES
from millrace.rollout.protocol import Capabilities

SIMULATED = "simulated"
MakeBench = Callable[..., Bench]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", choices=list(ENGINES), help="which engine tests/engines tests")
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="what it computes on")
    parser.addoption("--dtype", choices=["float32", "bfloat16"], default="float32", help="of weights")
    parser.addoption("--within-process", action="store_true", help="vLLM computes in this process")
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
    return ENGINES[kind].can


@pytest.fixture(scope="session")
def _make_bench(tensor: int, stepwise: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeBench]:
    servers = Servers(tmp_path_factory.mktemp("servers"))

    def make_bench(kind: str, model: str, **options: int) -> Bench:
        options = {"tensor": tensor, "stepwise": stepwise} | options
        if kind == "vllm" and not options["stepwise"] and model not in SERVED:
            pytest.skip("vLLM in a process of its own is tried with two models")
        directory, made = tmp_path_factory.mktemp("model"), Bench
        if kind == "server":
            return servers.bench(directory, model, **options)
        if kind == SIMULATED:  # an engine's own interpreter has not what the simulator needs
            from simulated import SimulatedBench as made
        return made(kind, directory, model, **options)

    yield make_bench
    servers.close()


@pytest.fixture(scope="session")
def _kept(_make_bench: MakeBench) -> Iterator[list[Bench]]:
    """Engines live until the end: one that is closed takes what all of vLLM's share, its process groups."""
    kept: list[Bench] = []
    yield kept
    for bench in kept:
        bench.close()


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
        bench.clear()
        bench.used = False
        if tensor > 1 or (kind == "vllm" and not bench.options.stepwise):
            bench.close()
