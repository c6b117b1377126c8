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
