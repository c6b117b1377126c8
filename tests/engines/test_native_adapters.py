"""An adapter that vLLM computes beside the base weights gives what the merged weights give."""

from __future__ import annotations

from typing import Any

import pytest
from bench import DENSE, Bench, OpenBench, Played, prompt_of

from millrace.config.tables.training import Adapter
from millrace.core.errors import ConfigError, DigestMismatchError, WeightsError
from millrace.core.types import Sampling
from millrace.rollout.protocol import NativeAdapter

pytestmark = pytest.mark.computed

ENDLESS = Sampling(max_tokens=120, ignore_eos=True)
SOME = ("q_proj", "v_proj", "up_proj", "o_proj")
"""One and two of three that vLLM packs, one of two, and one alone."""


@pytest.fixture(autouse=True)
def _only_of_vllm(kind: str, tensor: int) -> None:
    if kind != "vllm" or tensor > 1:
        pytest.skip("of vLLM on one device alone")


def adapter_of(model: str, targets: tuple[str, ...] = (), rank: int = 4) -> dict[str, Any]:
    """The arguments of `publish_adapter` and `bench_of`."""
    packed = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    each = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    adapter = Adapter(rank=rank, targets=targets)
    assert adapter.scale is not None
    names = targets or (packed if model == "phi3" else each)
    return {"adapter": adapter, "native": NativeAdapter(rank, adapter.scale, names)}


class Native:
    """A bench whose versions are adapters."""

    def __init__(self, open_bench: OpenBench, model: str = "qwen3 tied", **options: Any) -> None:
        known = adapter_of(model, options.pop("targets", ()), options.pop("rank", 4))
        self._adapter = known["adapter"]
        self.bench: Bench = open_bench(model, native_adapter=known["native"], **options)

    def publish(self, seed: int, base: int = 0) -> int:
        return self.bench.publish_adapter(seed, self._adapter, base)

    def serve(self, seed: int) -> int:
        version = self.publish(seed)
        self.bench.load(version)
        return version


@pytest.mark.parametrize("model", [name for name in DENSE if name != "glm4"])
def test_logprobs_are_those_of_the_merged_weights(model: str, bench_of: OpenBench) -> None:
    """`load` compares the engine's digest with the published one."""
    native = Native(bench_of, model)
    for seed in (1, 2, 3):
        version = native.serve(seed)
        played = native.bench.play(
            native.bench.work(prompt_of(i, 9), Sampling(max_tokens=20)) for i in range(3)
        )
        assert {v for one in played for v, _ in one.columns.runs} == {version}
        native.bench.check(played)
        assert native.bench.engine.digest() == native.bench.digests[version]


@pytest.mark.parametrize("rank", [4, 20])
def test_some_matrices_and_ranks_between_the_sizes_of_slots_are_served(
    rank: int, bench_of: OpenBench
) -> None:
    native = Native(bench_of, targets=SOME, rank=rank)
    for seed in (1, 2):
        native.serve(seed)
        native.bench.check(native.bench.play([native.bench.work(prompt_of(1, 9), Sampling(max_tokens=20))]))


@pytest.mark.parametrize("recompute", [True, False])
def test_requests_that_run_go_on_under_the_new_adapter(recompute: bool, bench_of: OpenBench) -> None:
    native = Native(bench_of, recompute=recompute)
    bench = native.bench
    versions = [native.serve(1), native.publish(2), native.publish(3)]
    works = [bench.work(prompt_of(i, 20), ENDLESS, group_id=i) for i in range(4)]
    bench.engine.stage(versions[1], bench.reader)
    bench.submit(works)
    for version, tokens in zip(versions[1:], (5, 40), strict=True):
        bench.sample(tokens)
        bench.engine.swap(version)
        if version == versions[1]:
            bench.engine.stage(versions[2], bench.reader)
    played = list(bench.drain().values())
    for one in played:
        assert [version for version, _ in one.columns.runs] == versions
        assert len(one.tokens) == ENDLESS.max_tokens
    bench.check(played if recompute else [before(one, versions[1]) for one in played])


def before(one: Played, version: int) -> Played:
    """What was sampled before `version`: after that the cache has keys and values of several."""
    return Played(one.work, one.columns[: one.columns.versions().index(version)])


def test_a_prefix_is_shared_within_a_version_and_never_across(bench_of: OpenBench) -> None:
    native, prompt = Native(bench_of, recompute=False), prompt_of(5, 100)
    bench = native.bench

    def prefilled() -> int:
        before = bench.engine.load().prefilled_tokens
        bench.check(bench.play([bench.work(prompt, Sampling(max_tokens=4))]))
        return bench.engine.load().prefilled_tokens - before

    for seed in (1, 2, 1):
        native.serve(seed)
        assert prefilled() == 100
        assert prefilled() <= 100 - 64


def test_an_adapter_of_another_base_is_refused(bench_of: OpenBench) -> None:
    native = Native(bench_of)
    bench, served = native.bench, native.serve(1)
    with pytest.raises(WeightsError, match=r"adapter belongs to weights with digest .* have .* here"):
        bench.engine.stage(native.publish(2, base=1), bench.reader)
    assert bench.engine.version == served
    bench.check(bench.play([bench.work(prompt_of(1, 9), Sampling(max_tokens=20))]))


def test_whole_weights_are_refused(bench_of: OpenBench) -> None:
    bench = Native(bench_of).bench
    with pytest.raises(WeightsError, match="the version is no adapter"):
        bench.engine.stage(bench.publish(1), bench.reader)


# ---------------------------------------------------------------- what a test can reach in this process alone


@pytest.fixture
def here(stepwise: bool) -> None:
    if not stepwise:
        pytest.skip("vLLM's worker is in another process")


def test_an_adapter_that_stays_in_its_slot_is_found_by_the_proof(
    here: None, fresh_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from millrace.engines.vllm import loading

    native = Native(fresh_bench)
    native.serve(1)
    monkeypatch.setattr(loading, "replace_adapter", lambda *arguments: None)
    native.bench.submit([native.bench.work(prompt_of(1, 9), ENDLESS)])
    with pytest.raises(DigestMismatchError, match=r"vLLM was given version 1 .* and computes another"):
        native.serve(2)
    assert native.bench.engine.version == -1 and not native.bench.engine.has_work


def test_another_scale_is_found_by_the_proof(
    here: None, fresh_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = Native(fresh_bench)
    monkeypatch.setattr(native.bench.engine._proof, "_scale", 4.0)  # type: ignore[attr-defined]
    with pytest.raises(DigestMismatchError, match=r"vLLM was given version 0 .* and computes another"):
        native.serve(1)


def test_a_load_reads_no_base_weights(
    here: None, bench_of: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from millrace.engines.vllm import loading

    native = Native(bench_of)
    monkeypatch.setattr(loading, "_reload", None)
    native.serve(1)


def test_matrices_without_a_place_in_vllm_are_refused_at_the_start(here: None, bench_of: OpenBench) -> None:
    with pytest.raises(ConfigError, match="input_layernorm"):
        Native(bench_of, targets=("q_proj", "input_layernorm"))


def test_a_fused_matrix_of_the_model_that_vllm_packs_from_parts_is_refused(
    here: None, bench_of: OpenBench
) -> None:
    with pytest.raises(ConfigError, match=r"no place for an adapter of .*mlp\.gate_up_proj"):
        Native(bench_of, "glm4", targets=("q_proj", "gate_up_proj"))
