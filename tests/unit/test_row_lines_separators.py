"""A line of a file ends with a line feed: other separators of Unicode are text."""

from __future__ import annotations

import json
import tomllib

import pytest

from millrace.config.toml_text import key_lines, mistake
from millrace.conversations.tokenizer import load_tokenizer, make_character_tokenizer
from millrace.core.errors import DataError
from millrace.episodes.agents.task_directories.dockerfile import _instructions
from millrace.run_directory.run_directory import RunDirectory
from millrace.sft.warm_start import read_examples
from millrace.tasks.row_lines import JsonLines

ALLOWED = ["\u2028", "\u2029", "\x85", "\x7f", "\x9f", "\ufeff", "\u3000"]
"""JSON and TOML permit these in a string as they are (TOML not 0x7f)."""
ESCAPED = ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x00"]
"""JSON writes these with a backslash."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    make_character_tokenizer(directory, "abx" + "".join(ALLOWED) + "".join(sorted({*"".join(ESCAPED)})))
    return load_tokenizer(directory)


def written(path, *rows, end="\n", begin=""):
    lines = [json.dumps(row, ensure_ascii=False) + end for row in rows]
    path.write_bytes((begin + "".join(lines)).encode())
    return path


@pytest.mark.parametrize("separator", [*ALLOWED, *ESCAPED])
def test_demonstrations_are_the_rows_that_training_reads(separator, tokenizer, tmp_path):
    rows = [{"prompt": f"a{separator}b", "completion": f"{separator}x"}, {"prompt": "a", "completion": "b"}]
    path = written(tmp_path / "rows.jsonl", *rows)
    assert list(JsonLines(path)) == rows
    examples = read_examples(path, tokenizer, append_eos=False)
    assert [tuple(map(tokenizer.decode, pair)) for pair in examples] == [
        (row["prompt"], row["completion"]) for row in rows
    ]


@pytest.mark.parametrize(
    ("begin", "end"),
    [("", "\n"), ("\ufeff", "\n"), ("", "\r\n"), ("\ufeff", "\r\n"), ("", "\r"), ("", "\n\n")],
)
def test_ends_of_lines_and_a_mark_at_the_begin_are_no_text(begin, end, tokenizer, tmp_path):
    rows = [{"prompt": "a\u2028b", "completion": "x"}, {"prompt": "b", "completion": "a"}]
    path = written(tmp_path / "rows.jsonl", *rows, begin=begin, end=end)
    assert list(JsonLines(path)) == rows
    assert len(read_examples(path, tokenizer, append_eos=False)) == 2


def test_a_broken_line_is_named_by_its_number_in_the_file(tokenizer, tmp_path):
    path = written(tmp_path / "rows.jsonl", {"prompt": "\u2028" * 9, "completion": "x"})
    path.write_bytes(path.read_bytes() + b"\n{\n")
    with pytest.raises(DataError, match=r"rows.jsonl:3 is not JSON"):
        read_examples(path, tokenizer, append_eos=False)
    written(path, {"prompt": "\x85", "completion": "x"}, {"prompt": "a"})
    with pytest.raises(DataError, match=r"rows.jsonl:2: a line is an object with"):
        read_examples(path, tokenizer, append_eos=False)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_a_separator_in_a_string_of_a_configuration_moves_no_line(separator):
    text = f'[a]\none = "x{separator}y"\n\ntwo = 2\n[b]\nthree = 3\n'
    assert tomllib.loads(text)["a"]["one"] == f"x{separator}y"
    assert key_lines(text) == {"a": 1, "a.one": 2, "a.two": 4, "b": 5, "b.three": 6}
    broken = f'one = "x{separator}y"\ntwo: 2\n'
    with pytest.raises(tomllib.TOMLDecodeError) as found:
        tomllib.loads(broken)
    assert mistake(broken, found.value)[1] == 2


def test_a_separator_in_a_kept_evaluation_breaks_no_line(tmp_path):
    run = RunDirectory(tmp_path)
    lines = [json.dumps({"version": one, "name": "a\u2028b"}, ensure_ascii=False) for one in (1, 2, 3)]
    run.evaluations.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    run.forget_evaluations(after=2)
    assert run.evaluations.read_text(encoding="utf-8").split("\n") == [*lines[:2], ""]


def test_a_separator_in_a_dockerfile_ends_no_instruction():
    found = list(_instructions('FROM python\n# a comment\nRUN echo "a\u2028b" \\\n  && ls\n'))
    assert found == [("FROM", "python"), ("RUN", 'echo "a\u2028b"    && ls')]


@pytest.mark.parametrize("column", ["prompt", "completion"])
def test_half_a_character_of_a_demonstration_is_named_with_its_line(column, tokenizer, tmp_path):
    row = json.dumps({"prompt": "a", "completion": "b", column: "a\ud83d"})
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' + row + "\n")
    with pytest.raises(DataError, match=rf"rows.jsonl:2: the {column}: character 1 is half a character"):
        read_examples(tmp_path / "rows.jsonl", tokenizer, append_eos=False)
