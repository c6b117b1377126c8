"""What a bridge appends is what the chat template writes, for templates in the style of many families."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.unit.chat_templates import ADDED, REFUSED, SPECIAL, STYLES, Style, make_tokenizer

from millrace.conversations.conversation_text import ConversationText
from millrace.core.errors import ConfigError
from millrace.episodes.bridge import ChatBridge, PlainBridge

CONVERSATIONS = 6
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
PARTS = [
    "the end", " ", "\n", "\n\n", "true", "false", '{"found": true, "none": null}', "<b>", "é→", "\ud800",
    "x" * 40, "<think>no</think>", '<tool_call>{"name": "look", "arguments": {"far": false}}</tool_call>', 
    "xReplyx", *SPECIAL, *ADDED,
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def text(rng: random.Random) -> str:
    return "".join(rng.choice(PARTS) for _ in range(rng.randrange(1, 6)))


def observation(rng: random.Random, style: Style) -> list[dict[str, str]]:
    role = rng.choice(style.roles)
    return [{"role": role, "content": text(rng)} for _ in range(rng.randrange(1, 4) if role == "tool" else 1)]


def numbered(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Results with the ids of their calls, as some templates want them."""
    calls, result = 0, []
    for one in messages:
        calls = calls + 1 if one["role"] == "tool" else 0
        content = one["content"].encode(errors="backslashreplace").decode()
        result.append({**one, "content": content, **({"tool_call_id": f"call{calls:05}"} if calls else {})})
    return result


def written(tokenizer: Any, messages: list[dict[str, str]], tools: Any, prompt: bool = True) -> str:
    given = numbered(messages)
    return tokenizer.apply_chat_template(given, tools=tools, tokenize=False, add_generation_prompt=prompt)


@pytest.mark.parametrize("name", STYLES)
def test_a_conversation_is_the_earlier_ids_and_what_the_template_writes(tokenizer: Any, name: str) -> None:
    style = STYLES[name]
    tokenizer.chat_template = style.template
    for seed in range(CONVERSATIONS):
        rng = random.Random(f"{name}/{seed}")
        tools = TOOLS if "tools" in style.template and seed % 2 else None
        ends = tokenizer.convert_tokens_to_ids([style.end, *style.ends])
        bridge = ChatBridge(tokenizer, style.roles[0], {}, tools or (), ends)
        messages = [{"role": "user", "content": "begin"}]
        ids = tokenizer.encode(written(tokenizer, messages, tools), add_special_tokens=False)
        plain = True
        for _ in range(rng.randrange(1, 5)):
            reply = rng.choice(["yes", "True and false", text(rng)])
            ended = rng.random() < 0.8
            sampled = tokenizer.encode(reply.encode(errors="replace").decode(), add_special_tokens=False)
            sampled += [rng.choice(ends)] if ended else []
            plain = plain and reply in ("yes", "True and false") and sampled[-1] not in ends[1:]
            answer = observation(rng, style)
            appended = bridge.after(sampled, answer)
            check_tail(tokenizer, style, [messages[0], answer], tools, appended, ended)
            messages += [{"role": "assistant", "content": reply}, *answer]
            before = [*ids, *sampled]
            ids = [*before, *appended]
            assert ids[: len(before)] == before
        if plain and style.exact:
            assert tokenizer.decode(ids) == written(tokenizer, messages, tools)


@pytest.mark.parametrize("begin", ["", " ", "\n", "\n\n ", "  \n", "\t", " the", "</s>", "\n<think>"])
@pytest.mark.parametrize("name", [name for name, style in STYLES.items() if style.exact])
def test_an_observation_has_the_ids_that_it_has_in_the_whole_conversation(
    tokenizer: Any, name: str, begin: str
) -> None:
    """A tokenizer may join a line break of the template and one of the observation into one token."""
    style = STYLES[name]
    tokenizer.chat_template = style.template
    end = tokenizer.convert_tokens_to_ids(style.end)
    messages = [
        {"role": "user", "content": "begin"},
        {"role": "assistant", "content": "A reply"},
        {"role": style.roles[0], "content": f"{begin}name\n\n"},
    ]
    whole = ConversationText(tokenizer, {}).ids(numbered(messages))
    bridge = ChatBridge(tokenizer, style.roles[0], {}, (), [end])
    for turn in ([7], [7, end]):
        appended = bridge.after(turn, messages[2:])
        assert appended == whole[-len(appended) :]
        behind = written(tokenizer, messages, None).partition("A reply")[2]
        assert tokenizer.decode(appended) == (behind if turn == [7] else behind.partition(style.end)[2])


