"""One suite for every engine: `pytest tests/engines --engine NAME`, NAME as in `rollout.engine`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bench import Bench, OpenBench

from millrace.rollout.engines import ENGINES
from millrace.rollout.protocol import Capabilities


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine", default="own", choices=list(ENGINES), help="which engine tests/engines tests"
    )


@pytest.fixture(scope="session")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--engine", "own"))


@pytest.fixture(scope="session")
def can(kind: str) -> Capabilities:
    return ENGINES[kind].can


@pytest.fixture(scope="session")
def _benches(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenBench]:
    """Each model and each way to open it once: opening an engine may take seconds, a load takes none."""
    opened: dict[tuple, Bench] = {}

    def open_bench(model: str, **options: int) -> Bench:
        key = (model, *sorted(options.items()))
        if key not in opened:
            opened[key] = Bench(kind, tmp_path_factory.mktemp("model"), model, **options)
        return opened[key]

    yield open_bench
    for bench in opened.values():
        bench.close()


@pytest.fixture
def bench_of(_benches: OpenBench) -> Iterator[OpenBench]:
    """Benches whose engines are idle, before and after."""
    used: list[Bench] = []

    def open_bench(model: str = "qwen3 tied", **options: int) -> Bench:
        used.append(_benches(model, **options))
        return used[-1]

    yield open_bench
    for bench in used:
        bench.clear()


@pytest.fixture(scope="session")
def _kept() -> list[Bench]:
    """Engines live until the end: one that goes takes what all of vLLM's share, its process groups."""
    return []


@pytest.fixture
def fresh_bench(
    kind: str, tmp_path_factory: pytest.TempPathFactory, _kept: list[Bench]
) -> Iterator[OpenBench]:
    """Benches whose engines have served nothing yet, and serve no other test."""
    opened: list[Bench] = []

    def open_bench(model: str = "qwen3 tied", **options: int) -> Bench:
        opened.append(Bench(kind, tmp_path_factory.mktemp("model"), model, **options))
        return opened[-1]

    yield open_bench
    _kept += opened
    for bench in opened:
        bench.close()
