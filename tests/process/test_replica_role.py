"""The replica as a role: commands between steps, the report stream, pulls while decoding."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from halting_replica import hold
from millrace.core.errors import ConfigError, DigestMismatchError, UnknownVersionError, WeightsError
from millrace.core.types import Endpoint, Finish, Progress, Report, Sampling, Work
from millrace.engines.own import parameters
from millrace.rollout.protocol import EngineOptions
from millrace.rollout.replica import EngineReplica

DEADLINE_S, NEVER_S = 120.0, 1200.0


def model_of(seed: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config)


def make_replica(model_path: str, *, probe: bool = False, **options: Any) -> EngineReplica:
    engine_options = EngineOptions(
        model_path=model_path,
        device="cpu",
        slots=8,
        max_sequence_tokens=320,
        prefill_chunk=64,
        keep_kv=False,
        probe=probe,
    )
    defaults = {"report_interval_s": 0.02, "open_reader": "replica_reader:FileReader"}
    return EngineReplica("replica-0", "own", engine_options, **(defaults | options))


def work(trajectory_id: int, max_tokens: int, **fields: Any) -> Work:
    defaults: dict[str, Any] = {"group_id": 0, "lease": 0, "prompt": [5, 6, 7], "tokens": [], "seed": 3}
    return Work(trajectory_id, sampling=Sampling(max_tokens=max_tokens), **(defaults | fields))


async def until_finished(reports: AsyncIterator[Report], ids: set[int]) -> list[Progress]:
    """All progress until each of `ids` has finished."""
    progress: list[Progress] = []
    async with asyncio.timeout(DEADLINE_S):
        while ids - {p.trajectory_id for p in progress if p.finish is not None}:
            progress += (await anext(reports)).progress
    return progress


async def until_sampled(reports: AsyncIterator[Report], tokens: int) -> list[Progress]:
    progress: list[Progress] = []
    async with asyncio.timeout(DEADLINE_S):
        while sum(len(p.columns) for p in progress) < tokens:
            progress += (await anext(reports)).progress
    return progress


def tokens_of(progress: list[Progress], trajectory_id: int) -> list[int]:
    return [token for p in progress if p.trajectory_id == trajectory_id for token in p.columns.tokens]


def test_submitted_work_is_streamed_to_its_end(model_path: str, endpoint: Endpoint) -> None:
    async def scenario() -> list[Progress]:
        replica = make_replica(model_path)
        served = await replica.pull(0, endpoint)
        assert served.version == 0 and served.digest == (await replica.pull(0, endpoint)).digest
        await replica.submit([work(i, 20 + i) for i in range(12)])
        return await until_finished(replica.reports(), set(range(12)))

    progress = asyncio.run(scenario())
    assert [len(tokens_of(progress, i)) for i in range(12)] == [20 + i for i in range(12)]
    assert {p.finish for p in progress if p.finish} == {Finish.LENGTH}


def test_work_waits_for_the_first_version(model_path: str, endpoint: Endpoint) -> None:
    async def scenario() -> None:
        replica = make_replica(model_path)
        reports = replica.reports()
        await replica.submit([work(0, 5)])
        report = await anext(reports)
        assert (report.progress, report.load.version, report.load.waiting) == ([], -1, 1)
        await replica.pull(1, endpoint)
        progress = await until_finished(reports, {0})
        assert {version for p in progress for version in p.columns.versions()} == {1}

    asyncio.run(scenario())


def test_an_idle_replica_reports_its_load(model_path: str, endpoint: Endpoint) -> None:
    async def scenario() -> Report:
        replica = make_replica(model_path)
        await replica.pull(0, endpoint)
        return await asyncio.wait_for(anext(replica.reports()), DEADLINE_S)

    report = asyncio.run(scenario())
    assert report.progress == [] and report.load.version == 0
    assert report.load.kv_capacity_tokens == 8 * 320
    assert report.load.idle_s > 0


def test_a_replica_that_is_to_leave_says_so_before_its_next_report_is_due(
    model_path: str, endpoint: Endpoint
) -> None:
    async def scenario() -> Report:
        replica = make_replica(model_path, report_interval_s=NEVER_S)
        await replica.pull(0, endpoint)
        hold(replica)
        await replica.submit([work(0, 250)])
        reports = replica.reports()
        while not (await asyncio.wait_for(anext(reports), DEADLINE_S)).progress:
            pass
        replica.notice()
        return await asyncio.wait_for(anext(reports), DEADLINE_S)

    assert asyncio.run(scenario()).leaving


def test_an_idle_replica_with_a_long_interval_sends_no_more_reports_than_a_busy_one(
    model_path: str, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.rollout.replica._HEARTBEAT_S", 0.02)

    async def scenario() -> None:
        replica = make_replica(model_path, report_interval_s=NEVER_S)
        await replica.pull(0, endpoint)
        reports = replica.reports()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(reports), 0.3)

    asyncio.run(scenario())


@pytest.mark.parametrize("early_interval_s", [0.0, NEVER_S])
def test_what_has_ended_is_gathered_while_no_slot_is_empty(
    early_interval_s: float, model_path: str, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.rollout.replica._SLICE_S", 0.0)  # one step each, on any machine

    async def scenario() -> tuple[Report, Report]:
        replica = make_replica(model_path, report_interval_s=NEVER_S, early_interval_s=early_interval_s)
        await replica.pull(0, endpoint)
        await replica.submit([work(i, 5 + 10 * i) for i in range(24)])
        reports = replica.reports()
        async with asyncio.timeout(DEADLINE_S):
            return await anext(reports), await anext(reports)

    due, early = asyncio.run(scenario())
    assert due.load.waiting > 0 and early.progress and all(one.finish for one in early.progress)
    assert (early.load.waiting == 0) == bool(early_interval_s)


def test_an_idle_replica_that_rechecks_its_weights_goes_on_reporting(
    model_path: str, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def soon(replica: EngineReplica, took_s: float) -> None:
        replica._recheck_due_s = time.monotonic() + 0.05

    monkeypatch.setattr(EngineReplica, "_recheck_after", soon)

    async def scenario() -> None:
        replica = make_replica(model_path, report_interval_s=0.4)
        await replica.pull(0, endpoint)
        reports = replica.reports()
        for _ in range(3):
            await asyncio.wait_for(anext(reports), DEADLINE_S)

    asyncio.run(scenario())


def test_a_probe_is_in_no_account(model_path: str, endpoint: Endpoint) -> None:
    """Neither its tokens nor its decode steps, after which a schedule may bring new weights."""

    async def scenario() -> tuple[Report, Report]:
        replica = make_replica(model_path, probe=True)
        reports = replica.reports()
        await replica.pull(0, endpoint)
        first = await asyncio.wait_for(anext(reports), DEADLINE_S)
        await replica.submit([work(0, 5)])
        while (last := await asyncio.wait_for(anext(reports), DEADLINE_S)).load.generated_tokens < 5:
            pass  # a report may come between two tokens
        return first, last

    first, last = asyncio.run(scenario())
    assert first.progress == []
    load = first.load
    assert (load.generated_tokens, load.prefilled_tokens, load.steps_since_swap) == (0, 0, 0)
    assert (last.load.generated_tokens, last.load.steps_since_swap) == (5, 5)


def test_a_pull_in_mid_flight_keeps_the_trajectories_and_tells_versions_apart(
    model_path: str, endpoint: Endpoint
) -> None:
    async def scenario() -> list[Progress]:
        replica = make_replica(model_path)
        reports = replica.reports()
        await replica.pull(0, endpoint)
        go_on = hold(replica)
        await replica.submit([work(i, 250) for i in range(4)])
        progress = await until_sampled(reports, 8)
        served = await replica.pull(1, endpoint)
        assert served.version == 1
        go_on()
        return progress + await until_finished(reports, {0, 1, 2, 3})

    progress = asyncio.run(scenario())
    for i in range(4):
        mine = [p for p in progress if p.trajectory_id == i]
        assert [p.start for p in mine] == [sum(len(q.columns) for q in mine[:k]) for k in range(len(mine))]
        versions = [version for p in mine for version in p.columns.versions()]
        assert len(versions) == 250 and versions == sorted(versions) and set(versions) == {0, 1}


def test_released_trajectories_go_on_elsewhere_as_if_never_moved(model_path: str, endpoint: Endpoint) -> None:
    async def scenario() -> tuple[list[int], list[int]]:
        whole, source, destination = (make_replica(model_path) for _ in range(3))
        for replica in (whole, source, destination):
            await replica.pull(0, endpoint)
        await whole.submit([work(0, 60)])
        expected = tokens_of(await until_finished(whole.reports(), {0}), 0)
        hold(source)
        await source.submit([work(0, 60)])
        await until_sampled(source.reports(), 5)
        (released,) = await source.release([0])
        assert await source.release([0]) == []
        await destination.submit([work(0, 60, lease=1, tokens=released.columns.tokens)])
        rest = tokens_of(await until_finished(destination.reports(), {0}), 0)
        return expected, released.columns.tokens.tolist() + rest

    expected, moved = asyncio.run(scenario())
    assert moved == expected


def test_decoding_goes_on_while_new_weights_are_digested(
    model_path: str, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = threading.Event()
    honest = parameters.digest_buffers

    def digest_once_decoded(buffers: Any, kind: str, **options: Any) -> str:
        assert decoded.wait(DEADLINE_S), "no token came while the digest was taken"
        return honest(buffers, kind, **options)

    async def scenario() -> None:
        replica = make_replica(model_path)
        await replica.pull(0, endpoint)
        monkeypatch.setattr(parameters, "digest_buffers", digest_once_decoded)
        replica._recheck_due_s = float("inf")  # a look at what is served would wait too, and decode nothing
        await replica.submit([work(0, 300)])
        pull = asyncio.create_task(replica.pull(1, endpoint))
        reports = replica.reports()
        await until_sampled(reports, 20)
        decoded.set()
        served = await asyncio.wait_for(pull, DEADLINE_S)
        assert served.version == 1

    asyncio.run(scenario())


def test_what_has_finished_but_was_not_reported_is_released_with_its_end(
    model_path: str, endpoint: Endpoint
) -> None:
    async def scenario() -> None:
        replica = make_replica(model_path)
        await replica.pull(0, endpoint)
        await replica.submit([work(0, 5)])
        while not replica._engine.has_finished:
            await replica._on(replica._engine_thread, replica._engine.step)
        (part,) = await replica.release([0])
        assert (len(part.columns), part.finish) == (5, Finish.LENGTH)
        assert await replica.release([0]) == []
        assert (await anext(replica.reports())).progress == []

    asyncio.run(scenario())


def test_pulling_the_served_version_again_changes_nothing(model_path: str, endpoint: Endpoint) -> None:
    async def scenario() -> None:
        replica = make_replica(model_path)
        first = await replica.pull(1, endpoint)
        again = await replica.pull(1, endpoint)
        assert (again.version, again.digest, again.pull_s) == (1, first.digest, 0.0)

    asyncio.run(scenario())


def test_a_version_that_is_not_held_leaves_the_served_one(model_path: str, endpoint: Endpoint) -> None:
    async def scenario() -> None:
        replica = make_replica(model_path)
        await replica.pull(1, endpoint)
        with pytest.raises(UnknownVersionError):
            await replica.pull(9, endpoint)
        assert (await anext(replica.reports())).load.version == 1

    asyncio.run(scenario())


def test_weights_that_changed_on_the_way_are_never_served(model_path: str, endpoint: Endpoint) -> None:
    async def scenario() -> None:
        replica = make_replica(model_path)
        await replica.submit([work(0, 5)])
        (Path(endpoint.path) / "corrupt").touch()
        with pytest.raises(DigestMismatchError, match="version 0"):
            await replica.pull(0, endpoint)
        report = await anext(replica.reports())
        assert report.progress == [] and report.load.version == -1

    asyncio.run(scenario())


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_weights_that_change_in_memory_end_the_stream_naming_replica_and_version(
    model_path: str, endpoint: Endpoint, busy: bool
) -> None:
    async def scenario() -> None:
        replica = make_replica(model_path)
        await replica.pull(1, endpoint)
        replica._recheck_due_s = 0.0
        reports = replica.reports()
        await anext(reports)
        await anext(reports)  # looked at, and whole
        list(replica._engine.buffers())[3].data[0] ^= 1
        replica._recheck_due_s = 0.0
        if busy:
            await replica.submit([work(i, 300) for i in range(8)])
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(DigestMismatchError, match="replica-0: version 1 changed in memory"):
                async for _ in reports:
                    pass

    asyncio.run(scenario())


def test_weights_that_are_not_finite_end_the_stream_with_an_error(
    model_path: str, endpoint: Endpoint
) -> None:
    model = model_of(0)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("inf"))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    save_file(weights, Path(endpoint.path) / "v2.safetensors")

    async def scenario() -> None:
        replica = make_replica(model_path)
        await replica.pull(2, endpoint)
        await replica.submit([work(0, 5)])
        with pytest.raises(WeightsError, match="not finite"):
            await until_finished(replica.reports(), {0})

    asyncio.run(scenario())


def test_commands_are_answered_while_it_decodes(model_path: str, endpoint: Endpoint) -> None:
    async def scenario() -> None:
        replica = make_replica(model_path, report_interval_s=0.5)
        reports = replica.reports()
        await replica.pull(0, endpoint)
        go_on = hold(replica)
        await replica.submit([work(i, 300) for i in range(8)])
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            stream = group.create_task(until_finished(reports, set(range(8))))
            for _ in range(5):
                assert await replica.release([]) == []
            assert not stream.done()
            go_on()

    asyncio.run(scenario())


def test_within_the_interval_a_report_has_only_what_finished(model_path: str, endpoint: Endpoint) -> None:
    async def scenario() -> list[Progress]:
        replica = make_replica(model_path, report_interval_s=DEADLINE_S)
        reports = replica.reports()
        await replica.pull(0, endpoint)
        await replica.submit([work(3, 1)])  # without work the first report is a heartbeat, an interval later
        await anext(reports)
        await replica.submit([work(0, 5), work(1, 300), work(2, 20)])
        return await until_finished(reports, {0, 2})

    progress = asyncio.run(scenario())
    assert [(p.trajectory_id, len(p.columns)) for p in progress] == [(0, 5), (2, 20)]


def test_a_closed_stream_loses_nothing(model_path: str, endpoint: Endpoint) -> None:
    async def scenario() -> list[Progress]:
        replica = make_replica(model_path)
        await replica.pull(0, endpoint)
        go_on = hold(replica)
        await replica.submit([work(0, 80)])
        first = replica.reports()
        progress = await until_sampled(first, 3)
        await first.aclose()
        go_on()
        return progress + await until_finished(replica.reports(), {0})

    assert len(tokens_of(asyncio.run(scenario()), 0)) == 80


def test_a_stream_that_is_opened_before_the_last_one_is_closed_shares_its_work(
    model_path: str, endpoint: Endpoint
) -> None:
    async def scenario() -> None:
        replica = make_replica(model_path)
        await replica.pull(0, endpoint)
        await replica.submit([work(i, 200) for i in range(4)])
        parts: list[Progress] = []

        async def take(reports: AsyncIterator[Report]) -> None:
            while sum(part.finish is not None for part in parts) < 4:
                parts.extend((await anext(reports)).progress)

        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(take(replica.reports()))
        assert [len(tokens_of(parts, i)) for i in range(4)] == [200] * 4

    asyncio.run(scenario())


def test_an_unknown_reader_is_a_configuration_error(model_path: str) -> None:
    with pytest.raises(ConfigError, match="no_such_module:reader"):
        make_replica(model_path, open_reader="no_such_module:reader")
