"""Chat rows as data sets write them: verl, TRL, verifiers, OpenAI and ShareGPT, each by a small file."""

from __future__ import annotations

import csv
import json

import pyarrow
import pyarrow.parquet
import pytest
from tests.unit.call_templates import FAMILIES, rendered

from millrace.config.tables import task as table
from millrace.core.errors import DataError
from millrace.tasks.chat import conversation, find_reference, render
from millrace.tasks.tasks import make_task

ASK = {"role": "user", "content": "1 + 1 ="}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


class Written:
    """A tokenizer whose chat template writes what it is given."""

    def __init__(self, template="{{ messages }} {{ tools }}"):
        self.chat_template = template

    def apply_chat_template(self, messages, **given):
        assert given.pop("add_generation_prompt") and not given.pop("tokenize")
        return json.dumps([messages, given.pop("tools"), given])


def made(tmp_path, rows, tokenizer=None, *, parquet=False, **keys):
    path = tmp_path / ("rows.parquet" if parquet else "rows.jsonl")
    if parquet:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_task(table.FileTaskSection(path=str(path), **keys), tokenizer or Written())


def prompt(task, row=0):
    messages, tools, _ = json.loads(task.prompt_text(row))
    return messages, tools


def reference(task, row=0):
    return find_reference(task.columns(row), task.answer)


def test_verl_parquet(tmp_path):
    row = {
        "data_source": "sums",
        "prompt": [{"role": "system", "content": "Add."}, ASK],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0},
    }
    task = made(tmp_path, [row], parquet=True, answer="reward_model.ground_truth")
    assert prompt(task) == (row["prompt"], None) and reference(task) == "2"


def test_trl_text_and_messages(tmp_path):
    rows = [{"prompt": "1 + 1 =", "solution": "2"}, {"prompt": [ASK], "solution": "2"}]
    task = made(tmp_path, rows, answer="solution")
    assert task.prompt_text(0) == "1 + 1 =" and prompt(task, 1)[0] == [ASK]
    pairs = [{"prompt": [ASK], "completion": [{"role": "assistant", "content": "2"}]}]
    assert reference(made(tmp_path, pairs, answer="completion")) == "2"


MESSAGES = [{"role": "system", "content": 'Say "no", don\'t guess.\n} {'}, {**ASK, "content": "a} {\\"}]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(MESSAGES),
        json.dumps(MESSAGES, indent=1),
        f"\n{MESSAGES}",
        f"[{MESSAGES[0]}\n {MESSAGES[1]}]",  # of an array of NumPy
        f"[{MESSAGES[0]} {MESSAGES[1]}]",
    ],
)
@pytest.mark.parametrize("keys", [{}, {"prompt": "in.put", "answer": "in.out"}])
def test_text_of_messages_is_messages_as_tables_hold_it(tmp_path, text, keys):
    said = json.dumps([{"from": "gpt", "value": "2"}])
    row = {"in": {"put": text, "out": said, "n": 1}, "prompt": text, "answer": said}
    task = made(tmp_path, [row], **keys)
    assert prompt(task) == (MESSAGES, None)
    assert reference(task) == "2"
    assert task.is_chat(0) and task.columns(0)["in"]["n"] == 1


@pytest.mark.parametrize(
    "text",
    [
        '[{"role": "user", "content": "1"',
        '[{"role": "admin", "content": "Sort these rows."}]',
        '[{"role": "user", "name": "Bob"}]',
        '[{"role": "user", "content": 5}]',
        '[{"from": "EUR", "value": "5"}]',
        '[{"from": "gpt", "to": "Bob"}]',
        "[{'role': 'user', 'content': open('a')}]",
        "[" * 10**5 + "{",
        "[{" + "[" * 10**5,
        '[{"role": "user", "content": "1"}] What is this?',
        '{"role": "user", "content": "1"}',
        "[]",
        " [1] ",
    ],
)
def test_other_text_stays_text(tmp_path, text):
    task = made(tmp_path, [{"prompt": text, "answer": text}])
    assert task.prompt_text(0) == text == reference(task) and not task.is_chat(0)


