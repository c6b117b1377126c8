"""Replicas whose weights vLLM rounds to fp8 at each load: what they sample, and what a load leaves behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench import Bench, OpenBench, Played, prompt_of, trainer_logprobs

from millrace.core.errors import DigestMismatchError
from millrace.core.types import Sampling
from millrace.engines.vllm import mode
from millrace.engines.vllm.loading import load_version

pytestmark = pytest.mark.computed

FP8: dict[str, Any] = {"quantization": "fp8", "dtype": "bfloat16"}
FREE = Sampling(max_tokens=40, ignore_eos=True)
ENDLESS = Sampling(max_tokens=220, ignore_eos=True)
FAMILIES = ("qwen2 untied", "qwen3 tied", "llama tied", "llama untied", "mistral", "phi3", "gemma3")

DECODED = 0.01
"""In nats: mean distance of recorded log-probs from those of one pass of the same engine."""


@pytest.fixture(autouse=True)
def _only_of_vllm(kind: str) -> None:
    if kind != "vllm":
        pytest.skip("only vLLM quantises")


def played_by(bench: Bench, count: int = 4) -> list[Played]:
    return bench.play(bench.work(prompt_of(i, 20 + i), FREE) for i in range(count))


def by_one_pass(bench: Bench, one: Played) -> np.ndarray:
    """Log-probs of the sampled tokens, that the engine gives to the finished sequence as a prompt."""
    proof: Any = bench.engine._proof  # type: ignore[attr-defined]
    fixed, proof.tokens = proof.tokens, [*one.work.prompt, *one.work.tokens, *one.tokens]
    logprobs, _ = bench.engine.logprobs()  # type: ignore[attr-defined]
    proof.tokens = fixed
    return np.array(logprobs[-len(one.tokens) :])


def distance(one: Played, logprobs: np.ndarray, version: int) -> float:
    """Mean over the tokens that `version` sampled."""
    mine = np.array(one.columns.versions()) == version
    return float(np.abs(np.array(one.columns.logprobs) - logprobs)[mine].mean())


def check(bench: Bench, played: list[Played], version: int) -> None:
    """The engine serves the weights of `version`."""
    for one in played:
        assert distance(one, by_one_pass(bench, one), version) < DECODED


@pytest.mark.parametrize("model", FAMILIES)
def test_recorded_log_probs_are_those_of_the_rounded_weights(model: str, bench_of: OpenBench) -> None:
    """They are nearer to one pass of the same engine than to the trainer, whose weights are not rounded."""
    bench = bench_of(model, **FP8)
    assert "fp8" in bench.engine.computes
    for seed in (1, 2):
        version = bench.serve(seed)
        played = played_by(bench)
        check(bench, played, version)
        trained = trainer_logprobs(bench.models[version], played)
        gaps = [distance(one, logprobs, version) for one, logprobs in zip(played, trained, strict=True)]
        own = [distance(one, by_one_pass(bench, one), version) for one in played]
        assert np.mean(own) < np.mean(gaps)


def test_an_engine_that_loaded_many_versions_equals_one_that_loaded_the_last(fresh_bench: OpenBench) -> None:
    engines = [fresh_bench(**FP8) for _ in range(2)]
    for seeds, bench in zip(((1, 3, 2), (2,)), engines, strict=True):
        for seed in seeds:
            bench.serve(seed)
    (mine, _), (fresh, _) = (bench.engine.logprobs() for bench in engines)  # type: ignore[attr-defined]
    assert mine == fresh


def test_a_load_in_mid_generation_names_each_token_by_the_version_that_sampled_it(
    bench_of: OpenBench,
) -> None:
    bench = bench_of(**FP8)
    versions = [bench.serve(1), bench.publish(2)]
    bench.engine.stage(versions[1], bench.reader)
    bench.submit([bench.work(prompt_of(i, 20), ENDLESS, group_id=i) for i in range(4)])
    bench.sample(5)
    bench.engine.swap(versions[1])
    played = list(bench.drain().values())
    assert all([version for version, _ in one.columns.runs] == versions for one in played)
    check(bench, played, versions[1])
    bench.serve(1)
    check(bench, played, versions[0])


def test_a_sleeping_engine_quantises_the_next_version_anew(bench_of: OpenBench) -> None:
    bench = bench_of(**FP8)
    bench.serve(1)
    bench.submit([bench.work(prompt_of(i, 20), ENDLESS) for i in range(4)])
    bench.sample(5)
    bench.engine.sleep()
    bench.engine.wake()
    version = bench.serve(2)
    check(bench, list(bench.drain().values()), version)


STALE = {"one layer": ".layers.1.", "every layer": ".layers."}


@pytest.mark.stepwise
@pytest.mark.parametrize("stale", STALE)
def test_weights_that_a_load_did_not_renew_are_found_by_the_proof(
    stale: str, fresh_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def partly(worker: Any, *args: Any) -> list[Exception]:
        def reload_weights(weights_iterator: Any) -> None:
            renewed = ((name, weight) for name, weight in weights_iterator if STALE[stale] not in name)
            worker.reload_weights(weights_iterator=renewed)

        runner = worker.model_runner
        kept = SimpleNamespace(device=worker.device, model_runner=runner, reload_weights=reload_weights)
        return load_version(kept, *args)

    bench = fresh_bench("llama untied", **FP8)
    bench.serve(1)
    monkeypatch.setattr(mode, "load_version", partly)
    with pytest.raises(DigestMismatchError, match=r"was given version 1 .* and computes another"):
        bench.serve(2)
    assert bench.engine.version == -1
