"""Text in the middle of a sequence as token ids: of a chat template, or plain."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from millrace.conversations.tokenizer import encode


class Encoding:
    """`template` encodes special tokens as such. In `plain`, what looks like a special or an added token is
    text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._newline = encode(tokenizer, "\n")
        self._added = dict(getattr(tokenizer, "added_tokens_encoder", {}))
        markup = sorted((one for one in self._added if one.strip() and len(one) > 1), key=len, reverse=True)
        self.controls = frozenset(self._added[one] for one in markup)
        self._markup = re.compile(f"(?=({'|'.join(map(re.escape, markup)) or '(?!)'}))")
        self._characters_per_token = max(map(len, tokenizer.get_vocab()))

    def fits(self, characters: int, room: int) -> bool:
        """Whether a text of so many characters may fit into `room` tokens. Some text of megabytes takes
        longer to encode than any deadline."""
        return characters <= room * self._characters_per_token

    def template(self, text: str) -> list[int]:
        return self._ids(text)

    def plain(self, text: str) -> list[int]:
        """The text is cut after the first character of each added token, so no added token is in a part."""
        cuts = [0, *(match.start() + 1 for match in self._markup.finditer(text)), len(text)]
        return [
            one
            for start, stop in pairwise(cuts)
            for one in self._ids(text[start:stop], split_special_tokens=True)
        ]

    def behind_first_special(self, text: str) -> tuple[int | None, str]:
        """The first added token in a text, and the text behind it. (None, text): there is none."""
        match = self._markup.search(text)
        return (None, text) if match is None else (self._added[match[1]], text[match.end(1) :])

    def _ids(self, text: str, **options: bool) -> list[int]:
        """Encoded behind a line break, because some tokenizers put a space before the begin of a text."""
        if not text:
            return []
        ids = encode(self._tokenizer, "\n" + text, **options)
        begin = len(self._newline)
        if ids[:begin] == self._newline:
            return ids[begin:]
        return encode(self._tokenizer, text, **options)


def encodable(text: str) -> str:
    """The text with an escape for half of a surrogate pair, which UTF-8 cannot encode."""
    return text.encode(errors="backslashreplace").decode()