def test_messages_in_cells_are_messages(tmp_path):
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["prompt", "answer"], [MESSAGES, 2], [json.dumps([ASK]), 2], ["1 + 1 =", 2]])
    task = make_task(table.FileTaskSection(path=str(path)), Written())
    assert [task.is_chat(row) for row in range(3)] == [True, True, False]
    assert prompt(task, 0)[0] == MESSAGES and prompt(task, 1)[0] == [ASK]


def test_verifiers_question_with_the_environment_s_system_prompt(tmp_path):
    row = {"question": "1 + 1 =", "answer": "2", "info": {"level": 1}}
    task = made(tmp_path, [row], prompt="question", chat=True, system="Add.")
    assert prompt(task)[0] == [{"role": "system", "content": "Add."}, ASK]
    assert task.columns(0)["info"] == {"level": 1}


def test_openai_messages_end_before_the_assistant_s_turn_which_is_the_reference(tmp_path):
    row = {"messages": [ASK, {"role": "assistant", "content": "2"}], "tools": [TOOL]}
    task = made(tmp_path, [row], prompt="messages", answer="messages")
    assert prompt(task) == ([ASK], [TOOL]) and reference(task) == "2"
    with pytest.raises(DataError, match="no assistant's message at the end of `messages`"):
        made(tmp_path, [{"messages": [ASK]}], prompt="messages", answer="messages")


def test_sharegpt_conversations(tmp_path):
    turns = [{"from": "human", "value": "1 + 1 ="}, {"from": "gpt", "value": "2"}]
    task = made(tmp_path, [{"conversations": turns}], prompt="conversations", answer="conversations")
    assert prompt(task)[0] == [ASK] and reference(task) == "2"


def test_the_row_s_own_system_message_stays(tmp_path):
    own = {"role": "system", "content": "Own."}
    task = made(tmp_path, [{"prompt": [own, ASK], "answer": "2"}], system="Other.")
    assert prompt(task)[0] == [own, ASK]


def test_tools_as_a_list_as_text_and_as_a_list_of_texts_are_equal(tmp_path):
    forms = [TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]
    for form in forms:
        assert prompt(made(tmp_path, [{"prompt": [ASK], "answer": "2", "tools": form}]))[1] == [TOOL]
    for none in (None, [], ""):
        assert prompt(made(tmp_path, [{"prompt": [ASK], "answer": "2", "tools": none}]))[1] is None
    row = {"prompt": [ASK], "answer": "2", "tools": [TOOL]}
    assert prompt(made(tmp_path, [row], tools=None))[1] is None
    with pytest.raises(DataError, match=r"the row has `tools`.*knows no tools.*\n.*task.tools"):
        made(tmp_path, [row], Written("{{ messages }}"))
    with pytest.raises(DataError, match="`tools` is no list of tools"):
        made(tmp_path, [row | {"tools": "add"}])


def test_nulls_that_parquet_adds_are_left_out(tmp_path):
    other = {
        "type": "function",
        "function": {"name": "sub", "parameters": {"properties": {"b": {"type": "x"}}}},
    }
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}],
    }
    rows = [
        {"prompt": [ASK, call, {"role": "tool", "content": "2"}], "answer": "2", "tools": [TOOL]},
        {"prompt": [ASK], "answer": "2", "tools": [other]},
    ]
    lines, parquet = made(tmp_path, rows), made(tmp_path, rows, parquet=True)
    for row in range(2):
        assert prompt(lines, row) == prompt(parquet, row)
    (_, answer, _), tools = prompt(parquet)
    assert tools == [TOOL]
    assert answer["content"] == "" and answer["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize(
    "calls",
    [
        [{"name": "add", "arguments": {"a": 1}}],
        [{"name": "add", "arguments": '{"a": 1}', "function": None}],
        '[{"function": {"name": "add", "arguments": {"a": 1}}}]',
        ['{"name": "add", "arguments": {"a": 1}}'],
    ],
)
def test_calls_as_data_sets_write_them_are_those_of_openai(tmp_path, calls):
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    messages, _ = prompt(
        made(tmp_path, [{"prompt": [ASK, answer, {"role": "tool", "content": "2"}], "answer": "2"}])
    )
    assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


