"""Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams of chunks."""
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which every client skips."""

DELTA_CHARACTERS = 2_000
DELTA_TOKENS = 128
"""Clients that read lines may refuse a line of more than 64 KiB."""


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    named = f"event: {name}\n".encode() if name else b""
    return named + b"data: " + msgspec.json.encode(data) + b"\n\n"


def slices(text: str) -> Iterator[str]:
    for start in range(0, len(text), DELTA_CHARACTERS):
        yield text[start : start + DELTA_CHARACTERS]
