"""A probe finds engines that do not sample as they say, and lets honest engines pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests import dishonest
from tests.dishonest import Categorical
from tests.long import few, long

from millrace.core.errors import SamplingError
from millrace.rollout.protocol import EngineOptions
from millrace.rollout.sampling_probe import PLAIN, interview, works

VOCABULARY = 500


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    return EngineOptions(model_path=str(tmp_path), keep_kv=False, probe=True)


def honest(seed: int = 0, spread: float = 2.5) -> Categorical:
    return Categorical(VOCABULARY, seed=seed, spread=spread)


@pytest.mark.parametrize("spread", few([0.0, 0.02, 1.0, 2.5, 10.0, 100.0], 2))
def test_an_honest_engine_passes_under_every_seed(spread: float, options: EngineOptions) -> None:
    for seed in range(16):
        interview("replica-0", "own", honest(seed, spread), options)


@long
def test_an_honest_engine_that_rounds_passes(options: EngineOptions) -> None:
    for seed in range(16):
        engine = dishonest.Rounds(VOCABULARY, seed=seed, spread=2.5)
        interview("replica-0", "own", engine, replace(options, dtype="bfloat16"))


WRAPPED = {
    dishonest.IgnoresTemperature: "temperature 0.5 do not follow from those at 1",
    dishonest.NoTopKIsOne: "not of one distribution",
    dishonest.OneMore: "`top_k` 2 leaves more than two tokens",
    dishonest.OneLess: "`top_k` 2 leaves fewer than two tokens",
    dishonest.IgnoresSeeds: "with equal seeds .* tokens differ",
    dishonest.IgnoresRunSeed: "with another seed of the run all 48 tokens are the same",
    dishonest.OneNoiseForAll: "the same tokens come again and again",
}


@pytest.mark.parametrize("seeds", few([range(5), range(5, 20)]))
@pytest.mark.parametrize("fault", WRAPPED, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_and_named(
    fault: Callable[[Any], Any], seeds: range, options: EngineOptions
) -> None:
    for seed in seeds:
        with pytest.raises(SamplingError, match=WRAPPED[fault]):
            interview("replica-0", "own", fault(honest(seed)), options)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            dishonest.IgnoresSamplingTemperature,
            "0.5 do not follow their log-probs: they come as at temperature 1",
        ),
        (dishonest.ReportsRaw, "at temperature 1 do not follow their log-probs: the same tokens"),
    ],
    ids=["sampling ignores the temperature", "greedy"],
)
@pytest.mark.parametrize("seeds", few([range(5), range(5, 20)]))
def test_sampling_from_another_distribution_than_the_reported_is_found(
    fault: type[Categorical], message: str, seeds: range, options: EngineOptions
) -> None:
    for seed in seeds:
        with pytest.raises(SamplingError, match=message):
            interview("replica-0", "own", fault(VOCABULARY, seed=seed, spread=2.5), options)


def test_the_error_says_who_what_and_what_to_do(options: EngineOptions) -> None:
    with pytest.raises(SamplingError) as caught:
        interview("replica-3", "own", dishonest.IgnoresTemperature(honest()), options)
    said = str(caught.value)
    assert said.startswith("replica-3 does not sample as it says (`rollout.engine` 'own', version 0")
    assert said.endswith("`rollout.probe = false` starts the run anyway")


def test_an_engine_without_seeds_or_top_k_is_not_asked_for_them(options: EngineOptions) -> None:
    unseeded = replace(options, seeded=False, server="http://somewhere")
    interview("replica-0", "server", dishonest.IgnoresSeeds(honest()), unseeded)
    interview("replica-0", "vllm", dishonest.IgnoresSeeds(honest()), replace(options, seeded=False))
    interview("replica-0", "server", dishonest.OneMore(honest()), unseeded)


def test_an_engine_at_work_is_left_alone(options: EngineOptions) -> None:
    busy = honest()
    busy.submit(works(PLAIN, VOCABULARY))
    interview("replica-0", "own", busy, options)
    assert busy.has_work
