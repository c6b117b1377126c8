"""One tensor spoiled on its way from the trainer to what an engine computes with."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from failure_rows import seen
from tests.dishonest import IgnoresTemperature

from millrace.config.freeze import dump
from millrace.config.load import load
from millrace.config.tables.schedules import Synchronous
from millrace.core.completion.columns import TokenColumns
from millrace.core.digest import NamedBuffer
from millrace.core.errors import DigestMismatchError, MillraceError, SamplingError, WeightsError
from millrace.core.types import Batch, Endpoint, Served, TrainGroup, TrainSequence
from millrace.devices.low_rank import BASE
from millrace.devices.served_weights import Merging
from millrace.rollout import replica
from millrace.rollout.engine_kinds import open_engine
from millrace.rollout.protocol import EngineOptions
from millrace.rollout.replica import EngineReplica
from millrace.run import compose
from millrace.run_directory import run_directory
from millrace.trainer.role import TorchTrainer
from millrace.weights.relay import RelayWorker
from millrace_sim import roles
from millrace_sim.explore.worlds import small_config
from millrace_sim.simulation import Scenario, simulate

HONEST_WRITER, HONEST_READER = "millrace.weights.ring:open_writer", "millrace.weights.ring:open_reader"
ON_THE_WAY = {
    "weights-dropped": "write_dropped",
    "weights-duplicated": "write_duplicated",
    "weights-renamed": "write_renamed",
    "weights-swapped": "write_swapped",
    "weights-frozen": "write_frozen",
    "weights-flipped-bit": "write_flipped",
}
ON_ARRIVAL = {
    "pull-frozen": "read_frozen",
    "pull-duplicated": "read_duplicated",
    "pull-swapped": "read_swapped",
    "pull-flipped-bit": "read_flipped",
}


def batch(version: int) -> Batch:
    members = [
        TrainSequence(i, TokenColumns.of([7 + i, 8], [-1.0, -1.0], version), float(i), truncated=False)
        for i in range(2)
    ]
    return Batch(version, [TrainGroup(0, [5, 6], members)])


async def two_versions(
    start: Path,
    run_dir: Path,
    *,
    writer: str = HONEST_WRITER,
    reader: str = HONEST_READER,
    sets: Sequence[str] = (),
    meanwhile: Callable[[Path], object] = lambda model: None,
) -> list[int]:
    """Publish, stage and pull versions 0 and 1; the versions that came to be served. `meanwhile` is called
    with the model's file once the trainer has read it."""
    loaded = load(start, ["model.device=cpu", *sets])
    trainer = TorchTrainer(dump(loaded), str(run_dir), writer)
    options = EngineOptions(
        model_path=loaded.model.path,
        device="cpu",
        slots=4,
        max_sequence_tokens=32,
        prefill_chunk=16,
        adapter_scale=loaded.adapter.scale,
        keep_kv=False,
        probe=True,
    )
    served_by = EngineReplica("replica-0", "own", options, report_interval_s=0.05, open_reader=reader)
    relay = RelayWorker("relay", 3)
    state = await trainer.load(None)
    endpoint = await relay.open(state.slot_bytes)
    served = []
    for version in (0, 1):
        if version:
            await trainer.step(batch(0))
            meanwhile(Path(loaded.model.path) / "model.safetensors")
        await trainer.publish(endpoint)
        published = await trainer.await_published()
        await relay.stage(version, published.digest)
        served.append((await served_by.pull(version, endpoint)).version)
    return served


def test_honest_transport_serves_both_versions(start, tmp_path):
    run = two_versions(start, tmp_path)
    assert asyncio.run(run) == [0, 1]


def test_an_engine_that_ignores_the_temperature_gets_no_trajectory(start, tmp_path, monkeypatch):
    monkeypatch.setattr(replica, "open_engine", lambda *its: IgnoresTemperature(open_engine(*its)))
    with pytest.raises(SamplingError) as raised:
        asyncio.run(two_versions(start, tmp_path))
    seen("engine-dishonest", str(raised.value))


@pytest.mark.parametrize("row", ON_THE_WAY)
def test_what_is_spoiled_on_the_way_can_never_be_pulled(row, start, tmp_path):
    run = two_versions(start, tmp_path, writer=f"weights_saboteurs:{ON_THE_WAY[row]}", reader=HONEST_READER)
    with pytest.raises(DigestMismatchError) as raised:
        asyncio.run(run)
    seen(row, str(raised.value))


@pytest.mark.parametrize("row", ON_ARRIVAL)
def test_what_is_spoiled_on_arrival_is_never_sampled_from(row, start, tmp_path):
    run = two_versions(start, tmp_path, writer=HONEST_WRITER, reader=f"weights_saboteurs:{ON_ARRIVAL[row]}")
    with pytest.raises(DigestMismatchError) as raised:
        asyncio.run(run)
    seen(row, str(raised.value))


def test_an_adapter_is_not_served_over_files_that_are_written_meanwhile(start, tmp_path):
    def rewritten(model: Path) -> None:
        os.utime(model, (1, 1))

    project = shutil.copytree(start.parent, tmp_path / "project")
    run = two_versions(project / start.name, tmp_path, sets=["adapter.rank=4"], meanwhile=rewritten)
    with pytest.raises(WeightsError) as raised:
        asyncio.run(run)
    seen("adapter-base-written", str(raised.value))


def test_an_adapter_is_not_served_over_another_model(start, tmp_path):
    pieces = {"layer.lora_A": [[0.0]], BASE: [1.0] * 32}
    buffers = [
        NamedBuffer(name, "float32", np.shape(v), np.float32(v).view(np.uint8).ravel())
        for name, v in pieces.items()
    ]

    class Reader:
        @contextmanager
        def view(self, version: int) -> Iterator[tuple[str, list[NamedBuffer]]]:
            yield "staged", buffers

    merging = Merging(str(start.parent / "start"), "float32", 1.0)
    with pytest.raises(WeightsError) as raised:
        merging.over(Reader()).read(0, [])
    seen("adapter-other-base", str(raised.value))


@pytest.mark.usefixtures("warm")
def test_a_whole_run_stops_at_the_spoiled_version_and_says_so(start, tmp_path, monkeypatch):
    honest = compose.fleet
    saboteur = f"weights_saboteurs:{ON_THE_WAY['weights-flipped-bit']}"
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def spoiled(*run):
        fleet = honest(*run)
        fleet.trainer.kwargs["open_writer"] = saboteur  # type: ignore[index]
        return fleet

    monkeypatch.setattr(compose, "fleet", spoiled)
    run = run_directory.create("spoiled", tmp_path / "run")
    with pytest.raises(MillraceError) as raised:
        asyncio.run(compose.train(load(start), run, asyncio.Event()))
    seen("weights-flipped-bit", str(raised.value))
    assert str(Path(__file__).parent) in sys.path


def test_a_replica_that_serves_another_version_than_it_says_ends_the_run(monkeypatch):
    class Liar(roles.SimReplica):
        async def pull(self, version: int, endpoint: Endpoint) -> Served:
            served = await super().pull(version, endpoint)
            return msgspec.structs.replace(served, digest=f"sim-{version - 1}") if version == 2 else served

    monkeypatch.setattr(roles, "SimReplica", Liar)
    with pytest.raises(DigestMismatchError) as raised:
        simulate(Scenario(small_config(Synchronous())))
    seen("served-another", str(raised.value))