def check_tail(
    tokenizer: Any, style: Style, parts: Any, tools: Any, appended: list[int], ended: bool
) -> None:
    """The appended ids decode to the template's text behind a reply. Only its own special tokens are such."""
    begin, answer = parts
    reply = {"role": "assistant", "content": "A reply"}
    tail = written(tokenizer, [begin, reply, *answer], tools).partition("A reply")[2]
    quiet = [{**one, "content": "quiet"} for one in answer]
    frame = written(tokenizer, [begin, reply, *quiet], tools).partition("A reply")[2]
    special = tokenizer.encode(frame, add_special_tokens=False)
    if ended and special and style.end in frame and frame.lstrip().startswith(style.end):
        tail, special = (
            tail.partition(style.end)[2],
            special[special.index(tokenizer.convert_tokens_to_ids(style.end)) + 1 :],
        )
    assert tokenizer.decode(appended) == tail
    added = set(tokenizer.added_tokens_encoder.values())
    assert [one for one in appended if one in added] == [one for one in special if one in added]


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_rewrites_what_the_model_saw_is_refused(tokenizer: Any, name: str) -> None:
    tokenizer.chat_template = REFUSED[name]
    with pytest.raises(ConfigError, match=r"rewrites earlier messages|cannot render messages"):
        ChatBridge(tokenizer, "user", {})


def test_an_end_that_is_not_the_templates_replaces_none_that_begins_the_next_message(tokenizer: Any) -> None:
    """Turns of GLM end by `<|user|>` or `<|observation|>`, which the next message has as its begin."""
    tokenizer.chat_template = STYLES["glm"].template
    ends = user, observation = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    bridge = ChatBridge(tokenizer, "user", {}, (), ends)
    assert tokenizer.decode(bridge.after([7, user], "and")) == "\nand<|assistant|>\n"
    assert tokenizer.decode(bridge.after([7, observation], "and")) == "<|user|>\nand<|assistant|>\n"


def test_tools_that_a_template_moves_to_the_last_question_are_refused_for_questions_alone(
    tokenizer: Any,
) -> None:
    tokenizer.chat_template = (
        "{% set last = (messages | selectattr('role', 'equalto', 'user') | list) | last %}"
        "{% for m in messages %}{% if m.role == 'user' and m.content == last.content and tools %}"
        "{{ tools | tojson }}{% endif %}{{ m.role + ':' + m.content + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    bridge = ChatBridge(tokenizer, "user", {}, TOOLS)
    assert (
        tokenizer.decode(bridge.after([], [{"role": "tool", "content": "7"}])) == "</s>tool:7</s>assistant:"
    )
    with pytest.raises(ConfigError, match="when a message of role 'user' follows"):
        bridge.after([], "What is next?")


CALLS_FIRST = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{% set before = messages[loop.index0 - 1] %}"
    "{% if not (before.tool_calls or before.role == 'tool') %}{{ raise_exception('no call') }}{% endif %}"
    "{{ '[RESULT]' + m.content + '[/RESULT]' }}"
    "{% else %}{{ m.content or m.tool_calls | tojson }}</s>{% endif %}{% endfor %}"
)
WRITTEN_WITH_CALLS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ m.content or m.tool_calls | tojson }}</s>"
    "{% for r in messages[loop.index0 + 1:] if m.tool_calls and r.role == 'tool' and "
    "r.tool_call_id in (m.tool_calls | map(attribute='id') | list) %}"
    "{% if loop.index <= m.tool_calls | length %}{{ '[RESULT]' + r.content + '[/RESULT]' }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [CALLS_FIRST, WRITTEN_WITH_CALLS])
def test_results_follow_a_turn_where_the_template_takes_them_behind_calls_alone(
    tokenizer: Any, template: str
) -> None:
    tokenizer.chat_template = template
    end = tokenizer.convert_tokens_to_ids("</s>")
    bridge = ChatBridge(tokenizer, "user", {}, TOOLS, [end])
    one, two = {"role": "tool", "content": "7</s>"}, {"role": "tool", "content": "8"}
    appended = bridge.after([5], [one])
    assert tokenizer.decode(appended) == "</s>[RESULT]7</s>[/RESULT]" and appended.count(end) == 1
    assert tokenizer.decode(bridge.after([5, end], [one, two])) == (
        "[RESULT]7</s>[/RESULT][RESULT]8[/RESULT]"
    )
    assert tokenizer.decode(bridge.after([5], "And then?")) == "</s>[INST]And then?[/INST]"