ADD = {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ({"from": "function_call", "value": json.dumps(ADD)}, {"from": "observation", "value": "2"}),
        ({"from": "function_call", "value": json.dumps([ADD])}, {"from": "function_response", "value": "2"}),
        (
            {"role": "assistant", "content": None, "function_call": ADD | {"arguments": '{"a": 1}'}},
            {"role": "function", "name": "add", "content": "2"},
        ),
    ],
)
def test_calls_and_results_of_sharegpt_and_of_old_openai_messages(tmp_path, call, result):
    task = made(tmp_path, [{"prompt": [ASK, call, result, ASK, call], "answer": "2"}])
    messages, _ = prompt(task)
    assert [one["role"] for one in messages] == ["user", "assistant", "tool", "user"]
    assert messages[1]["content"] == "" and "function_call" not in messages[1]
    assert messages[1]["tool_calls"] == [{"type": "function", "function": ADD, "id": "call00000"}]
    assert messages[2]["content"] == "2" and messages[2]["tool_call_id"] == "call00000"


def test_the_reference_of_a_row_that_ends_with_a_call_of_sharegpt_is_its_text(tmp_path):
    row = {"conversations": [ASK, {"from": "function_call", "value": json.dumps(ADD)}]}
    task = made(tmp_path, [row], prompt="conversations", answer="conversations")
    assert prompt(task)[0] == [ASK] and json.loads(reference(task)) == ADD


@pytest.mark.parametrize("value", ["add", "7", "[7]", '{"a": 1}'])
def test_a_call_of_sharegpt_that_is_none_is_refused_with_its_row(tmp_path, value):
    call = {"from": "function_call", "value": value}
    said = r"message 2.* (has a call without a name|is no list of calls)"
    with pytest.raises(DataError, match=said):
        made(tmp_path, [{"prompt": [ASK, call, ASK], "answer": "2"}])


@pytest.mark.parametrize(
    "calls", [[{"arguments": {"a": 1}}], [{"function": {"arguments": {}}}], "add", [7], 7]
)
def test_what_is_no_call_is_refused_with_its_row(tmp_path, calls):
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    with pytest.raises(DataError, match=r"message 2.* (has a call without a name|is no list of calls)"):
        made(tmp_path, [{"prompt": [ASK, answer, {"role": "tool", "content": "2"}], "answer": "2"}])


def test_parts_of_text_are_joined_and_other_parts_refused(tmp_path):
    parts = [{"type": "text", "text": "1 + "}, {"type": "text", "value": "1 ="}]
    assert prompt(made(tmp_path, [{"prompt": [{"role": "user", "content": parts}], "answer": "2"}]))[0] == [
        ASK
    ]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(DataError, match="message 1 has a part of type 'image_url'"):
        made(tmp_path, [{"prompt": image, "answer": "2"}])
    image[0]["content"] = [{"type": "image", "value": "x.png"}]
    with pytest.raises(DataError, match="message 1 has a part of type 'image'"):
        made(tmp_path, [{"prompt": image, "answer": "2"}])


THOUGHTS = [
    {"type": "reasoning", "value": "Add."},
    {"type": "reasoning", "text": "Add."},
    {"type": "thinking", "thinking": "Add.", "signature": "x"},
    {"type": "thinking", "thinking": [{"type": "text", "text": "Add."}]},
]


@pytest.mark.parametrize("part", THOUGHTS)
def test_parts_of_thinking_are_no_content(tmp_path, part):
    parts = [part, {"type": "text", "text": "2"}]
    turns = [ASK, {"role": "assistant", "content": parts}]
    task = made(tmp_path, [{"prompt": [*turns, ASK, turns[1]]}], answer="prompt")
    thought = {"role": "assistant", "content": "2", "reasoning_content": "Add."}
    assert prompt(task)[0] == [ASK, thought, ASK] and reference(task) == "2"


