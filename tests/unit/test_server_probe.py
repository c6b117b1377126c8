"""What a running server lacks is named, all of it, with what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_vllm_server import FakeVllm, fake_vllm

from millrace.core.errors import ConfigError, WorkerError
from millrace.engines.server.connect import find_server, probe, wait_for
from millrace.engines.server.server_dialect import Offer, Requirements
from millrace.engines.server.vllm_server import GENERATE, ROUTES, VllmServer

REQUIREMENTS = Requirements(slots=8, max_sequence_tokens=64, dtype="float32", tied=True)


@pytest.fixture
def fake() -> Iterator[FakeVllm]:
    with fake_vllm() as fake:
        yield fake


def test_a_server_with_everything_is_taken(fake: FakeVllm) -> None:
    assert probe(VllmServer(fake.url + "/"), REQUIREMENTS) == Offer("0.32.0", 160, True, [])
    fake.settings["model_config"]["hf_overrides"] = {}
    untied = REQUIREMENTS._replace(tied=False)
    assert probe(VllmServer(fake.url), untied) == Offer("0.32.0", 160, False, [])


def test_every_missing_route_is_named_with_what_brings_it(fake: FakeVllm) -> None:
    fake.routes = {"/health", "/server_info"}
    with pytest.raises(ConfigError) as error:
        probe(VllmServer(fake.url), REQUIREMENTS)
    assert all(
        f"it has no route {path}: {ROUTES[path]}" in str(error.value)
        for path in ROUTES
        if path != "/server_info"
    )
    assert fake.url in str(error.value) and "--tokens-only" in ROUTES[GENERATE]
    fake.routes = set()
    with pytest.raises(ConfigError, match=r"no route /server_info: start it with VLLM_SERVER_DEV_MODE=1"):
        probe(VllmServer(fake.url), REQUIREMENTS)


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        ("model_config", {"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ("model_config", {"max_model_len": 63}, r"sequences of 63 tokens: start it with --max-model-len 64"),
        ("model_config", {"dtype": "torch.bfloat16"}, "computes in bfloat16, and `model.dtype` is float32"),
        ("model_config", {"hf_overrides": {}}, r"tied to the embedding: start it with --load-format dummy"),
        ("scheduler_config", {"max_num_seqs": 8}, r"--max-num-seqs 9, or lower `rollout.slots`"),
        ("scheduler_config", {"enable_chunked_prefill": True}, "--no-enable-chunked-prefill"),
        ("scheduler_config", {"max_num_seqs": None}, "tells its settings in another form"),
    ],
)
def test_a_setting_that_does_not_do_is_named(
    section: str, settings: dict[str, Any], message: str, fake: FakeVllm
) -> None:
    fake.settings[section] |= settings
    with pytest.raises(ConfigError, match=message):
        probe(VllmServer(fake.url), REQUIREMENTS)


def test_a_server_that_guesses_tokens_ahead_is_refused(fake: FakeVllm) -> None:
    fake.settings["speculative_config"] = {"method": "ngram"}
    with pytest.raises(ConfigError, match="start it without --speculative-config"):
        probe(VllmServer(fake.url), REQUIREMENTS)


def test_on_a_gpu_a_tied_head_and_prompts_in_parts_do(fake: FakeVllm) -> None:
    fake.settings["device_config"]["device"] = "cuda"
    fake.settings["model_config"]["hf_overrides"] = {}
    fake.settings["scheduler_config"]["enable_chunked_prefill"] = True
    assert not probe(VllmServer(fake.url), REQUIREMENTS).with_head


@pytest.mark.parametrize("path", ["/openapi.json", "/server_info", "/version"])
def test_a_server_that_is_none_of_vllms_is_told(path: str, fake: FakeVllm) -> None:
    fake.foreign = path
    with pytest.raises(WorkerError, match=rf"{fake.url}: {path} does not answer as vLLM does"):
        probe(VllmServer(fake.url), REQUIREMENTS)


def test_a_release_that_no_test_has_passed_with_is_refused(fake: FakeVllm) -> None:
    fake.release = "0.26.0"
    with pytest.raises(ConfigError, match=r"vLLM 0\.26\.0 is not supported; supported: 0\.32"):
        probe(VllmServer(fake.url), REQUIREMENTS)


def test_a_server_that_is_not_there_is_told_after_the_wait(fake: FakeVllm) -> None:
    fake.fails["/health"] = 503
    with pytest.raises(WorkerError, match=rf"server {fake.url}: GET /health: 503"):
        wait_for(fake.url, 0.0)
    assert fake.calls == ["/version", "/health"]
    with pytest.raises(WorkerError, match=r"server http://127\.0\.0\.1:9: GET /version: ConnectError"):
        wait_for("http://127.0.0.1:9", 0.0)


def test_a_server_that_comes_up_meanwhile_is_waited_for(
    fake: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.fails["/health"] = 503
    monkeypatch.setattr("millrace.engines.server.connect.time.sleep", lambda _: fake.fails.clear())
    assert wait_for(fake.url, 60.0).program == "vLLM"
    assert fake.calls.count("/health") == 2


def test_another_program_is_told(fake: FakeVllm) -> None:
    fake.fails["/version"] = 404
    with pytest.raises(ConfigError, match=r"no route /version, as vLLM has, and no route /model_info"):
        find_server(fake.url)


def test_log_probs_that_are_not_of_the_distribution_sampled_from_are_found(fake: FakeVllm) -> None:
    fake.number = 4.0
    VllmServer(fake.url).check_logprobs([3, 4])
    fake.processed = False
    fake.number = 9999.0  # an earlier run's weights: nothing can be said
    VllmServer(fake.url).check_logprobs([3, 4])
    fake.number = 4.0
    with pytest.raises(ConfigError, match=r"not of the distribution that it samples from"):
        VllmServer(fake.url).check_logprobs([3, 4])