BEHIND_CALLS = (
    "{{ tools | tojson if tools }}{% set calls = namespace(all=[], number=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '<|user|>' + m.content }}"
    "{% elif m.role == 'tool' %}{% for call in calls.all if call.id == m.tool_call_id %}"
    "{{ '<|output|>' + SHOWN + '=' }}{% endfor %}{{ m.content + '<|end|>' }}"
    "{% else %}{% if m.tool_calls %}{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}"
    "{% set calls.all = calls.all + m.tool_calls %}"
    "{% else %}{{ m.content }}{% endif %}{{ '</s>' }}{% endif %}{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)


def test_a_result_has_what_the_template_takes_from_its_call(tokenizer: Any) -> None:
    tokenizer.chat_template = BEHIND_CALLS.replace("SHOWN", "call.function.name")
    end = tokenizer.convert_tokens_to_ids("</s>")
    bridge = ChatBridge(tokenizer, "user", {}, TOOLS, [end])
    result = {"role": "tool", "name": "look", "content": "7"}
    assert tokenizer.decode(bridge.after([5, end], [result])) == "<|output|>look=7<|end|><|assistant|>"


@pytest.mark.parametrize("shown", ["(loop.index0 | string)", "'call ' ~ calls.all.index(call)"])
def test_numbers_of_calls_through_a_conversation_are_refused_by_name(tokenizer: Any, shown: str) -> None:
    numbered = "{% for call in calls.all %}{% if call.id == m.tool_call_id %}"
    tokenizer.chat_template = (
        BEHIND_CALLS.replace("{% for call in calls.all if call.id == m.tool_call_id %}", numbered)
        .replace("'=' }}{% endfor %}", "'=' }}{% endif %}{% endfor %}")
        .replace("SHOWN", shown)
    )
    with pytest.raises(ConfigError, match="numbers the calls of a conversation"):
        ChatBridge(tokenizer, "user", {}, TOOLS)


def test_a_turn_that_has_ended_gets_no_part_of_the_end_before_its_own(tokenizer: Any) -> None:
    """A reply is closed by `<|bot|><|turn_end|>`. A turn may end with either, or with another end."""
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|turn_begin|>' + m.role }}{% if m.role == 'assistant' %}"
        "{{ '<|user|>' + m.content + '<|bot|>' }}{% else %}{{ m.content }}{% endif %}{{ '<|turn_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|turn_begin|>assistant<|observation|>' }}{% endif %}"
    )
    bot, end, other = tokenizer.convert_tokens_to_ids(["<|bot|>", "<|turn_end|>", "</s>"])
    bridge = ChatBridge(tokenizer, "user", {}, (), [end, other])
    follows = "<|turn_begin|>userand<|turn_end|><|turn_begin|>assistant<|observation|>"
    assert tokenizer.decode(bridge.after([7, bot], "and")) == "<|turn_end|>" + follows
    assert tokenizer.decode(bridge.after([7, bot, end], "and")) == follows
    assert tokenizer.decode(bridge.after([7, other], "and")) == follows
    assert tokenizer.decode(bridge.after([7], "and")) == "<|bot|><|turn_end|>" + follows


def test_results_that_change_the_calls_before_them_are_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = CALLS_FIRST.replace(
        "{% else %}", "{% else %}{{ 'done:' if messages[-1].role == 'tool' else 'open:' }}"
    )
    with pytest.raises(ConfigError, match="rewrites earlier messages when a message of role 'tool' follows"):
        ChatBridge(tokenizer, "user", {}, TOOLS)


def test_a_plain_bridge_appends_the_text_alone(tokenizer: Any) -> None:
    bridge = PlainBridge(tokenizer)
    for seed in range(20):
        given = text(random.Random(seed))
        appended = bridge.after([1, 2], given)
        assert tokenizer.decode(appended) == given.encode(errors="backslashreplace").decode()
        assert not set(appended) & set(tokenizer.added_tokens_encoder.values())


def test_the_templates_are_many(tmp_path: Path) -> None:
    assert len(STYLES) >= 20
