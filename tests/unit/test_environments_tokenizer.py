"""The character-level tokenizer, and loading tokenizers."""

import string
import subprocess
import sys
import threading
from functools import partial

import pytest

from millrace.conversations.encoding import Encoding
from millrace.conversations.tokenizer import (
    END,
    USER,
    encode_prompt,
    load_tokenizer,
    make_character_tokenizer,
)
from millrace.core.errors import DataError

ALPHABET = string.digits + string.ascii_letters + " +-*/=?!.,\n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_character_tokenizer(path, ALPHABET)
    return path


def test_every_character_is_one_token_and_text_comes_back_exactly(directory):
    tokenizer = load_tokenizer(directory)
    text = "What is 12 + 345?\n = , it"
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens) == text


def test_special_tokens_come_first_and_are_left_out_of_text(directory):
    tokenizer = load_tokenizer(directory)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|pad|>", "<|end|>")
    assert len(tokenizer) == 5 + len(ALPHABET)
    assert tokenizer.decode([*tokenizer.encode("42"), 1, 0, 0], skip_special_tokens=True) == "42"


def test_unknown_characters_become_the_unknown_token(directory):
    tokenizer = load_tokenizer(directory)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("aéb")) == ["a", "<|unknown|>", "b"]


def test_the_chat_template_marks_who_speaks(directory):
    tokenizer = load_tokenizer(directory)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    assert rendered == "<|user|>hi<|end|><|assistant|>yes<|end|>"
    opened = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(opened))[-2:] == ["<|end|>", "<|assistant|>"]


def test_repeated_characters_of_the_alphabet_count_once(tmp_path):
    make_character_tokenizer(tmp_path, "abba")
    assert len(load_tokenizer(tmp_path)) == 5 + 2


def test_loading_a_plain_tokenizer_imports_no_torch(directory):
    code = (
        "import sys; from millrace.conversations.tokenizer import load_tokenizer; "
        f"load_tokenizer({str(directory)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no model directory at .*nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(DataError, match="has no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(DataError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_threads_that_encode_at_once_get_what_one_thread_gets(directory):
    """A fast tokenizer keeps for all threads whether special tokens are text."""
    tokenizer = load_tokenizer(directory)
    encoding, text = Encoding(tokenizer), f"{USER}word{END}"
    encoders = [encoding.template, encoding.plain, partial(encode_prompt, tokenizer)] * 2
    expected = [encoder(text) for encoder in encoders]
    assert expected[0] != expected[1]
    found = [[] for _ in encoders]

    def work(number):
        found[number] += [encoders[number](text) == expected[number] for _ in range(300)]

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(encoders))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert [one.count(False) for one in found] == [0] * len(encoders)
