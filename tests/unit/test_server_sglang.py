"""SGLang: what is asked of it, what it lacks, and how its streams are read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from fake_server import BROKEN, VOCAB
from fake_sglang_server import FakeSglang, fake_sglang

from millrace.core.completion.columns import token_array
from millrace.core.errors import ConfigError, WorkerError
from millrace.core.types import Sampling, Work
from millrace.engines.server.connect import find_server, probe, wait_for
from millrace.engines.server.server_dialect import Offer, Requirements, Token
from millrace.engines.server.sglang_server import SglangServer
from millrace.rollout.continuation import Continuation

REQUIREMENTS = Requirements(slots=8, max_sequence_tokens=64, dtype="float32", tied=True)


@pytest.fixture
def fake() -> Iterator[FakeSglang]:
    with fake_sglang() as fake:
        yield fake


def test_a_server_with_everything_is_taken_and_left_as_it_is(fake: FakeSglang) -> None:
    assert probe(find_server(fake.url), REQUIREMENTS) == Offer("0.5.23", 160, False, [])
    assert set(fake.calls) == {"/version", "/model_info", "/server_info"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"version": "0.5.22"}, r"SGLang 0\.5\.22 is not supported; supported: 0\.5\.23"),
        ({"dtype": "auto"}, "computes in auto, and `model.dtype` is float32: start it with --dtype float32"),
        ({"max_req_input_len": 63}, "takes prompts of 63 tokens: start it with --context-length 70"),
        ({"incremental_streaming_output": False}, "start it with --incremental-streaming-output"),
        ({"enable_deterministic_inference": False}, "or set `rollout.seeded` to false"),
        ({"speculative_algorithm": "EAGLE"}, "start it without --speculative-algorithm"),
        (
            {"internal_states": [{"effective_max_running_requests_per_dp": 8}]},
            "start it with --max-running-requests 9, or lower `rollout.slots`",
        ),
        ({"internal_states": []}, "tells its settings in another form"),
    ],
)
def test_a_setting_that_does_not_do_is_named(
    settings: dict[str, Any], message: str, fake: FakeSglang
) -> None:
    fake.settings |= settings
    with pytest.raises(ConfigError, match=message):
        probe(SglangServer(fake.url), REQUIREMENTS)


def test_a_run_without_seeds_needs_no_deterministic_server(fake: FakeSglang) -> None:
    fake.settings["enable_deterministic_inference"] = False
    probe(SglangServer(fake.url), REQUIREMENTS._replace(seeded=False))


@pytest.mark.parametrize("path", ["/server_info", "/generate"])
def test_a_server_that_answers_otherwise_is_told(path: str, fake: FakeSglang) -> None:
    fake.foreign = path
    server = SglangServer(fake.url)
    with pytest.raises(WorkerError, match=rf"{fake.url}: {path} does not answer as SGLang does"):
        probe(server, REQUIREMENTS)
        server.logprobs([3, 4])


def test_a_pause_that_was_left_behind_ends_before_the_server_is_asked_for_its_health(
    fake: FakeSglang,
) -> None:
    fake.pause()
    assert wait_for(fake.url, 0.0).program == "SGLang"
    assert not fake.paused


def test_weights_are_loaded_only_after_the_last_step_of_closed_requests(fake: FakeSglang) -> None:
    SglangServer(fake.url).pause()
    assert fake.calls == ["/pause_generation", "/flush_cache"]
    fake.idle = False
    with pytest.raises(WorkerError, match="POST /flush_cache: 400"):
        SglangServer(fake.url).pause()


def test_log_probs_without_the_temperature_are_found(fake: FakeSglang) -> None:
    SglangServer(fake.url).check_logprobs([3, 4])
    fake.processed = False
    fake.number = BROKEN  # an earlier run's weights: nothing can be said
    SglangServer(fake.url).check_logprobs([3, 4])
    fake.number = 4.0
    with pytest.raises(ConfigError, match="Start it without SGLANG_RETURN_ORIGINAL_LOGPROB"):
        SglangServer(fake.url).check_logprobs([3, 4])


def test_the_last_token_of_the_vocabulary_which_sglang_calls_0_has_its_log_prob(fake: FakeSglang) -> None:
    fake.number = 2.0
    assert SglangServer(fake.url).logprobs([3, VOCAB - 1, 4]) == [-2.0, -2.0]


# ---------------------------------------------------------------- requests


def continuation(*, tokens: tuple[int, ...] = (), lease: int = 0, **sampling: Any) -> Continuation:
    work = Work(
        5,
        group_id=5,
        lease=lease,
        prompt=token_array([7, 8]),
        tokens=token_array(tokens),
        sampling=Sampling(max_tokens=20, **sampling),
        seed=7,
    )
    return Continuation(
        work, eos_ids=frozenset({0}), max_sequence_tokens=64, decode=None, vocab=50, engine="it"
    )


def test_a_request_says_what_the_trajectory_needs(fake: FakeSglang) -> None:
    server = SglangServer(fake.url)
    request = server.request(continuation(tokens=(3,), temperature=0.7, stop_token_ids=(9,)), "a label")
    params = request.pop("sampling_params")
    assert request == {"input_ids": [7, 8, 3], "return_logprob": True, "extra_key": "a label", "stream": True}
    seed = params.pop("sampling_seed")
    assert params == {
        "temperature": 0.7, "max_new_tokens": 19, "stop_token_ids": [0, 9], "ignore_eos": False,
    }  # fmt: skip
    assert 0 <= seed < 2**52
    json.dumps(request)


def test_a_trajectory_keeps_its_noise_when_it_moves(fake: FakeSglang) -> None:
    """SGLang adds the token's position."""
    server = SglangServer(fake.url)
    seeds = [
        server.request(it, "l")["sampling_params"]["sampling_seed"]
        for it in (continuation(), continuation(tokens=(3, 4), lease=1))
    ]
    assert seeds[0] == seeds[1]
    unseeded = SglangServer(fake.url, seeded=False)
    assert "sampling_seed" not in unseeded.request(continuation(), "l")["sampling_params"]


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 4}, {"repetition_penalty": 1.2}])
def test_what_sglang_would_tell_wrong_log_probs_of_is_not_asked(
    sampling: dict[str, Any], fake: FakeSglang
) -> None:
    with pytest.raises(ConfigError, match="SGLang's log-probs do not follow min-p, top-k and top-p"):
        SglangServer(fake.url).request(continuation(**sampling), "l")


