"""The engine on a running server keeps its promises, whatever the server does, vLLM or SGLang."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_server import VOCAB, FakeServer
from fake_sglang_server import fake_sglang
from fake_vllm_server import fake_vllm
from test_server_handover import Reader

from millrace.core.completion.columns import token_array
from millrace.core.digest import NamedBuffer
from millrace.core.errors import DigestMismatchError, MillraceError, WeightsError, WorkerError
from millrace.core.types import Finish, Progress, Sampling, Work
from millrace.engines.server import client as streams_module
from millrace.engines.server import server_engine as engine_module
from millrace.engines.server.client import Streams
from millrace.engines.server.connect import wait_for
from millrace.engines.server.server_dialect import Token
from millrace.engines.server.server_engine import Handover, ServerEngine
from millrace.rollout.intake import Intake

STEPS_MAX = 2000


class OneNumber:
    """A proof for the double's model."""

    tokens = (3, 4, 5)

    def expected(self, pieces: list[NamedBuffer]) -> torch.Tensor:
        return -torch.frombuffer(bytearray(pieces[0].data), dtype=torch.float32)

    def distance(self, expected: torch.Tensor, found: list[float]) -> float:
        return float((expected - torch.tensor(found)).abs().max()) * 1e6


def weights(number: float) -> Reader:
    return Reader(
        NamedBuffer("number", "float32", (1,), memoryview(np.array([number], np.float32)).cast("B"))
    )


