"""Tasks: rows from reasoning-gym and from files, and the prompts they make."""

import csv
import json

import pytest

from millrace.config.tables import task as table
from millrace.conversations.tokenizer import load_tokenizer, make_character_tokenizer
from millrace.core.errors import ConfigError, DataError
from millrace.tasks.rows import find_column
from millrace.tasks.tasks import make_task

ROWS = [{"prompt": f"2 + {i} =", "answer": str(2 + i), "level": i} for i in range(3)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_character_tokenizer(path, "0123456789 +=")
    return load_tokenizer(path)


def file_task(path, tokenizer=None, **fields):
    return make_task(table.FileTaskSection(path=str(path), **fields), tokenizer)


def gym_task(name="chain_sum", **fields):
    return make_task(table.GymTaskSection(name=name, **fields), None)


def write_lines(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    return path


# ---------------------------------------------------------------- reasoning-gym


def test_a_gym_row_is_a_prompt_with_the_data_sets_own_columns():
    task = gym_task(template="Q: {question}\nA:", size=1000)
    assert task.rows == 1000 and task.row_id(7) == "chain_sum/1:7"
    columns = task.columns(7)
    assert task.prompt_text(7) == f"Q: {columns['question']}\nA:"
    assert columns["answer"] and "metadata" in columns


def test_gym_rows_are_the_same_in_every_worker_and_options_reach_the_data_set():
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    assert gym_task(options=options).columns(5) == gym_task(options=options).columns(5)
    assert all(len(gym_task(options=options).columns(row)["answer"]) <= 2 for row in range(20))


def test_neighbouring_data_seeds_share_no_rows():
    rows = {
        seed: {gym_task(data_seed=seed).columns(row)["question"] for row in range(50)} for seed in (1, 2, 3)
    }
    assert len(rows[1] & rows[2]) < 5 and len(rows[2] & rows[3]) < 5


def test_an_unknown_gym_data_set_is_told_the_nearest_names():
    with pytest.raises(ConfigError, match=r"'chainsum'.* Nearest: .*chain_sum"):
        gym_task("chainsum")


@pytest.mark.parametrize("options", [{"terms": 3}, {"min_terms": 9, "max_terms": 2}])
def test_gym_options_that_do_not_fit_are_refused_with_those_that_exist(options):
    with pytest.raises(ConfigError, match=r"chain_sum.*it knows .*max_terms"):
        gym_task(options=options)


# ---------------------------------------------------------------- files


def as_jsonl(path):
    return write_lines(path / "rows.jsonl", *map(json.dumps, ROWS))


def as_json(path):
    (path / "rows.json").write_text(json.dumps(ROWS))
    return path / "rows.json"


def as_csv(path):
    with (path / "rows.csv").open("w", newline="") as opened:
        writer = csv.DictWriter(opened, ROWS[0].keys())
        writer.writeheader()
        writer.writerows(ROWS)
    return path / "rows.csv"


def as_csv_with_a_mark(path):
    """As spreadsheets write it."""
    file = as_csv(path)
    file.write_text("\ufeff" + file.read_text())
    return file


def as_csv_of(delimiter, encoding="utf-8", suffix="csv"):
    def write(path):
        file = as_csv(path)
        text = file.read_text().replace(",", delimiter)
        (path / f"other.{suffix}").write_bytes(text.encode(encoding))
        return path / f"other.{suffix}"

    return write


def as_parquet(path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path / "rows.parquet")
    return path / "rows.parquet"


def as_parquet_directory(path):
    (path / "parts").mkdir()
    as_parquet(path / "parts")
    return path / "parts"


def as_dataset(path):
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(str(path / "saved"))
    return path / "saved"


@pytest.mark.parametrize(
    "write",
    [
        *(as_jsonl, as_json, as_csv, as_csv_with_a_mark, as_parquet, as_parquet_directory, as_dataset),
        *(as_csv_of(";"), as_csv_of("|"), as_csv_of("\t", suffix="tsv"), as_csv_of("\t", "utf-16")),
    ],
)
def test_every_format_gives_the_same_prompts_and_answers(tmp_path, write):
    path = write(tmp_path)
    task = file_task(path, template="Q {prompt}")
    assert [task.prompt_text(row) for row in range(task.rows)] == ["Q 2 + 0 =", "Q 2 + 1 =", "Q 2 + 2 ="]
    assert [task.columns(row)["answer"] for row in range(task.rows)] == ["2", "3", "4"]
    assert [str(task.columns(row)["level"]) for row in range(task.rows)] == ["0", "1", "2"]
    assert len({task.row_id(row) for row in range(task.rows)}) == 3


def test_a_broken_line_raises_with_its_number_and_the_others_are_used(tmp_path):
    good = json.dumps(ROWS[0])
    lines = [good, "", '{"prompt": "unfinished', "[1, 2]", '{"prompt": "x"}', good]
    path = write_lines(tmp_path / "rows.jsonl", *lines)
    task = file_task(path)
    assert task.rows == 5
    assert [task.row_id(row) for row in range(5)] == [f"rows.jsonl:{line}" for line in (1, 3, 4, 5, 6)]
    for row, message in ((1, ":3 is not JSON"), (2, ":4 is a JSON list"), (3, ":5 has no `answer`")):
        with pytest.raises(DataError, match=message):
            task.prompt_text(row)
    assert task.prompt_text(0) == task.prompt_text(4) == "2 + 0 ="


def test_a_last_line_without_a_newline_and_a_byte_that_is_no_text_are_handled(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "\xff", "answer": ""}\r\n' + json.dumps(ROWS[1]).encode())
    task = file_task(path)
    assert task.rows == 2 and task.prompt_text(1) == "2 + 1 ="
    with pytest.raises(DataError, match=r"rows.jsonl:1 is not UTF-8: byte 0xff.*\n.*iconv -f latin1"):
        task.prompt_text(0)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("rows.csv", "prompt,answer\nx,y\nné,y\n".encode("latin1"), r"rows.csv:3 is not UTF-8: byte 0xe9"),
        ("rows.json", '[{"prompt": "é", "answer": "y"}]'.encode("latin1"), r"rows.json is not UTF-8"),
        (
            "rows.jsonl",
            '{"prompt": "x", "answer": "y"}\n'.encode("utf-16"),
            r"is UTF-16.*\n.*iconv -f UTF-16",
        ),
        ("rows.csv", b"prompt,answer\none, two,3\n", r"rows.csv:2 has more cells.*',' in it needs quotes"),
        ("rows.csv", b"prompt,answer\none\n", r"rows.csv:2 has nothing \(null\) as `answer`.*none"),
        ("rows.csv", b"prompt,answer,hint\none,,x\n", r"rows.csv:2 has nothing \(null\) as `answer`.*none"),
        ("rows.tsv", b'prompt\tanswer\n""\t1\n', r"rows.tsv:2 has nothing \(null\) as `prompt`"),
        ("rows.jsonl", b'{"prompt": "x", "answer": null}', r":1 has nothing \(null\) as `answer`"),
        ("rows.jsonl", b'{"prompt": null, "answer": 1}', r":1 has nothing \(null\) as `prompt`"),
        (
            "rows.tsv",
            b"What is 1 + 1?\t2\nAnd 1 + 2?\t3\n",
            r"no `prompt`.* first line .* name its columns",
        ),
        ("rows.jsonl", b'{"prompt": "x"}', r":1 has no `answer`, only \['prompt'\].*`task.answer`.*none"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"(?s){says}"):
        file_task(tmp_path / name)


def test_an_empty_cell_of_another_column_is_an_empty_text(tmp_path):
    path = write_lines(tmp_path / "rows.csv", "prompt,answer,hint", "one,1,", "two,,2")
    task = file_task(path, answer=None, template="{prompt}{hint}.")
    assert [task.prompt_text(row) for row in (0, 1)] == ["one.", "two2."]
    assert task.columns(1)["answer"] == ""


def test_columns_in_tables_are_named_with_dots(tmp_path):
    row = {"extra": {"question": {"text": "1 + 1 ="}}, "reward_model": {"ground_truth": 0}, "a.b": "2"}
    path = write_lines(tmp_path / "rows.jsonl", json.dumps(row))
    task = file_task(path, prompt="extra.question.text", answer="reward_model.ground_truth")
    assert task.prompt_text(0) == "1 + 1 ="
    assert find_column(task.columns(0), task.answer) == 0
    assert find_column(row, "a.b") == "2"
    with pytest.raises(DataError, match=r"has no `reward_model.truth`"):
        file_task(path, prompt="extra.question.text", answer="reward_model.truth")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_refused(tmp_path, content):
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(DataError, match="has no rows"):
        file_task(tmp_path / "rows.jsonl")


def test_a_file_without_a_single_usable_row_is_refused_with_the_first_fault(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", '{"question": "x", "answer": "y"}', "{")
    with pytest.raises(
        DataError, match=r"none of the first 2 rows .*:1 has no `prompt`, only \['answer', 'question'\]"
    ):
        file_task(path)


def test_a_missing_file_and_an_unknown_format_are_refused(tmp_path):
    with pytest.raises(DataError, match="no data at"):
        file_task(tmp_path / "rows.jsonl")
    (tmp_path / "rows.txt").write_text("x")
    with pytest.raises(DataError, match=r"format '.txt' is not known. Use .jsonl"):
        file_task(tmp_path / "rows.txt")
    with pytest.raises(DataError, match="not a data set"):
        file_task(tmp_path)


def test_a_dictionary_of_splits_asks_for_one(tmp_path):
    from datasets import Dataset, DatasetDict

    DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS)).save_to_disk(
        str(tmp_path / "saved")
    )
    with pytest.raises(DataError, match=r"splits \['test', 'train'\]: set `task.path` to one"):
        file_task(tmp_path / "saved")
    assert file_task(tmp_path / "saved" / "train").rows == 3


def test_other_column_names_and_no_answer_at_all(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", '{"question": "why", "topic": "life"}')
    task = file_task(path, prompt="question", answer=None, template="[{topic}] {prompt}")
    assert task.prompt_text(0) == "[life] why"
    assert task.answer is None


def test_a_template_that_names_no_column_is_refused_with_the_columns(tmp_path):
    path = as_jsonl(tmp_path)
    with pytest.raises(
        DataError, match=r"`task.template` '\{promt\}' cannot be filled.*\['answer', 'level', 'prompt'\]"
    ):
        file_task(path, template="{promt}")
    assert file_task(path, template=r"\boxed{{}} {prompt}").prompt_text(0) == r"\boxed{} 2 + 0 ="


# ---------------------------------------------------------------- chat


def test_chat_renders_text_and_messages_through_the_template(tmp_path, tokenizer):
    messages = [{"role": "user", "content": "1 + 1 ="}]
    lines = [json.dumps({"prompt": prompt, "answer": "2"}) for prompt in ("1 + 1 =", messages)]
    task = file_task(write_lines(tmp_path / "rows.jsonl", *lines), tokenizer, chat=True)
    assert task.prompt_text(0) == task.prompt_text(1) == "<|user|>1 + 1 =<|end|><|assistant|>"


def test_chat_messages_need_no_key_and_text_beside_them_stays_text(tmp_path, tokenizer):
    messages = [{"role": "user", "content": "1 + 1 ="}]
    lines = [json.dumps({"prompt": prompt, "answer": "2"}) for prompt in ("1 + 1 =", messages)]
    task = file_task(write_lines(tmp_path / "rows.jsonl", *lines), tokenizer)
    assert [task.is_chat(0), task.prompt_text(0)] == [False, "1 + 1 ="]
    assert [task.is_chat(1), task.prompt_text(1)] == [True, "<|user|>1 + 1 =<|end|><|assistant|>"]


@pytest.mark.parametrize(
    ("prompt", "description"), [([], "is a list"), ([1], "is a list"), ({"a": 1}, "is a dict")]
)
def test_a_prompt_that_is_neither_text_nor_messages_is_refused(tmp_path, tokenizer, prompt, description):
    path = write_lines(tmp_path / "rows.jsonl", json.dumps({"prompt": prompt, "answer": "2"}))
    with pytest.raises(
        DataError, match=f"the prompt {description}: it must be text, or a list of chat messages"
    ):
        file_task(path, tokenizer)


def test_messages_and_chat_without_a_template_are_refused(tmp_path, tokenizer):
    messages = [{"role": "user", "content": "1 + 1 ="}]
    path = write_lines(tmp_path / "rows.jsonl", json.dumps({"prompt": messages, "answer": "2"}))
    with pytest.raises(DataError, match="chat messages, and the model's tokenizer has no chat template"):
        file_task(path, None)
    with pytest.raises(ConfigError, match="no chat template"):
        file_task(path, None, chat=True)
