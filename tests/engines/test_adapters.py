"""An engine that is given versions of an adapter computes what their trainer computes."""

from __future__ import annotations

import asyncio
import copy

import bench as tested
import pytest
import torch
from bench import MODELS, Bench, OpenBench, make_model, prompt_of

from millrace.adapters.served_weights import Merging
from millrace.config.tables.training import Adapter
from millrace.core.types import Sampling
from millrace.trainer.adapters.adapted_linear import adapt, adapted_layers, published_weights
from millrace.trainer.publish.publisher import PublishBuffers

ADAPTER = Adapter(rank=4, kind="dora")
assert ADAPTER.scale is not None
SCALE = ADAPTER.scale


def publish(bench: Bench, seed: int) -> int:
    """An adapter of the model that the engine was opened with. What is right is the model with it."""
    version, trained = max(bench.models, default=-1) + 1, copy.deepcopy(make_model(bench.model_name, 0))
    adapt(trained, ADAPTER, published=tested.DTYPE, seed=seed)
    whole = copy.deepcopy(make_model(bench.model_name, 0))
    for name, layer in adapted_layers(trained).items():
        layer.lora_B.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(seed))
        whole.get_submodule(name).weight.data.copy_(layer.merged().to(tested.DTYPE))
    buffers = PublishBuffers(published_weights(trained, tested.DTYPE), tested.DTYPE)
    bench.models[version] = whole
    bench.digests[version] = bench._writer.write(version, buffers.fill())
    asyncio.run(bench.relay.stage(version, bench.digests[version]))
    return version


@pytest.mark.computed
@pytest.mark.parametrize("model", [name for name in MODELS if "moe" not in name])
def test_logprobs_are_those_of_the_model_with_its_adapter(
    model: str, stepwise: bool, bench_of: OpenBench
) -> None:
    if not stepwise and model != "qwen3 tied":
        pytest.skip("engines in other processes are tried with one model")
    bench = bench_of(model)
    merging = Merging(bench.options.model_path, bench.options.dtype, SCALE)
    reader = merging.over(bench.reader)
    for seed in (1, 2):
        version = publish(bench, seed)
        staged, held = bench.engine.stage(version, reader)
        assert staged == held and merging.published(held) == bench.digests[version]
        bench.engine.swap(version)
        played = bench.play(bench.work(prompt_of(i, 9), Sampling(max_tokens=20)) for i in range(3))
        assert {v for one in played for v, _ in one.columns.runs} == {version}
        bench.check(played)
        assert bench.engine.digest() == held
