"""What a curation cannot write is refused before anything is paid for; all else is written as JSON."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import uuid
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from millrace.config.load import validate
from millrace.config.schema import Config
from millrace.conversations.tokenizer import make_character_tokenizer
from millrace.core.errors import DataError
from millrace.tasks.rows import open_rows
from millrace_curation import curate as module
from millrace_curation.candidate import CandidateRow, Dropped, Reason, as_json
from millrace_curation.curate import Curation, CurationOptions, curate
from millrace_curation.output import write_rows

STRUCT = pyarrow.struct([("path", pyarrow.string()), ("bytes", pyarrow.binary())])
REFUSED = {
    "binary": pyarrow.array([None, b"png"], pyarrow.binary()),
    "large_binary": pyarrow.array([b"", None], pyarrow.large_binary()),
    "fixed": pyarrow.array([b"ab", b"cd"], pyarrow.binary(2)),
    "list_of_binary": pyarrow.array([[], [b"a"]], pyarrow.list_(pyarrow.binary())),
    "image": pyarrow.array([None, {"path": "a", "bytes": b"png"}], STRUCT),
    "infinite": pyarrow.array([1.0, math.inf], pyarrow.float64()),
    "deep_infinite": pyarrow.array([[1.0], [-math.inf]], pyarrow.list_(pyarrow.float32())),
}
TIME = datetime.datetime(2026, 1, 2, 3, 4, 5)
WRITTEN = {
    "date": (pyarrow.array([TIME.date()] * 2), "2026-01-02"),
    "time": (pyarrow.array([TIME.time()] * 2), "03:04:05"),
    "timestamp": (pyarrow.array([TIME] * 2), "2026-01-02T03:04:05"),
    "duration": (pyarrow.array([datetime.timedelta(minutes=1, milliseconds=500)] * 2), 60.5),
    "decimal": (pyarrow.array([decimal.Decimal("1.50")] * 2), "1.50"),
    "nan": (pyarrow.array([math.nan] * 2), None),
    "half": (pyarrow.array(np.array([0.5] * 2, np.float16)), 0.5),
    "map": (pyarrow.array([[("a", 1)]] * 2, pyarrow.map_(pyarrow.string(), pyarrow.int64())), [["a", 1]]),
    "nested": (pyarrow.array([[{"a": [TIME.date()]}]] * 2), [{"a": ["2026-01-02"]}]),
    "dictionary": (pyarrow.array(["x"] * 2).dictionary_encode(), "x"),
    "large": (pyarrow.array([2**62] * 2), 2**62),
    "null": (pyarrow.nulls(2), None),
}


def config_of(tmp_path: Path, **columns: pyarrow.Array) -> Config:
    table = {"prompt": ["one", "two"], "answer": ["1", "2"], **columns}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "rows.parquet")
    make_character_tokenizer(tmp_path / "model", "abcdefghijklmnopqrstuvwxyz12")
    tree = {
        "steps": 1,
        "model": {"path": str(tmp_path / "model")},
        "task": {"kind": "file", "path": str(tmp_path / "rows.parquet")},
        "reward": {"kind": "exact"},
        "sampling": {"max_tokens": 8},
        "rollout": {"max_sequence_tokens": 64},
    }
    return validate(Config, tree, {})


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("options", [CurationOptions(samples=2), CurationOptions(gold=True)])
def test_what_json_lacks_is_refused_before_anything_is_scored_or_sampled(
    name: str, options: CurationOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for paid in ("sample_rates", "try_golds", "attempt_ledger"):
        monkeypatch.setattr(module, paid, lambda *_, **__: pytest.fail("it was paid for"))
    config = config_of(tmp_path, **{name: REFUSED[name]})
    with pytest.raises(DataError, match=rf"rows.parquet:[01]: column '{name}' cannot be kept as JSON"):
        curate(config, options, tmp_path / "attempts.sqlite")


def test_all_else_is_written_and_read_again(tmp_path: Path) -> None:
    config = config_of(tmp_path, **{name: column for name, (column, _) in WRITTEN.items()})
    curation = curate(config, CurationOptions(gold=False), tmp_path / "attempts.sqlite")
    write_rows(curation, tmp_path)
    text = (tmp_path / "kept.jsonl").read_text()
    json.loads(text.splitlines()[0], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    expected = {name: value for name, (_, value) in WRITTEN.items()}
    assert open_rows(str(tmp_path / "kept.jsonl"))[0] == {"prompt": "one", "answer": "1", **expected}


def test_a_dropped_row_may_have_anything(tmp_path: Path) -> None:
    rows = [CandidateRow(n, f"rows:{n}", {"prompt": "p", "image": one}) for n, one in enumerate(["x", b"y"])]
    write_rows(Curation(rows, {1: Dropped(Reason.DUPLICATE)}), tmp_path)
    table = open_rows(str(tmp_path / "rows.parquet"))
    assert json.loads(table[1]["columns"]) == {"prompt": "p", "image": "(it has a bytes)"}


@pytest.mark.parametrize("value", [b"", {1, 2}, {1: 2}, object(), 1j, math.inf, [{"a": (b"",)}], range(3)])
def test_a_value_of_python_that_json_lacks_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="it has a"):
        as_json(value)


def test_values_of_python_become_those_of_json() -> None:
    one = uuid.UUID(int=1)
    value = {"a": (1, np.int64(2), np.float32(0.5)), "b": np.arange(2), "c": one, "d": np.nan, "e": True}
    assert as_json(value) == {"a": [1, 2, 0.5], "b": [0, 1], "c": str(one), "d": None, "e": True}
    whole = [value]
    whole.append(whole)
    with pytest.raises(RecursionError):
        as_json(whole)
