"""The probe of sampling lets every engine pass, and finds faults that are planted on the way to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bench import Bench, OpenBench
from tests import dishonest

from millrace.core.errors import SamplingError
from millrace.rollout.sampling_probe import interview

pytestmark = pytest.mark.computed

SEEDS = (dishonest.IgnoresSeeds, dishonest.IgnoresRunSeed)
CUTS = (dishonest.NoTopKIsOne, dishonest.OneMore, dishonest.OneLess)


@pytest.fixture
def bench(bench_of: OpenBench) -> Bench:
    bench = bench_of()
    bench.serve(1)
    return bench


def asked(kind: str) -> str:
    return kind if kind in ("own", "vllm") else "server"


def test_an_engine_passes(bench: Bench, kind: str) -> None:
    interview("replica-0", asked(kind), bench.engine, bench.options)
    assert not bench.engine.has_work and not bench.engine.has_finished


@pytest.mark.parametrize(
    "fault",
    [
        dishonest.IgnoresTemperature,
        *SEEDS,
        *CUTS,
    ],
    ids=lambda fault: fault.__name__,
)
def test_a_planted_fault_is_found(fault: Callable[[Any], Any], bench: Bench, kind: str) -> None:
    if asked(kind) == "server" and fault in CUTS:
        pytest.skip("a server is not asked for `top_k`")
    if not bench.options.seeded and fault in SEEDS:
        pytest.skip("an engine without seeds is not asked for them")
    with pytest.raises(SamplingError):
        interview("replica-0", asked(kind), fault(bench.engine), bench.options)
