"""An engine that is given versions of an adapter computes what their trainer computes."""

from __future__ import annotations

import pytest
from bench import DENSE, OpenBench, prompt_of

from millrace.config.tables.training import Adapter
from millrace.core.types import Sampling
from millrace.devices.served_weights import Merging

ADAPTER = Adapter(rank=4, kind="dora")
assert ADAPTER.scale is not None
SCALE = ADAPTER.scale


@pytest.mark.computed
@pytest.mark.parametrize("model", DENSE)
def test_logprobs_are_those_of_the_model_with_its_adapter(
    model: str, stepwise: bool, bench_of: OpenBench
) -> None:
    if not stepwise and model != "qwen3 tied":
        pytest.skip("engines in other processes are tried with one model")
    bench = bench_of(model)
    merging = Merging(bench.options.model_path, bench.options.dtype, SCALE)
    reader = merging.over(bench.reader)
    for seed in (1, 2):
        version = bench.publish_adapter(seed, ADAPTER)
        staged, loaded = bench.engine.stage(version, reader)
        assert staged == loaded and merging.published(loaded) == bench.digests[version]
        bench.engine.swap(version)
        played = bench.play(bench.work(prompt_of(i, 9), Sampling(max_tokens=20)) for i in range(3))
        assert {v for one in played for v, _ in one.columns.runs} == {version}
        bench.check(played)
        assert bench.engine.digest() == loaded
