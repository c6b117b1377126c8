"""Calls of tools are read in the form that the model's own chat template writes."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from tests.long import covering
from tests.unit.call_templates import FAMILIES, MARKED_TEXTS, NO_CALLS, UNKNOWN, rendered, writes

from millrace.conversations.call_forms import CallStyle, learn_style
from millrace.conversations.call_reader import CallReader
from millrace.conversations.grammars import BracedCalls
from millrace.conversations.tool_calls import Malformed, ToolCall, TurnParts, TurnText
from millrace.core.errors import ConfigError

TYPES = {
    "city": "string",
    "days": "integer",
    "ratio": "number",
    "on": "boolean",
    "none": "null",
    "list": "array",
    "nested": "object",
}
SCHEMAS = {
    "look": {"type": "object", "properties": {name: {"type": kind} for name, kind in TYPES.items()}},
    "get-weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "stop": {"type": "object", "properties": {}},
}
HARD = {
    "city": 'São "Paulo" </tool_call> </think> <function=x> [TOOL_CALLS] 東京\n  {"name": "look"} \\',
    "days": 2,
    "ratio": 1.5,
    "on": True,
    "none": None,
    "list": [1, "a, b", {"c": "]"}],
    "nested": {"a": {"b": ["</tool_call>", "</think>"]}, "e": {}},
}
SIMPLE = {"city": "Paris, 5e (nord)", "days": 2}
EVERY = FAMILIES | MARKED_TEXTS
one = pytest.mark.parametrize("family", FAMILIES)
every = pytest.mark.parametrize("family", EVERY)


def style(template: str) -> CallStyle:
    return learn_style(partial(rendered, template))


def read(template: str, text: str, tools: Any = SCHEMAS) -> TurnParts:
    learnt = style(template)
    return CallReader(learnt.form, is_opened=learnt.opens_thinking).read(text, tools)


def turn(template: str, *calls: tuple[str, dict[str, Any]], content: str = "") -> str:
    """The turn of an assistant, as its template writes it."""
    learnt = style(template)
    tool_calls = [
        {
            "id": f"functions.{name}:{n}" if learnt.named_ids else f"call{n:05}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(given) if learnt.as_text else given},
        }
        for n, (name, given) in enumerate(calls)
    ]
    reply = {"role": "assistant", "content": content, "tool_calls": tool_calls}
    text = rendered(template, [{"role": "user", "content": "?"}, reply])
    return text.partition("<|assistant|>")[2].removesuffix("<|end|>")


@one
def test_a_call_reads_as_it_was_written_whatever_is_in_its_arguments(family: str) -> None:
    template = FAMILIES[family]
    parts = read(template, turn(template, ("look", HARD)))
    assert parts == TurnParts("", "", (ToolCall("look", HARD),))


@every
def test_two_calls_behind_a_text(family: str) -> None:
    template = EVERY[family]
    calls = [
        ("look", SIMPLE),
        ("get-weather" if "." not in family and family not in MARKED_TEXTS else "look", SIMPLE),
    ]
    if "raise_exception('one" in template:
        calls = calls[:1]
    parts = read(template, turn(template, *calls, content="I look.\n"))
    assert parts.calls == tuple(ToolCall(name, given) for name, given in calls)
    assert parts.content == "I look."


@every
def test_thinking_about_a_call_is_none_and_the_call_behind_it_counts(family: str) -> None:
    template = EVERY[family]
    call = turn(template, ("look", SIMPLE))
    parts = read(template, f"<think>\nMaybe\n{call}\n</think>\n\n{turn(template, ('look', {'days': 3}))}")
    assert parts.calls == (ToolCall("look", {"days": 3}),)
    assert parts.reasoning.startswith("Maybe") and parts.content == ""
    assert read(template, f"<think>\n{call}\n</think>\n\nParis").calls == ()


@pytest.mark.parametrize(("family", "arguments"), covering(EVERY, [HARD, SIMPLE, {"days": 12, "city": ""}]))
def test_a_call_that_is_cut_off_is_none_that_runs(family: str, arguments: dict[str, Any]) -> None:
    """At any place: a call with a part of its arguments would run as if the model had meant it."""
    template = EVERY[family]
    whole = turn(template, ("look", arguments))
    written = read(template, whole).calls
    for stop in range(1, len(whole)):
        calls = read(template, whole[:stop]).calls
        assert all(isinstance(one, Malformed) for one in calls) or calls == written


def test_a_call_in_thinking_that_is_cut_off_is_none() -> None:
    thinking = 'Maybe <tool_call>{"name": "look", "arguments": {}}</tool_call>, or'
    reader = CallReader(is_opened=True)
    assert reader.read(thinking, SCHEMAS, is_cut=True) == TurnParts(thinking, "")
    assert reader.read(f"Hm.</think>{thinking}", SCHEMAS, is_cut=True).calls == (ToolCall("look", {}),)
    assert CallReader().read(thinking, SCHEMAS, is_cut=True).calls == (ToolCall("look", {}),)


@every
def test_without_tools_there_are_no_calls(family: str) -> None:
    template = EVERY[family]
    assert read(template, turn(template, ("look", SIMPLE)), {}).calls == ()


@every
@pytest.mark.parametrize(
    "answer",
    [
        '{"name": "Alice", "age": 30}',
        '[{"name": "Alice", "age": 30}, {"name": "Bob", "age": 31}]',
        '{"type": "look", "name": "Alice"}',
        '{"function": "sin", "arguments": [1]}',
        '{"arguments": {"x": 1}, "name": "Alice"}',
        '{"parameters": {"lr": 0.1}}',
        '{"name": "look", "meaning": "to see"}',
        '{"name": "look"}',
        "f(x) = look(x)",
        "look at {this}",
        "I would look.",
        "[1, 2]",
        "",
    ],
)
def test_an_answer_is_no_call(family: str, answer: str) -> None:
    parts = read(EVERY[family], answer)
    assert parts == TurnParts("", answer, ())


def test_a_tag_in_an_argument_ends_no_call_and_no_thinking() -> None:
    template = FAMILIES["Qwen3-Coder, Qwen 3.5"]
    for city in (
        "a </tool_call> b",
        "a </think> b",
        "<function=look>\n<parameter=city>",
        "a </parameter> b",
        "\n x \n",
    ):
        assert read(template, turn(template, ("look", {"city": city}))).calls == (
            ToolCall("look", {"city": city}),
        )


def test_arguments_between_tags_have_the_types_of_their_schema() -> None:
    template = FAMILIES["Qwen3-Coder, Qwen 3.5"]
    for text, value in {"2": 2, "True": True, "null": None, "[1, 'a']": [1, "a"], "two": "two"}.items():
        call = (
            f"<tool_call>\n<function=look>\n<parameter=days>\n{text}\n</parameter>\n</function>\n</tool_call>"
        )
        assert read(template, call).calls == (ToolCall("look", {"days": value}),)
        as_text = read(template, call.replace("days", "city")).calls
        assert as_text == (ToolCall("look", {"city": text}),)


@every
def test_a_call_without_arguments(family: str) -> None:
    template = EVERY[family]
    assert read(template, turn(template, ("stop", {}))).calls == (ToolCall("stop", {}),)


def test_a_template_whose_calls_cannot_be_read_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"model\.path.* as 'CALL xfirstx WITH"):
        style(UNKNOWN)
    with pytest.raises(ConfigError, match=r"model\.path.* fails on messages with calls.*: no calls here"):
        style(writes("{{ raise_exception('no calls here') }}"))


def test_a_template_that_shows_no_tools_tells_how_it_takes_arguments() -> None:
    for call, as_text in {
        "{{ '```' + f.arguments + '```' }}": True,
        "{{ f.arguments | tojson }}": False,
    }.items():
        template = writes(call).replace("{% if tools %}", "{% if false %}")
        assert style(template) == CallStyle(None, False, as_text)


def test_a_template_without_calls_has_the_marks_that_families_tell_their_models() -> None:
    assert style(NO_CALLS) == CallStyle(None, True, by_marks=True)
    assert not any(style(template).by_marks for template in EVERY.values())
    look = json.dumps({"name": "look", "arguments": HARD})
    for text in (
        f"<tool_call>{look}</tool_call>",
        f"<|tool_call|>[{look}]<|/tool_call|>",
        f"functools[{look}]",
        "<|tool_call_start|>[look(**)]<|tool_call_end|>".replace(
            "**", ", ".join(f"{key}={value!r}" for key, value in HARD.items())
        ),
        look,
    ):
        assert read(NO_CALLS, text).calls == (ToolCall("look", HARD),)


def test_a_prompt_that_opens_thinking_is_known() -> None:
    template = FAMILIES["Llama 3.1"].replace("%}<|assistant|>{% endif", "%}<|assistant|><think>\n{% endif")
    assert style(template).opens_thinking
    parts = read(
        template, '{"name": "look", "parameters": {}}\n</think>\n{"name": "look", "parameters": {"days": 1}}'
    )
    assert parts.calls == (ToolCall("look", {"days": 1}),) and "parameters" in parts.reasoning


def test_bare_json_counts_at_the_end_of_a_turn_alone() -> None:
    template, call = FAMILIES["Llama 3.1"], '{"name": "look", "parameters": {"days": 1}}'
    wanted = ToolCall("look", {"days": 1})
    assert read(template, f"I look.\n{call}").calls == (wanted,)
    assert read(template, f"{call}; {call}").calls == (wanted, wanted)
    assert read(template, f"A call is\n{call}\nbut I do not look.").calls == ()
    assert read(template, '{"name": "fly", "parameters": {"days": 1}}').calls == ()
    [cut] = read(template, call[:-2]).calls
    assert isinstance(cut, Malformed)


def test_a_quoted_key_behind_a_space_has_no_quotes() -> None:
    text = "look{nested:{<escape>a<escape>: 1, <escape>b<escape>: <escape>None<escape>},none:None}"
    read = BracedCalls("<escape>").read(text, 0, {})
    wanted = ToolCall("look", {"nested": {"a": 1, "b": "None"}, "none": None})
    assert read is not None and read.calls == [wanted]


@pytest.mark.parametrize("family", ["Llama 4", "GLM-4-0414", "Mistral without marks", "Llama 3.1"])
def test_a_call_without_a_mark_that_a_text_explains_is_none(family: str) -> None:
    template = EVERY[family]
    call = turn(template, ("look", SIMPLE))
    for answer in (f"I wrote\n{call}\nand saw nothing.", f"{call} is a call."):
        assert read(template, answer) == TurnParts("", answer, ())
    assert read(template, f"I wrote\n{call}\nbefore. Now again:\n{call}\n").calls == (
        ToolCall("look", SIMPLE),
    )


def test_a_function_of_python_in_a_text_is_no_malformed_call() -> None:
    for answer in ("look(x) is a function of x.", "look(at) - look(to) = 0\nSo it is 0."):
        assert read(MARKED_TEXTS["Llama 4"], answer) == TurnParts("", answer, ())


@pytest.mark.parametrize("family", MARKED_TEXTS)
@pytest.mark.parametrize("code", ["\ndef f(x):\n    return [x]\n\nf(1)", "a\r\nb", "(\n["])
def test_a_text_in_a_call_has_several_lines(family: str, code: str) -> None:
    template = MARKED_TEXTS[family]
    assert read(template, turn(template, ("look", {"city": code}), ("stop", {}))).calls == (
        ToolCall("look", {"city": code}),
        ToolCall("stop", {}),
    )


@pytest.mark.parametrize("family", ["Qwen3-Coder, Qwen 3.5", "Seed-OSS"])
def test_functions_in_one_block_or_without_it_are_calls(family: str) -> None:
    template = FAMILIES[family]
    call = turn(template, ("look", SIMPLE))
    opening, closing = call[: call.index("<function")], call[call.index("</function>") + 11 :]
    bare = call.removeprefix(opening).removesuffix(closing)
    wanted = ToolCall("look", SIMPLE)
    for text in (f"{opening}{bare}\n{bare}{closing}", f"{bare}\n{bare}", f"{call}\n{bare}{closing}"):
        assert read(template, text) == TurnParts("", "", (wanted, wanted))
    for text in (bare, f"{bare}{closing}", f"{opening}{bare}"):
        assert read(template, f"I look.\n{text}") == TurnParts("", "I look.", (wanted,))


@pytest.mark.parametrize("head", ["\n", "<|x|>", "\n\n<|x|>\n"])
def test_a_message_with_calls_may_begin_in_another_way_than_an_answer(head: str) -> None:
    """The prompt of a turn begins as it does."""
    template = FAMILIES["Llama 3.1"].replace("{{ '<|assistant|>' if", "{{ head + '<|assistant|>' if")
    template = f"{{% set head = {head!r} %}}" + template.replace(
        "%}<|assistant|>{% endif", "%}{{ head }}<|assistant|>{% endif"
    ).replace("{{ head + '", "{{ (head if m.tool_calls else '') + '")
    call = '{"name": "look", "parameters": {"days": 1}}'
    assert read(template, call) == TurnParts("", "", (ToolCall("look", {"days": 1}),))


@pytest.mark.parametrize(
    "marks", [("<|python_start|>", "<|python_end|>"), ("<|text_start|>", "<|text_end|>")]
)
def test_marks_around_the_text_of_a_message_are_none_of_its_calls(marks: tuple[str, str]) -> None:
    text = "{% if m.tool_calls %}" + "{{ m.content }}".join(marks) + "{% else %}{{ m.content }}{% endif %}"
    template = writes('{{ {"name": f.name, "parameters": f.arguments} | tojson }}').replace(
        "{{ m.content }}", text
    )
    call = '{"name": "look", "parameters": {"days": 1}}'
    assert read(template, call) == TurnParts("", "", (ToolCall("look", {"days": 1}),))
    marked = TurnText(f"I look.\n{call}", f"{marks[0]}I look.\n{marks[1]}{call}")
    assert read(template, marked).calls == (ToolCall("look", {"days": 1}),)


@pytest.mark.parametrize("mark", [">>>", "@", "<|call|>"])
def test_a_prompt_that_ends_with_the_mark_of_a_call_is_refused(mark: str) -> None:
    """The first call of a turn would have no mark, and a second one would be text."""
    template = writes(mark + "{{ f.name }}\n{{ f.arguments | tojson }}").replace(
        "%}<|assistant|>{% endif", f"%}}<|assistant|>{mark}{{% endif"
    )
    with pytest.raises(ConfigError, match=r"model\.path.*xsecondx"):
        style(template)


def test_tools_that_a_system_prompt_alone_shows_are_shown() -> None:
    for role in ("system", "developer or system"):
        shows = "{% if tools and messages[0].role in '" + role + "' %}"
        assert style(FAMILIES["Llama 3.1"].replace("{% if tools %}", shows)).form is not None


def test_a_mark_of_texts_tells_the_type_of_an_argument_without_a_schema() -> None:
    """DeepSeek's `string="true"`. A schema has the last word."""
    template = FAMILIES["DeepSeek V3.2"]
    given = {"days": "12", "zip": "012", "code": "7", "count": 7, "on": True}
    properties = {**SCHEMAS["look"]["properties"], "code": {"type": "any"}, "zip": True}  # type: ignore[dict-item]
    tools = {"look": {"type": "object", "properties": properties}}
    read_as = read(template, turn(template, ("look", given)), tools).calls
    assert read_as == (ToolCall("look", {**given, "days": 12}),)