@pytest.fixture(params=[fake_vllm, fake_sglang], ids=["vllm", "sglang"])
def fake(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    with request.param() as fake:
        yield fake


OpenEngine = Callable[[FakeServer], ServerEngine]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[OpenEngine]:
    engines = []

    def open_engine(fake: FakeServer) -> ServerEngine:
        server = wait_for(fake.url, 0.0)
        engines.append(
            ServerEngine(
                server,
                Streams(server),
                Handover(tmp_path / "weights", with_head=False),
                Intake(vocab=VOCAB, max_sequence_tokens=64, eos_ids={0}, decode=None),
                OneNumber(),  # type: ignore[arg-type]
                slots=3,
                kv_capacity_tokens=160,
                computes="a number",
            )
        )
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(fake: FakeServer, opened: OpenEngine) -> ServerEngine:
    return opened(fake)


def serve(engine: ServerEngine, version: int) -> None:
    """Version n is the number n."""
    engine.stage(version, weights(float(version)))
    engine.swap(version)


def work(trajectory_id: int, length: int = 5, *, tokens: tuple[int, ...] = (), **fields: Any) -> Work:
    return Work(
        trajectory_id,
        group_id=trajectory_id,
        lease=fields.pop("lease", 0),
        prompt=token_array([7] * length),
        tokens=token_array(tokens),
        sampling=Sampling(**({"max_tokens": 20} | fields)),
        seed=7,
    )


def until(engine: ServerEngine, true: Callable[[list[Progress]], bool]) -> list[Progress]:
    parts: list[Progress] = []
    for _ in range(STEPS_MAX):
        engine.step()
        parts += engine.take_progress()
        if true(parts):
            return parts
    raise AssertionError(f"not after {STEPS_MAX} steps: {parts}")


def count(parts: list[Progress]) -> int:
    return sum(len(part.columns) for part in parts)


def test_tokens_ends_and_log_probs_are_the_servers(engine: ServerEngine) -> None:
    serve(engine, 1)
    engine.submit([work(1, 5), work(2, 45)])
    parts = until(engine, lambda parts: sum(part.finish is not None for part in parts) == 2)
    tokens = {
        i: [t for part in parts if part.trajectory_id == i for t in part.columns.tokens] for i in (1, 2)
    }
    assert tokens == {1: list(range(5, 25)), 2: [45, 46, 47, 48, 49, 0]}
    ends = {part.trajectory_id: part.finish for part in parts if part.finish is not None}
    assert ends == {1: Finish.LENGTH, 2: Finish.STOP}
    assert {lp for part in parts for lp in part.columns.logprobs} == {-1.0}
    assert not engine.has_work


def test_at_most_the_slots_are_the_servers(engine: ServerEngine, fake: FakeServer) -> None:
    fake.tokens_max = 1
    serve(engine, 1)
    engine.submit(work(i) for i in range(5))
    until(engine, lambda parts: count(parts) == 3)
    load = engine.load()
    assert (load.running, load.waiting) == (3, 2)
    assert (load.kv_used_tokens, load.kv_capacity_tokens) == (18, 160)


def test_a_load_in_mid_generation_divides_versions_exactly(engine: ServerEngine, fake: FakeServer) -> None:
    """The log-prob says with which weights a token was really sampled."""
    parts: list[Progress] = []
    fake.tokens_max = 4
    serve(engine, 1)
    engine.submit([work(1), work(2)])
    parts += until(engine, lambda parts: count(parts) == 8)
    for version in (2, 3):
        serve(engine, version)
        parts += until(engine, lambda parts: count(parts) == 8)
    fake.set(tokens_max=99)
    parts += until(engine, lambda parts: sum(part.finish is not None for part in parts) == 2)
    for i in (1, 2):
        mine = [part.columns for part in parts if part.trajectory_id == i]
        assert [t for columns in mine for t in columns.tokens] == list(range(5, 25))
        versions = [version for columns in mine for version in columns.versions()]
        assert versions == [1] * 4 + [2] * 4 + [3] * 12
        assert [-lp for columns in mine for lp in columns.logprobs] == versions


def test_a_request_on_its_way_when_the_server_pauses_goes_on_under_the_next_version(
    engine: ServerEngine, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "ABORT_S", 0.05)
    serve(engine, 1)
    fake.set(paused=True)
    engine.submit([work(1)])
    engine.step()
    serve(engine, 2)
    parts = until(engine, lambda parts: any(part.finish for part in parts))
    assert {version for part in parts for version in part.columns.versions()} == {2}
    assert count(parts) == 20


def test_what_has_arrived_of_a_released_one_counts_and_the_server_is_left(
    engine: ServerEngine, fake: FakeServer
) -> None:
    fake.tokens_max = 3
    serve(engine, 1)
    engine.submit([work(1)])
    until(engine, lambda parts: count(parts) == 3)
    (part,) = engine.release([1])
    assert part.columns.tokens.tolist() == [5, 6, 7] and part.finish is None
    assert engine.release([1]) == [] and not engine.has_work
    fake.set(tokens_max=99)
    fake.until(lambda: fake.left == 1)
    assert engine.take_progress() == []


def test_what_ended_before_the_release_is_given_back_with_its_end(engine: ServerEngine) -> None:
    serve(engine, 1)
    engine.submit([work(1, max_tokens=1)])
    engine._hand_over()
    engine._streams.end([0], after_s=10.0)  # the request ends by itself
    (part,) = engine.release([1])
    assert part.finish is Finish.LENGTH and engine.take_progress() == []


def test_a_trajectory_goes_on_from_its_partial_tokens(engine: ServerEngine) -> None:
    serve(engine, 1)
    engine.submit([work(1, tokens=(5, 6, 7), lease=3)])
    parts = until(engine, lambda parts: any(part.finish for part in parts))
    assert parts[0].start == 3 and [t for part in parts for t in part.columns.tokens] == list(range(8, 25))


# ---------------------------------------------------------------- what the server does wrong


def failing(engine: ServerEngine, fake: FakeServer, then: str) -> None:
    """A request that gets two tokens, and then that."""
    fake.set(tokens_max=2, then=then)
    serve(engine, 1)
    engine.submit([work(8)])
    until(engine, lambda parts: False)


@pytest.mark.parametrize(
    ("then", "message"),
    [
        ("cut", "trajectory 8: RemoteProtocolError"),
        ("end", "trajectory 8: ValueError: its stream ended, and the request had not"),
        ("error", "trajectory 8: ValueError: .*the engine is dead"),
        ("abort", r"ended trajectory 8 \(abort\), which should have gone on"),
    ],
)
def test_a_stream_that_breaks_off_ends_the_replica_in_words(
    then: str, message: str, engine: ServerEngine, fake: FakeServer
) -> None:
    with pytest.raises(WorkerError, match=rf"server {fake.url}.*{message}"):
        failing(engine, fake, then)


def test_a_newer_lease_gets_no_token_of_the_older_one(engine: ServerEngine, fake: FakeServer) -> None:
    serve(engine, 1)
    engine.submit([work(1)])
    until(engine, lambda parts: count(parts) >= 1)
    engine.submit([work(1, tokens=(9, 9, 9), lease=1)])
    parts = until(engine, lambda parts: any(part.finish for part in parts))
    tokens = [token for part in parts for token in part.columns.tokens]
    assert {part.lease for part in parts} == {1} and tokens == list(range(8, 25))


def test_a_stream_that_breaks_after_its_end_is_no_failure(
    engine: ServerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(engine, 1)
    engine.submit([work(1, max_tokens=3)])
    until(engine, lambda parts: any(part.finish for part in parts))
    monkeypatch.setattr(
        engine._streams, "take", lambda *_, **__: [streams_module.StreamedTokens(0, error="cut")]
    )
    engine.submit([work(2)])
    engine._take_in(engine._streams.take())


def test_a_request_that_is_refused_ends_the_replica_in_words(engine: ServerEngine, fake: FakeServer) -> None:
    serve(engine, 1)
    fake.fails[fake.generate] = 400
    engine.submit([work(8)])
    with pytest.raises(WorkerError, match=r"trajectory 8: ValueError: 400"):
        until(engine, lambda parts: False)


def test_a_token_that_does_not_come_in_time_ends_the_replica(
    engine: ServerEngine, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams_module, "TOKEN_S", 0.1)
    with pytest.raises(WorkerError, match="trajectory 8: ReadTimeout"):
        failing(engine, fake, "hang")


def test_a_silent_server_is_asked_whether_it_lives(
    engine: ServerEngine, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "QUIET_S", 0.0)
    monkeypatch.setattr(engine_module, "STEP_S", 0.01)
    fake.fails["/health"] = 503
    with pytest.raises(WorkerError, match="GET /health: 503"):
        failing(engine, fake, "hang")


def test_a_log_prob_that_is_not_finite_is_broken_weights(engine: ServerEngine, fake: FakeServer) -> None:
    serve(engine, 1)
    fake.number = 9999.0
    engine.submit([work(8)])
    with pytest.raises(WeightsError, match=r"version 1 gives log-probs that are not finite for .*\[8\]"):
        until(engine, lambda parts: False)


def test_weights_that_give_no_numbers_are_served_until_a_token_tells(
    engine: ServerEngine, fake: FakeServer
) -> None:
    """The server cannot even answer the proof."""
    fake.fails[fake.generate] = 400
    engine.stage(1, weights(float("nan")))
    engine.swap(1)
    assert engine.version == 1


# ---------------------------------------------------------------- weights


def test_weights_that_are_not_computed_with_are_found_before_a_token_is_sampled(
    engine: ServerEngine, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(engine, 1)
    engine.submit([work(1)])
    engine.stage(2, weights(2.0))
    monkeypatch.setattr(engine._server, "load", lambda directory, label: fake.set(label=label))
    with pytest.raises(DigestMismatchError, match=r"was given version 2 .* and computes another"):
        engine.swap(2)
    assert engine.version == -1 and not engine.has_work
    assert 2 not in {v for part in engine.take_progress() for v in part.columns.versions()}


def test_weights_that_change_while_they_are_served_are_found(engine: ServerEngine, fake: FakeServer) -> None:
    serve(engine, 1)
    digest = engine.digest()
    assert digest == engine.stage(2, weights(1.0))[1]
    fake.number = 1.5
    with pytest.raises(DigestMismatchError, match="was given version 1"):
        engine.digest()


def test_tokens_of_other_weights_are_found_by_their_label(engine: ServerEngine, fake: FakeServer) -> None:
    serve(engine, 1)
    fake.label = "another run's"
    engine.submit([work(1, max_tokens=3)])
    with pytest.raises(DigestMismatchError, match=r"another run's.*somebody else loads weights into it"):
        until(engine, lambda parts: False)


@pytest.mark.parametrize("call", range(4))
def test_a_load_that_the_server_refuses_serves_no_half(
    call: int, engine: ServerEngine, fake: FakeServer
) -> None:
    serve(engine, 1)
    path = fake.loading[call]
    fake.fails[path] = 500
    with pytest.raises(WorkerError, match=f"POST {path}: 500"):
        serve(engine, 2)
    assert engine.version == (1 if call < fake.pausing else -1)


def test_a_new_incarnation_ends_what_the_earlier_one_left(fake: FakeServer, opened: OpenEngine) -> None:
    old = opened(fake)
    fake.tokens_max = 2
    serve(old, 1)
    old.submit([work(1)])
    until(old, lambda parts: count(parts) == 2)
    fake.set(paused=True)  # it died in the middle of a load
    new = opened(fake)
    assert not fake.paused
    with pytest.raises(MillraceError, match="should have gone on"):
        until(old, lambda parts: False)
    serve(new, 1)
    fake.set(tokens_max=99)
    new.submit([work(1, lease=1)])
    assert count(until(new, lambda parts: any(part.finish for part in parts))) == 20


@pytest.mark.parametrize(
    ("token", "logprob"), [(VOCAB, -1.0), (-1, -1.0), (2**70, -1.0), (3, 0.5), (3, math.inf)]
)
def test_a_token_that_nobody_can_have_sampled_ends_the_replica_and_is_recorded_nowhere(
    token: int, logprob: float, engine: ServerEngine, fake: FakeServer
) -> None:
    fake.set(tokens_max=3, then="hang")
    serve(engine, 1)
    engine.submit([work(8)])
    until(engine, lambda parts: bool(parts))
    (key,) = engine._running
    with pytest.raises(WorkerError, match=f"gives token {token} with log-prob {logprob} to trajectory 8"):
        engine._append(key, Token(token, logprob))
    assert token not in engine.release([8])[0].columns.tokens.tolist()[-1:]


def test_a_log_prob_that_was_rounded_beyond_zero_is_zero(engine: ServerEngine, fake: FakeServer) -> None:
    fake.set(tokens_max=3, then="hang")
    serve(engine, 1)
    engine.submit([work(8)])
    until(engine, lambda parts: bool(parts))
    (key,) = engine._running
    engine._append(key, Token(3, 1e-7))
    assert engine._running[key].sampled().columns.logprobs[-1] == 0.0
