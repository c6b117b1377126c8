"""A prompt has the same ids in training, curation, a supervised start, a gateway and a served model."""

from __future__ import annotations

import itertools
import json
import string
from concurrent.futures import Future

import pytest
from tokenizers import processors

from millrace.config.tables.task import FileTaskSection
from millrace.conversations.tokenizer import encode, encode_prompt, load_tokenizer, make_character_tokenizer
from millrace.episodes.bridge import PlainBridge
from millrace.episodes.gateway.calls import ChatTurn
from millrace.episodes.gateway.rendering import make_rendering
from millrace.serve.completions import Completions
from millrace.sft.warm_start import read_examples
from millrace.tasks.tasks import make_task
from millrace_curation.task_rows import _candidate

BEGIN, FIRST, LAST = "<|pad|>", "<|user|>", "<|end|>"
ADDED = {
    "nothing": "$A",
    "begin": f"{BEGIN} $A",
    "end": f"$A {LAST}",
    "both": f"{BEGIN} $A {LAST}",
    "two tokens": f"{BEGIN} {FIRST} $A",
}
BEFORE = {"nothing": [], "begin": [BEGIN], "end": [], "both": [BEGIN], "two tokens": [BEGIN, FIRST]}
TEXTS = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
TEMPLATES = {"without": TEXTS, "with": "{{ bos_token }}" + TEXTS}


@pytest.fixture(params=ADDED)
def added(request) -> str:
    return request.param


@pytest.fixture
def tokenizer(added, tmp_path):
    make_character_tokenizer(tmp_path / "tokenizer", string.printable)
    made = load_tokenizer(tmp_path / "tokenizer")
    made.bos_token = BEGIN
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=ADDED[added],
        special_tokens=[(one, made.convert_tokens_to_ids(one)) for one in (BEGIN, FIRST, LAST)],
    )
    made.save_pretrained(tmp_path / "tokenizer")
    return load_tokenizer(tmp_path / "tokenizer")


class Asked:
    """In place of an engine: the ids of the last prompt."""

    num_requests = 0

    def submit(self, tokens, sampling, seed):
        self.tokens = list(tokens)
        return Future()


def served(tokenizer, path, body) -> list[int]:
    engine = Asked()
    completions = Completions(engine, tokenizer, model="m", max_sequence_tokens=64)
    getattr(completions, path)(json.dumps(body).encode())
    return engine.tokens


def task_of(tokenizer, tmp_path, prompt):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "b"}) + "\n")
    config = FileTaskSection(kind="file", path=str(tmp_path / "rows.jsonl"))
    return config, make_task(config, tokenizer)


def curated(tokenizer, tmp_path, prompt) -> list[int]:
    config, task = task_of(tokenizer, tmp_path, prompt)
    return list(_candidate(config, task, tokenizer, 0).tokens)


def test_text_gets_what_the_tokenizer_puts_before_it_once_and_nothing_behind_it(added, tokenizer, tmp_path):
    before = tokenizer.convert_tokens_to_ids(BEFORE[added])
    expected = before + encode(tokenizer, "stone")
    assert encode_prompt(tokenizer, "stone") == expected
    assert encode_prompt(tokenizer, "".join(BEFORE[added]) + "stone") == expected
    assert served(tokenizer, "text", {"prompt": "stone"}) == expected
    assert curated(tokenizer, tmp_path, "stone") == expected
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "stone", "completion": "x"}) + "\n")
    [(prompt, completion)] = read_examples(tmp_path / "pairs.jsonl", tokenizer, append_eos=False)
    assert prompt == expected and completion == encode(tokenizer, "x")
    tokenizer.chat_template = None
    messages = [ChatTurn(role="user", content="stone")]
    assert make_rendering(tokenizer, {}).whole(messages, ()) == [*expected, *encode(tokenizer, "\n")]
    assert PlainBridge(tokenizer).whole("stone") == expected
    body = {"messages": [{"role": "user", "content": "stone"}]}
    assert served(tokenizer, "chat", body) == [*expected, *encode(tokenizer, "\n\n")]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_has_the_special_tokens_of_its_template_alone(template, tokenizer, tmp_path):
    tokenizer.chat_template = TEMPLATES[template]
    messages = [{"role": "user", "content": "stone"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = tokenizer.convert_tokens_to_ids(
        [*([BEGIN] if template == "with" else []), "<|user|>", *"stone", "<|end|>", "<|assistant|>"]
    )
    assert encode(tokenizer, rendered) == expected
    assert served(tokenizer, "chat", {"messages": messages}) == expected
    assert curated(tokenizer, tmp_path, messages) == expected
    assert make_rendering(tokenizer, {}).whole([ChatTurn(role="user", content="stone")], ()) == expected


def test_a_tokenizer_that_drops_every_letter_still_begins_a_text(tokenizer, added):
    from tokenizers import normalizers

    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("a", "")
    before = tokenizer.convert_tokens_to_ids(BEFORE[added])
    assert encode_prompt(tokenizer, "12") == before + encode(tokenizer, "12")


@pytest.mark.parametrize(("length", "fits"), itertools.product([63, 64, 10_000_000], [True]))
def test_a_text_that_is_too_long_is_refused_by_its_first_part(length, fits, tokenizer, added, monkeypatch):
    from millrace.episodes.gateway.calls import RefusedCall

    seen = []
    encoded = Completions._encoded
    monkeypatch.setattr(
        Completions,
        "_encoded",
        lambda self, text, encoder: seen.append(len(text)) or encoded(self, text, encoder),
    )
    room = 63 - len(BEFORE[added])
    assert len(served(tokenizer, "text", {"prompt": "a" * room})) == 63
    with pytest.raises(RefusedCall, match="it must have 1 to 63"):
        served(tokenizer, "text", {"prompt": "a" * (length + 1)})
    assert max(seen) <= 8 * 64