def test_models_vary_the_space_between_marks() -> None:
    wanted = ToolCall("look", {"days": 2})
    for family, text in {
        "Kimi K2": "<|tool_calls_section_begin|> <|tool_call_begin|>functions.look:0 "
        '<|tool_call_argument_begin|> {"days": 2} <|tool_call_end|>\n<|tool_calls_section_end|>',
        "GLM-4.5": "<tool_call>look<arg_key>days</arg_key> <arg_value>2</arg_value></tool_call>",
        "Solar Open": "<|tool_calls|>\n<|tool_call:begin|>a-1 <|tool_call:name|>look"
        '<|tool_call:args|> {"days": 2} <|tool_call:end|>',
        "Apertus": '<|tools_prefix|> [{"look": {"days": 2}}] <|tools_suffix|>',
    }.items():
        assert read(FAMILIES[family], text) == TurnParts("", "", (wanted,))


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("<think>", "</think>"),
        ("[THINK]", "[/THINK]"),
        ("<|channel>thought\n", "<channel|>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("", "\n[BEGIN FINAL RESPONSE]\n"),
    ],
)
def test_thinking_is_none_of_the_content_also_between_special_tokens(begin: str, end: str) -> None:
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    plain = begin.replace("<|channel>", "") if "channel" in begin else ""
    for behind, calls in {"Paris": (), f"Paris {call}": (ToolCall("look", {}),)}.items():
        marked = f"{begin}I could {call}{end}{behind}"
        wanted = TurnParts(f"I could {call}", "Paris", calls)
        assert CallReader().read(marked, SCHEMAS) == wanted
        unmarked = TurnText(f"{plain}I could {call}{behind}", marked)
        assert CallReader().read(unmarked, SCHEMAS) == wanted
    unmarked = TurnText(f"{plain}I could {call}", f"{begin}I could {call}")
    if begin:
        assert CallReader().read(unmarked, SCHEMAS) == TurnParts(f"I could {call}", "")


