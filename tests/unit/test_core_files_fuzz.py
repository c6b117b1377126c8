"""Whatever is read from disk may be damaged: it is read as it is, or refused in words. Never a raw exception.

Where the file carries a digest, what is accepted is what was written.
"""

from __future__ import annotations

import json
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from damage import damaged_bytes, damaged_tree, fuzzed
from hypothesis import given
from hypothesis import strategies as st
from observe_events import report, run_started, step
from safetensors.numpy import save
from tests.runs import CONFIG

from millrace.api.callbacks import lines
from millrace.api.run import Run
from millrace.config import carried
from millrace.config.load import load
from millrace.config.schema import Config
from millrace.core.errors import MillraceError
from millrace.core.events import Event
from millrace.diagnose.evidence import Evidence
from millrace.diagnose.rules import diagnose
from millrace.observe.sinks.jsonl import EventLog, replay_events
from millrace.observe.summary import Summary
from millrace.placement.memory.model_shape import kv_token_bytes
from millrace.placement.model_directory import read_model_config, tensor_elements
from millrace.run_directory.run_directory import RunDirectory
from millrace.tasks.rows import open_rows


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged")


def config_of(place: Path) -> Config:
    (place / "whole.toml").write_text(CONFIG)
    return load(place / "whole.toml")


@fuzzed
@given(damaged_bytes(CONFIG.encode()))
def test_a_configuration_file_is_read_or_refused(place, data):
    file = place / "run.toml"
    file.write_bytes(data)
    try:
        assert isinstance(load(file), Config)
    except MillraceError as error:
        assert str(error)


@fuzzed
@given(st.data())
def test_the_configuration_of_a_run_is_read_or_refused(place, data):
    run = RunDirectory(place)
    run.config.unlink(missing_ok=True)
    run.write_config(config_of(place))
    whole = run.config.read_bytes()
    if data.draw(st.booleans()):
        run.config.write_bytes(data.draw(damaged_bytes(whole)))
    else:
        run.config.write_text(json.dumps(data.draw(damaged_tree(json.loads(whole)))), errors="replace")
    try:
        assert isinstance(run.read_config(), Config)
    except MillraceError as error:
        assert str(run.config) in str(error)


TOLD = [
    run_started(),
    Event("worker_started", 0.1, 1000.1, {"role": "trainer", "name": "trainer", "epoch": 1, "pid": 7}),
    report(0.5, "replica-0", 10, 0.2, 0.1),
    Event("published", 0.6, 1000.6, {"version": 1, "digest": "ab", "stall_s": 0.1}),
    Event("pulled", 0.7, 1000.7, {"replica": "replica-0", "version": 1, "digest": "ab"}),
    Event("scored", 0.8, 1000.8, {"trajectory_id": 1, "outcome": "failed", "reason": "odd"}),
    step(1.0, 1),
    step(2.0, 2),
    Event("worker_died", 2.1, 1002.1, {"role": "relay", "name": "relay", "epoch": 1, "cause": "killed"}),
    Event("worker_recovered", 2.2, 1002.2, {"name": "relay", "recovery_s": 0.1}),
    Event("restarted", 2.3, 1002.3, {"trajectory_id": 1, "discarded_tokens": 3}),
    Event("rewound", 2.4, 1002.4, {"version": 1, "trajectories": 3}),
    Event("run_ended", 3.0, 1003.0, {"ok": True, "reason": "done"}),
]


def write_events(file: Path) -> bytes:
    file.unlink(missing_ok=True)
    log = EventLog(file)
    for event in TOLD:
        log(event)
    log.close()
    return file.read_bytes()


@fuzzed
@given(st.data())
def test_events_are_read_or_refused(place, data):
    file = place / "events.jsonl"
    whole = write_events(file)
    if data.draw(st.booleans()):
        file.write_bytes(data.draw(damaged_bytes(whole)))
    else:
        lines = [json.loads(line) for line in whole.splitlines()]
        file.write_text("".join(json.dumps(line) + "\n" for line in data.draw(damaged_tree(lines))))
    summary, evidence = Summary(), Evidence()
    for sink, conclude in ((summary, summary.result), (evidence, partial(diagnose, evidence))):
        try:
            replay_events(file, sink, conclude)
        except MillraceError as error:
            assert str(file) in str(error)


ROWS = [{"prompt": f"count to {n}", "answer": str(n), "more": {"a": [n, None]}} for n in range(6)]
ROW_FILES = {
    ".jsonl": "\n".join(json.dumps(row) for row in ROWS).encode(),
    ".json": json.dumps(ROWS).encode(),
    ".csv": b"prompt,answer\n" + b"".join(b'"count, to",%d\n' % n for n in range(6)),
}


@pytest.mark.parametrize("suffix", [*ROW_FILES, ".parquet"])
@fuzzed
@given(data=st.data())
def test_rows_are_read_or_refused(suffix, place, data):
    file = place / f"rows{suffix}"
    whole = ROW_FILES.get(suffix) or parquet(place)
    file.write_bytes(data.draw(damaged_bytes(whole)))
    try:
        rows = open_rows(str(file))
    except MillraceError as error:
        assert str(file) in str(error)
        return
    for index in range(min(len(rows), 20)):
        try:
            assert isinstance(rows[index], dict)
        except MillraceError as error:
            assert str(file) in str(error)


def parquet(place: Path) -> bytes:
    import pyarrow
    import pyarrow.parquet

    file = place / "whole.parquet"
    if not file.exists():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    return file.read_bytes()


@fuzzed
@given(st.data())
def test_what_a_run_told_is_read_or_refused(place, data):
    run = RunDirectory(place / "told")
    run.path.mkdir(exist_ok=True)
    run.write_config(config_of(place))
    run.summary.write_bytes(data.draw(damaged_bytes(b'{"reward_mean": 0.5, "accounting": {"trained": 4}}')))
    run.metrics.write_bytes(data.draw(damaged_bytes(b'{"version": 1, "loss": 0.5}\n' * 3)))
    for read in (lambda: Run(run.path).summary(), lambda: list(lines(run.metrics, lambda: True))):
        try:
            read()
        except MillraceError as error:
            assert str(run.path) in str(error)


@fuzzed
@given(st.data())
def test_what_a_model_needs_is_read_or_refused(place, data):
    model = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    changed = json.dumps(data.draw(damaged_tree(model))).encode()
    damaged = damaged_bytes(json.dumps(model).encode())
    whole = save({"a": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.float32)})
    (place / "config.json").write_bytes(data.draw(st.just(changed) | damaged))
    (place / "model.safetensors").write_bytes(data.draw(st.just(whole) | damaged_bytes(whole)))
    for read in (
        lambda: kv_token_bytes(read_model_config(place), 4),
        lambda: sum(tensor_elements(place).values()),
    ):
        try:
            assert read() >= 0
        except MillraceError as error:
            assert str(error)


@pytest.fixture(scope="module")
def packed():
    """Made once: it holds `sys.path`, which grows where an unchanged object is read."""
    return carried.pack(pickle.dumps({"a": 1}))


@fuzzed
@given(data=st.data())
def test_a_carried_object_that_changed_is_not_unpickled(place, packed, data):
    whole = packed
    name = carried.name_of("reward", carried.PICKLE, whole)
    carried.store(place, {name: whole})
    changed = data.draw(damaged_bytes(whole))
    (place / name).write_bytes(changed)
    try:
        carried.load_carried("reward.path", str(place / name))
    except MillraceError as error:
        assert name in str(error)
    else:
        assert changed == whole
