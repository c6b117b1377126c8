"""Rows where data sets lie: files by a pattern, mapped Parquet, and a hub that a double stands in for."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.hub_double import hub

from millrace.config.tables.task import FileTaskSection, HubTaskSection
from millrace.core.errors import DataError
from millrace.tasks import arrow
from millrace.tasks.hub import fetched_file
from millrace.tasks.rows import Joined, open_rows
from millrace.tasks.tasks import make_task

SUMS = [{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(40)]
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), min_size=1, max_size=12)


def all_of(path):
    rows = open_rows(str(path))
    return [dict(rows[index]) for index in range(len(rows))]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)


# ---------------------------------------------------------------- files


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.fixed_dictionaries({"prompt": TEXT, "answer": TEXT, "other": TEXT}), min_size=1, max_size=6)
)
def test_csv_json_lines_and_parquet_give_equal_rows(tmp_path, monkeypatch, rows):
    import csv

    monkeypatch.setattr(arrow, "MAPPED_BYTES", -1)
    (tmp_path / "a.jsonl").write_text(lines(rows))
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    for name in ("a.jsonl", "a.csv", "a.parquet"):
        opened_rows = open_rows(str(tmp_path / name))
        assert [dict(opened_rows[n]) for n in range(len(opened_rows))] == rows, name


def test_a_pattern_and_a_directory_join_their_files_in_the_order_of_names(tmp_path):
    (tmp_path / "train-1.jsonl").write_text(lines(SUMS[2:4]))
    (tmp_path / "train-0.jsonl").write_text("\n" + lines(SUMS[:2]))
    (tmp_path / "test-0.jsonl").write_text(lines(SUMS[9:10]))
    rows = open_rows(str(tmp_path / "train-*.jsonl"))
    assert isinstance(rows, Joined) and [rows[n] for n in range(len(rows))] == SUMS[:4]
    assert [rows.place(n) for n in (0, 3)] == ["train-0.jsonl:2", "train-1.jsonl:2"]
    assert len(open_rows(str(tmp_path))) == 5
    (tmp_path / "more.csv").write_text("question,answer\nq,a\n")
    with pytest.raises(DataError, match=r"several formats \(.csv, .jsonl\)"):
        open_rows(str(tmp_path))
    with pytest.raises(DataError, match="no file fits the pattern"):
        open_rows(str(tmp_path / "dev-*.jsonl"))


def test_rows_of_files_of_one_name_in_several_folders_have_names_of_their_own(tmp_path):
    """An evaluation takes a name that it has seen for the second epoch, and ends there."""
    for level, rows in (("easy", SUMS[:3]), ("hard", SUMS[3:5])):
        (tmp_path / level).mkdir()
        (tmp_path / level / "train.jsonl").write_text(lines(rows))
    for path in (tmp_path, tmp_path / "*" / "train.jsonl", tmp_path / "**" / "**" / "*.jsonl"):
        rows = open_rows(str(path))
        places = [f"easy/train.jsonl:{line}" for line in (1, 2, 3)]
        assert [*map(rows.place, range(len(rows)))] == [*places, "hard/train.jsonl:1", "hard/train.jsonl:2"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.JSONL", lines(SUMS[:3])),
        ("rows.json", lines(SUMS[:3])),
        ("rows.Csv", "question,answer\n0 + 1 =,1\n1 + 1 =,2\n2 + 1 =,3\n"),
        ("sep.csv", "sep=;\r\nquestion;answer\r\n0 + 1 =;1\r\n1 + 1 =;2\r\n2 + 1 =;3\r\n"),
        ("blank.csv", "\n\nquestion,answer\n0 + 1 =,1\n\n1 + 1 =,2\n2 + 1 =,3\n"),
    ],
)
def test_rows_are_read_under_other_names_and_behind_other_first_lines(tmp_path, name, content):
    (tmp_path / name).write_text(content, newline="")
    assert all_of(tmp_path / name) == all_of(tmp_path) == SUMS[:3]


@pytest.mark.parametrize(
    "name", ["rows.pq", "rows.parq", "rows.PARQUET", "rows.feather", "rows.arrow", "stream.arrow"]
)
def test_tables_are_read_under_other_names_and_as_streams(tmp_path, name):
    table = pyarrow.Table.from_pylist(SUMS)
    with open(tmp_path / name, "wb") as file:
        if name.lower().endswith(("pq", "parq", "parquet")):
            pyarrow.parquet.write_table(table, file)
        else:
            made = pyarrow.ipc.new_stream if name.startswith("stream") else pyarrow.ipc.new_file
            with made(file, table.schema) as writer:
                for batch in table.to_batches(max_chunksize=7):
                    writer.write_batch(batch)
    assert all_of(tmp_path / name) == all_of(tmp_path) == SUMS


PACKED = gzip.compress(b"{}", mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("b.jsonl.gz", PACKED, "packed with gzip"),
        ("b.jsonl", PACKED, "packed with gzip"),
        ("b.csv.xz", lzma.compress(b"a"), "packed with xz"),
        ("b.json.bz2", bz2.compress(b"a"), "packed with bzip2"),
        ("b.jsonl.zst", pyarrow.compress(b"{}", "zstd", asbytes=True), "packed with zstd"),
        ("b.csv", b"PK\x03\x04", "archive"),
        ("b.parquet", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("b.jsonl", b"<!DOCTYPE html>", "HTML"),
        ("b.csv", b"a,b,a\n1,2,3\n", "two columns 'a'"),
        ("b.csv", b'a,b\n"1,2\n3,4\n5,6\n', "ends in line 4, has quotes that are not closed"),
    ],
)
def test_a_file_whose_rows_would_be_lost_is_refused(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        open_rows(str(tmp_path / name))
    with pytest.raises(DataError, match=words):
        open_rows(str(tmp_path))


def test_a_packed_file_in_a_directory_is_not_passed_over(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(SUMS))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(SUMS).encode()))
    (tmp_path / "dataset_infos.json").write_text("{}")
    with pytest.raises(DataError, match=r"several formats \(.gz, .jsonl\)"):
        open_rows(str(tmp_path))
    (tmp_path / "b.jsonl.gz").unlink()
    assert len(open_rows(str(tmp_path))) == 40


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (("a.csv", "b.csv", "config.json"), "*.csv"),
        (("a.csv", "config.json"), "*.csv"),
        (("a.CSV", "tokenizer.json"), "*.CSV"),
        (("a.json", "b.json", "notes.tsv"), "*.json"),
    ],
)
def test_a_directory_of_several_formats_is_advised_a_pattern_of_its_rows(tmp_path, names, pattern):
    for name in names:
        (tmp_path / name).write_text("a,b\n1,2\n")
    advice = re.escape(f"`task.path` = {str(tmp_path / '**' / pattern)!r}")
    with pytest.raises(DataError, match=f"name those with rows by a pattern, {advice}"):
        open_rows(str(tmp_path))


def test_a_cell_may_be_long(tmp_path):
    (tmp_path / "long.csv").write_text(f'prompt,answer\n"{"x" * 200_000}",1\n')
    assert len(open_rows(str(tmp_path / "long.csv"))[0]["prompt"]) == 200_000


def test_a_name_of_a_hub_as_a_path_is_told_the_kind(tmp_path):
    with pytest.raises(DataError, match=r'kind = "hub", name = "openai/gsm8k"'):
        open_rows(str(tmp_path / "openai" / "gsm8k"))


def test_mapped_parquet_is_written_once_and_anew_when_the_file_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow, "MAPPED_BYTES", -1)
    file = tmp_path / "a.parquet"
    for times, rows in enumerate((SUMS, SUMS[:7]), 1):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        for _ in range(2):
            opened = open_rows(str(file))
            assert isinstance(opened, arrow.ArrowRows) and opened[len(rows) - 1] == rows[-1]
            assert len(opened) == len(rows)
        assert len(list(arrow.cache_directory().iterdir())) == times
    with pytest.raises(IndexError):
        opened[7]


def test_where_no_cache_can_be_written_parquet_is_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow, "MAPPED_BYTES", -1)
    (tmp_path / "cache").write_text("a file in its place")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(SUMS), tmp_path / "a.parquet")
    assert open_rows(str(tmp_path / "a.parquet"))[3] == SUMS[3]


def test_a_batch_with_other_columns_leaves_no_file(tmp_path):
    batches = [pyarrow.Table.from_pylist([{"a": 1}]), pyarrow.Table.from_pylist([{"b": 1}])]
    with pytest.raises(KeyError):
        arrow.write_arrow(tmp_path / "new" / "a.arrow", batches)
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(DataError, match="no rows"):
        arrow.write_arrow(tmp_path / "a.arrow", [])


# ---------------------------------------------------------------- a hub


@pytest.fixture
def asked():
    return []


@pytest.fixture
def served(tmp_path, asked, monkeypatch):
    """A hub with one data set, `owner/sums`, of two splits."""
    directory = tmp_path / "hub" / "owner" / "sums"
    directory.mkdir(parents=True)
    (directory / "train.jsonl").write_text(lines(SUMS))
    (directory / "test.jsonl").write_text(lines(SUMS[:3]))
    with hub(tmp_path / "hub", asked) as url:
        use_hub(monkeypatch, url)
        yield monkeypatch


def use_hub(monkeypatch, url):
    from huggingface_hub import constants

    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setattr(constants, "ENDPOINT", url)


def task_of(**keys):
    return HubTaskSection(name="owner/sums", prompt="question", **keys)


def test_rows_of_a_hub_are_fetched_once_and_then_need_no_hub(served, asked):
    task = make_task(task_of(), None)
    assert task.rows == len(SUMS) and task.prompt_text(7) == SUMS[7]["question"]
    assert task.row_id(7) == "owner/sums/train:7"
    assert any(path.endswith("/train.jsonl") for path in asked)
    asked.clear()
    use_hub(served, "http://127.0.0.1:1")
    assert make_task(task_of(), None).columns(39) == SUMS[39]
    assert asked == []
    # Other rows of the same data set: `datasets` has them in its own cache.
    assert make_task(task_of(rows_max=5), None).rows == 5


def test_a_stream_ends_after_rows_max(served):
    task = make_task(task_of(rows_max=10, revision="main"), None)
    assert task.rows == 10 and task.columns(9) == SUMS[9]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"split": "tran"}, r"`task.split` = 'tran'.*Unknown split|`task.split` = 'tran'.*Bad split"),
        ({"subset": "hard"}, r"`task.subset` = 'hard'.*not found"),
        ({"revision": "v9"}, "no such revision"),
    ],
)
def test_what_a_hub_does_not_have_is_one_error(served, keys, said):
    with pytest.raises(DataError, match=f"(?s){said}"):
        fetched_file(task_of(**keys))


def test_a_name_that_a_hub_does_not_know_is_one_error(served):
    with pytest.raises(DataError, match=r"owner/products could not be fetched.*\n.*no such data set"):
        fetched_file(HubTaskSection(name="owner/products"))


def test_without_a_hub_and_a_cache_the_error_names_both_and_what_to_do(monkeypatch, tmp_path):
    use_hub(monkeypatch, "http://127.0.0.1:1")
    with pytest.raises(DataError) as raised:
        fetched_file(task_of())
    said = str(raised.value)
    assert "owner/sums could not be fetched from http://127.0.0.1:1" in said
    assert (
        str(tmp_path / "cache") in said
        and "HF_ENDPOINT" in said
        and "hf download --repo-type dataset" in said
    )


def test_a_changed_pattern_or_hub_is_noticed_by_digests(tmp_path, served):
    from types import SimpleNamespace

    from millrace.run import content_digests as digests

    def of(task):
        return digests.content_digests(
            SimpleNamespace(
                model=SimpleNamespace(path=str(tmp_path / "none")),
                teacher=None,
                by_part={"": SimpleNamespace(task=task)},
                evaluations=(),
            )
        )

    (tmp_path / "a-0.jsonl").write_text(lines(SUMS))
    pattern = FileTaskSection(path=str(tmp_path / "a-*.jsonl"))
    first = of(pattern)
    (tmp_path / "a-1.jsonl").write_text(lines(SUMS))
    with pytest.raises(DataError, match=r"task.path: a-1.jsonl: \(not there\)"):
        digests.refuse_other_content(first, of(pattern))
    before = of(task_of())
    file = fetched_file(task_of())
    os.remove(file)
    assert of(task_of()) == before
    file.write_bytes(b"other rows")
    with pytest.raises(DataError, match=r"task.name: owner/sums"):
        digests.refuse_other_content(before, of(task_of()))
    assert Path(file).is_file()