def test_parts_with_calls_are_calls(tmp_path):
    """As LLaMA-Factory writes them."""
    parts = [{"type": "tool_call", "value": json.dumps(ADD)}, {"type": "tool_call", "value": ADD}]
    turns = [ASK, {"role": "assistant", "content": [THOUGHTS[0], *parts]}, {"role": "tool", "content": "2"}]
    messages, _ = prompt(made(tmp_path, [{"prompt": turns, "answer": "2"}]))
    assert [call["function"] for call in messages[1]["tool_calls"]] == [ADD, ADD]
    assert messages[1]["content"] == "" and messages[1]["reasoning_content"] == "Add."
    parts[0]["value"] = "add"
    with pytest.raises(DataError, match=r"message 2.* is no list of calls"):
        made(tmp_path, [{"prompt": turns, "answer": "2"}])


class Kimi:
    chat_template = FAMILIES["Kimi K2"]

    def apply_chat_template(self, messages, *, tools=None, add_generation_prompt, tokenize):
        return rendered(self.chat_template, messages, prompt=add_generation_prompt, tools=tools)


def call_of(*ids):
    calls = [{"function": ADD, **({} if one is None else {"id": one})} for one in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result_of(one=None):
    return {"role": "tool", "content": "2", **({} if one is None else {"tool_call_id": one})}


@pytest.mark.parametrize(
    ("turns", "results"),
    [
        ([call_of(None), result_of(), call_of(None), result_of()], [0, 1]),
        ([call_of("call_abc", "call_def"), result_of("call_def"), result_of("call_abc")], [1, 0]),
        ([call_of("a", "b"), result_of(), result_of()], [0, 1]),
        ([call_of("a", "b"), result_of(), call_of("c"), result_of()], [0, 2]),
        ([call_of("a"), result_of("a"), call_of("a"), result_of("a")], [0, 1]),
        ([call_of("a"), result_of("other")], [0]),
        ([call_of(0, 1), result_of(1), result_of(0)], [1, 0]),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_calls_have_ids_that_any_template_takes_and_results_have_those_of_their_calls(turns, results, named):
    """Mistral's templates take ids of nine letters alone. Kimi's writes `functions.NAME:0` as names."""
    tokenizer = Kimi() if named else Written()
    messages = conversation(table.FileTaskSection(path="x"), tokenizer, {}, [ASK, *turns], "row 1")
    ids = [call["id"] for one in messages for call in one.get("tool_calls", ())]
    assert ids == [f"functions.add:{n}" if named else f"call{n:05}" for n in range(len(ids))]
    assert [one["tool_call_id"] for one in messages if one["role"] == "tool"] == [ids[n] for n in results]


def test_tools_without_the_word_function_around_them_are_those_of_openai(tmp_path):
    """Some templates fail on others."""
    for tools in ([TOOL["function"]], json.dumps(TOOL["function"]), [json.dumps(TOOL["function"])]):
        assert prompt(made(tmp_path, [{"prompt": [ASK], "answer": "2", "tools": tools}]))[1] == [TOOL]


def test_tools_of_an_environment_that_the_template_hides_are_named():
    class Hiding(Written):
        def apply_chat_template(self, messages, *, tools, **given):
            return json.dumps([messages, tools if messages[0]["role"] == "system" else None])

    task = table.FileTaskSection(path="rows.jsonl", tools=None)
    with pytest.raises(DataError, match=r"row 1: the environment has tools.*hides 'add'.*\n.*task.system"):
        render(task, Hiding(), {}, [ASK], "row 1", own_tools=[TOOL])
    assert "add" in render(
        task, Hiding(), {}, [{"role": "system", "content": "x"}, ASK], "", own_tools=[TOOL]
    )


@pytest.mark.parametrize(
    ("row", "keys", "said"),
    [
        ({"prompt": "x", "answer": "2"}, {"system": "Add."}, "`task.system` needs chat"),
        ({"prompt": [{"text": "x"}], "answer": "2"}, {}, r"message 1 has no `role`, only \['text'\]"),
        ({"prompt": [{"role": "assistant", "content": "2"}], "answer": "2"}, {}, "no message before"),
    ],
)
def test_what_is_wrong_with_a_chat_row_is_named(tmp_path, row, keys, said):
    with pytest.raises(DataError, match=said):
        made(tmp_path, [row], **keys)