# ---------------------------------------------------------------- streams


def part(rows: list[Any], length: int, reason: dict[str, Any] | None = None, label: str = "l") -> str:
    meta = {
        "id": "r",
        "finish_reason": reason,
        "weight_version": label,
        "output_token_logprobs": rows,
        "output_token_logprobs_length": length,
    }
    return json.dumps({"text": "", "output_ids": [row[1] for row in rows], "meta_info": meta})


def test_tokens_that_come_again_count_once() -> None:
    """An abort repeats them, and a stream that is not incremental repeats all with each part."""
    read = SglangServer("http://nobody").open_reader()
    one, two, three = ([-0.5, 3, None], [-0.25, 4, None], [-0.125, 5, None])
    assert read(part([one], 1)).tokens == [Token(3, -0.5)]
    assert read(part([one, two], 2)).tokens == [Token(4, -0.25)]
    assert read(part([three], 3)).tokens == [Token(5, -0.125)]
    ended = read(part([one, two, three], 3, {"type": "abort", "message": "Aborted", "status_code": None}))
    assert (ended.tokens, ended.finish_reason, ended.labels) == ([], "abort", ["l"])


def test_a_gap_is_told() -> None:
    read = SglangServer("http://nobody").open_reader()
    with pytest.raises(ValueError, match="leaves out 1 tokens after token 0"):
        read(part([[-0.5, 3, None]], 2))


@pytest.mark.parametrize("logprob", [None, -3.4028234663852886e38])
def test_what_is_no_log_prob_is_none(logprob: float | None) -> None:
    (token,) = SglangServer("http://nobody").open_reader()(part([[logprob, 3, None]], 1)).tokens
    assert math.isnan(token.logprob)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"error": {"message": "too long"}}, "too long"),
        ({"text": ""}, "a part without meta_info"),
    ],
)
def test_an_error_in_a_stream_is_told(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SglangServer("http://nobody").open_reader()(json.dumps(data))


def test_a_refused_request_is_told() -> None:
    refused = {"type": "abort", "message": "Input length exceeds", "status_code": 400, "err_type": None}
    with pytest.raises(ValueError, match="Input length exceeds"):
        SglangServer("http://nobody").open_reader()(part([], 0, refused))


def test_labels_of_parts_and_of_the_end_are_told() -> None:
    read = SglangServer("http://nobody").open_reader()
    chunk = json.loads(part([[-0.5, 3, None]], 1, {"type": "length", "length": 1}, "mine"))
    chunk["meta_info"]["weight_versions"] = [{"version": "another's", "start": 0, "end": 1}]
    assert read(json.dumps(chunk)).labels == ["mine", "another's"]
