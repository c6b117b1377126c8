"""Demonstrations as token ids."""

from __future__ import annotations

import json

import pytest
from tokenizers import processors

from millrace.conversations.tokenizer import encode_prompt, load_tokenizer, make_character_tokenizer
from millrace.core.errors import DataError
from millrace.sft.warm_start import read_examples

USER = "<|user|>"


@pytest.fixture
def tokenizer(tmp_path):
    """With `<|user|>` as its beginning of a sequence, written by itself."""
    make_character_tokenizer(tmp_path / "tokenizer", "abc ")
    made = load_tokenizer(tmp_path / "tokenizer")
    made.bos_token = USER
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{USER} $A", special_tokens=[(USER, made.bos_token_id)]
    )
    return made


def demonstrations(tmp_path, *prompts):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "completion": "c"}) + "\n" for p in prompts))
    return path


def test_a_rendered_prompt_begins_once(tokenizer, tmp_path):
    plain, rendered = read_examples(demonstrations(tmp_path, "ab", f"{USER}ab"), tokenizer, append_eos=True)
    assert plain == rendered
    assert plain[0].count(tokenizer.bos_token_id) == 1
    assert encode_prompt(tokenizer, f"a{USER}b").count(tokenizer.bos_token_id) == 2


def test_a_tokenizer_without_an_end_is_refused_where_one_is_to_be_appended(tokenizer, tmp_path):
    tokenizer.eos_token = None
    path = demonstrations(tmp_path, "ab")
    with pytest.raises(DataError, match=r"`data.append_eos` is true, but the tokenizer has no end"):
        read_examples(path, tokenizer, append_eos=True)
    ((_, completion),) = read_examples(path, tokenizer, append_eos=False)
    assert len(completion) == 1


# ---------------------------------------------------------------- chat messages

TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}"
    "{{ eos_token if m.role == 'assistant' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
ASKED, SAID = {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}
SHARED = [{"from": "human", "value": "b"}, {"from": "gpt", "value": "c"}]


@pytest.fixture
def chat(tmp_path):
    make_character_tokenizer(tmp_path / "chat", "abc<>us\n")
    made = load_tokenizer(tmp_path / "chat")
    made.chat_template = TEMPLATE
    return made


def learnt(tmp_path, tokenizer, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples = read_examples(path, tokenizer, append_eos=True, ends={tokenizer.eos_token_id})
    return [tuple(tokenizer.decode(ids) for ids in example) for example in examples]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, SAID]},
        {"conversations": SHARED},
        {"prompt": [ASKED], "completion": [SAID]},
        {"prompt": [ASKED], "completion": "c"},
        {"prompt": "b", "completion": [SAID]},
        {"messages": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "c"}]}]},
        {"prompt": None, "completion": None, "messages": [ASKED, SAID]},
        {"messages": json.dumps([ASKED, SAID])},
        {"prompt": json.dumps([ASKED]), "completion": str([SAID])},
    ],
)
def test_a_turn_of_the_assistant_is_learnt_up_to_its_end(chat, tmp_path, row):
    assert learnt(tmp_path, chat, row) == [("<u>b\n<a>", f"c{chat.eos_token}")]


def test_each_turn_of_the_assistant_is_learnt_behind_what_its_prompt_would_be(chat, tmp_path):
    end = chat.eos_token
    rows = {"messages": [ASKED, SAID, ASKED, SAID]}, {"prompt": [ASKED, SAID, ASKED], "completion": [SAID]}
    first, *others = learnt(tmp_path, chat, *rows, {"prompt": "a", "completion": "b"})
    assert first == ("<u>b\n<a>", f"c{end}")
    assert others == [(f"<u>b\n<a>c{end}\n<u>b\n<a>", f"c{end}")] * 2 + [("a", f"b{end}")]


def test_a_template_that_writes_no_end_gets_the_tokenizers(chat, tmp_path):
    chat.chat_template = TEMPLATE.replace("eos_token if", "'' if")
    assert learnt(tmp_path, chat, {"messages": [ASKED, SAID]}) == [("<u>b\n<a>", f"c\n{chat.eos_token}")]


@pytest.mark.parametrize(
    ("row", "template", "error"),
    [
        ({"messages": [ASKED]}, TEMPLATE, "rows.jsonl:1: the assistant has no turn behind another message"),
        ({"messages": [SAID]}, TEMPLATE, "the assistant has no turn behind another message"),
        ({"prompt": [ASKED, SAID], "completion": [ASKED]}, TEMPLATE, "the assistant has no turn"),
        ({"messages": [ASKED, SAID]}, None, "rows.jsonl:1: the chat template failed.*chat_template"),
        ({"messages": [ASKED, SAID]}, TEMPLATE.replace("%}<a>", "%}<a>a"), "begins message 2 otherwise than"),
        ({"messages": [ASKED, SAID], "tools": [{"name": "look"}]}, TEMPLATE, "shows no tools"),
        ({"messages": [ASKED, {"content": "c"}]}, TEMPLATE, "message 2 has no `role`"),
        ({"messages": "b"}, TEMPLATE, "an object with `prompt`, `completion` or `messages`"),
    ],
)
def test_messages_from_which_nothing_right_would_be_learnt_are_refused(chat, tmp_path, row, template, error):
    chat.chat_template = template
    with pytest.raises(DataError, match=f"(?s){error}"):
        learnt(tmp_path, chat, row)
