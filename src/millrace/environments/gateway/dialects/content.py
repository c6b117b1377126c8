"""The content of a message as plain text."""

from __future__ import annotations

from typing import Any

from millrace.environments.gateway.calls import RefusedCall
from millrace.environments.gateway.dialects.fields import shown

TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
"""The types of parts that are text, each with the field that has it."""


def plain_text(content: Any, where: str) -> str:
    """A text, or the parts of text joined with nothing between. Empty if there is no content.

    Raises: RefusedCall: a part is an image, a sound, a file, or something else that is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RefusedCall(f"`{where}` is no text, and no list of parts", field=where)
    return "".join(part_text(part, f"{where}[{n}]") for n, part in enumerate(content))


def part_text(part: Any, where: str) -> str:
    """Raises: RefusedCall: the part is no text."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RefusedCall(f"`{where}` is no part: a part is {{type, text}}", field=where)
    kind = part.get("type") or "text"
    if not isinstance(kind, str) or kind not in TEXTS:
        raise RefusedCall(f"`{where}` is of type {shown(kind)}: the model reads text alone", field=where)
    text = part.get(TEXTS[kind])
    if not isinstance(text, str):
        raise RefusedCall(f"`{where}.{TEXTS[kind]}` is no text", field=f"{where}.{TEXTS[kind]}")
    return text