@pytest.mark.parametrize("family", ["Qwen3-Coder, Qwen 3.5", "GLM-4.5", "MiniMax M2", "DeepSeek V3.2"])
def test_an_argument_that_has_another_one_in_it_does_not_end(family: str) -> None:
    """A model that leaves out the end of an argument would else call with both as one."""
    template = FAMILIES[family]
    whole = turn(template, ("get-weather", {"city": "Paris", "days": 2}))
    written = style(template).form.grammar.behind_value.replace("\\", "")  # type: ignore[union-attr]
    lost = whole.replace(written, "", 1)
    assert lost != whole
    [call] = read(template, lost).calls
    assert isinstance(call, Malformed) and "does not end" in call.reason
    inner = whole.partition("Paris")[0].rpartition("get-weather")[2] + "Paris"
    for given in ({"city": f"a {inner} b", "days": 2}, {"city": f"a {inner.replace('city', 'zip')} b"}):
        assert read(template, turn(template, ("get-weather", given))).calls == (
            ToolCall("get-weather", given),
        )


@pytest.mark.parametrize("schema", [{}, {"type": "any"}, {"anyOf": [True]}, True, {"enum": ["12"]}])
@pytest.mark.parametrize("family", ["Gemma", "OLMo 3"])
def test_a_quoted_value_of_any_type_is_a_text(family: str, schema: Any) -> None:
    template = MARKED_TEXTS[family]
    text = turn(template, ("look", {"city": "12", "days": 12}))
    tools = {"look": {"type": "object", "properties": {"city": schema, "days": schema}}}
    assert read(template, text, tools).calls == (ToolCall("look", {"city": "12", "days": 12}),)
