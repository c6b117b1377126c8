"""Turns as gpt-oss writes them, and a tokenizer with its vocabulary."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from tests.unit.chat_templates import ADDED, HARMONY, HARMONY_TOKENS, SPECIAL

from millrace.conversations.encoding import Encoding

BEGIN = "<|start|>user<|message|>begin<|end|><|start|>assistant"
HEADS = (
    "<|channel|>commentary to=functions.look <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.look<|constrain|>json<|message|>",
    " to=functions.look<|channel|>commentary json<|message|>",
)
PARTS = ["the end", " ", "\n", "true", '{"a": 1}', "to=functions.no", "é→", *HARMONY_TOKENS, *SPECIAL, *ADDED]


def text(rng: random.Random) -> str:
    return "".join(rng.choice(PARTS) for _ in range(rng.randrange(1, 6)))


def sampled_turn(
    tokenizer: Any, rng: random.Random, cut: float = 0.0
) -> tuple[list[int], str | dict[str, str]]:
    """The ids of a turn, and its last text, or the arguments of its call. `cut`: the share of turns that are
    cut off. No content has a special token, whatever it looks like."""
    encoding = Encoding(tokenizer)
    said = {"far": text(rng)} if rng.random() < 0.5 else text(rng)
    ids = []
    if rng.random() < 0.7:
        ids += encoding.template("<|channel|>analysis<|message|>") + encoding.plain(text(rng))
        ids += encoding.template("<|end|><|start|>assistant")
    if isinstance(said, str):
        ids += encoding.template("<|channel|>final<|message|>") + encoding.plain(said)
        ids += encoding.template("<|return|>")
    else:
        ids += encoding.template(rng.choice(HEADS)) + encoding.plain(json.dumps(said))
        ids += encoding.template("<|call|>")
    return ids[: rng.randrange(1, len(ids))] if rng.random() < cut else ids, said


class VocabularyTokenizer:
    """An encoding of the package openai-harmony, as far as bridges use a tokenizer."""

    chat_template, bos_token, unk_token_id, name_or_path = HARMONY, None, None, "openai/gpt-oss-20b"

    def __init__(self, encoding: Any) -> None:
        names = [*HARMONY_TOKENS, "<|end|>", "<|endoftext|>"]
        self._encoding = encoding
        self.all_special_tokens = names
        self.added_tokens_encoder = {one: encoding.encode(one, allowed_special="all")[0] for one in names}

    def get_vocab(self) -> dict[str, int]:
        return self.added_tokens_encoder

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.added_tokens_encoder[token]

    def encode(
        self, text: str, add_special_tokens: bool = False, split_special_tokens: bool = False
    ) -> list[int]:
        allowed = set() if split_special_tokens else "all"
        return self._encoding.encode(text, allowed_special=allowed, disallowed_special=())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **options: Any) -> str:
        special = self.added_tokens_encoder.values() if skip_special_tokens else ()
        return self._encoding.decode([one for one in ids if one not in special])

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool, **options: Any) -> str:
        shown = "".join(f"<|start|>{one['role']}<|message|>{one['content']}<|end|>" for one in messages)
        return shown + "<|start|>assistant" * add_generation_prompt
