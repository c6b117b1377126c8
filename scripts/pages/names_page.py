"""The page of public names as Markdown, made from signatures and docstrings.

`python -m scripts.pages.names_page FILE` writes it into FILE.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import millrace
from millrace.core.errors import MillraceError

_SECTIONS = ("Args:", "Returns:", "Raises:")
_ENTRY = re.compile(r"([\w, ]+): (.*)")


def page() -> str:
    """A heading, and every name of `millrace.__all__`."""
    return f"# Names of `millrace`\n\n{reference(millrace.__all__)}"


def reference(names: Sequence[str]) -> str:
    """Functions, classes, errors of `millrace.__all__`."""
    public = {name: getattr(millrace, name) for name in names}
    errors = {n: v for n, v in public.items() if isinstance(v, type) and issubclass(v, MillraceError)}
    classes = {n: v for n, v in public.items() if isinstance(v, type) and n not in errors}
    functions = {n: v for n, v in public.items() if n not in errors and n not in classes}
    texts = [text for name, function in functions.items() for text in _function(f"millrace.{name}", function)]
    texts += [text for name, kind in classes.items() for text in _class(name, kind)]
    lines = [f"- `millrace.{name}`: {_line(_doc(kind))}" for name, kind in errors.items()]
    texts += ["## Errors", *lines] if lines else []
    return "\n\n".join(texts).replace("\n\n- ", "\n- ").replace("## Errors\n-", "## Errors\n\n-") + "\n"


def _function(name: str, function: Any) -> Iterator[str]:
    yield f"## `{name}`"
    if callable(function):
        yield _shown(_signature(function, name.rpartition(".")[2]))
    yield from _text(_doc(function))


def _class(name: str, kind: type) -> Iterator[str]:
    yield f"## `millrace.{name}`"
    yield from _text(_doc(kind))
    if dataclasses.is_dataclass(kind):
        yield "Fields: " + ", ".join(f"`{field.name}`" for field in dataclasses.fields(kind)) + "."
    if name == "Config":
        yield "`millrace keys` prints its keys."
        return
    shown = {member: value for member, value in vars(kind).items() if not member.startswith("_")}
    properties = [(member, value) for member, value in shown.items() if isinstance(value, property)]
    if properties:
        yield "**Properties**"
        yield "\n".join(f"- `{member}`: {_line(_doc(value))}" for member, value in properties)
    for member, value in shown.items():
        if inspect.isfunction(value):
            yield f"### `{name}.{member}`"
            yield _shown(_signature(value, member))
            yield from _text(_doc(value))


def _shown(signature: str) -> str:
    """A signature of one line in the text, a longer one as a block."""
    if "\n" in signature:
        return f"```python\n{signature}\n```"
    return f"`{signature.removeprefix('def ').removesuffix(': ...')}`"


def _signature(function: Callable[..., Any], name: str) -> str:
    signature = inspect.signature(function)
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
    text = f"def {name}{signature.replace(parameters=kept)}: ...".replace("'", "")
    if len(text) <= 100:
        return text
    inner = "".join(f"    {parameter},\n" for parameter in _parameters(kept))
    return f"def {name}(\n{inner}) -> {signature.return_annotation}: ...".replace("'", "")


def _parameters(parameters: list[inspect.Parameter]) -> Iterator[str]:
    kinds = inspect.Parameter
    starred = False
    for parameter in parameters:
        if parameter.kind is kinds.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        yield str(parameter)


def _text(doc: str) -> Iterator[str]:
    """Paragraphs, and a list for each section of a docstring."""
    section = ""
    for paragraph in re.split(r"\n\s*\n|\n(?=(?:Args|Returns|Raises):)", doc):
        head, _, rest = paragraph.partition("\n")
        if head not in _SECTIONS:
            yield _line(paragraph)
            continue
        section = head.removesuffix(":")
        items = [_line(rest)] if section == "Returns" else list(_items(rest))
        listed = "\n".join(f"- {item}" for item in items)
        yield f"**{section}** {items[0]}" if len(items) == 1 else f"**{section}**\n\n{listed}"


def _items(text: str) -> Iterator[str]:
    """`name: what` per item; a line that is indented deeper continues its item."""
    item = ""
    for line in inspect.cleandoc(text).splitlines():
        if line.startswith(" "):
            item += " " + line.strip()
            continue
        if item:
            yield item
        entry = _ENTRY.fullmatch(line)
        item = f"`{entry[1]}`: {entry[2]}" if entry else line
    yield item


def _doc(thing: Any) -> str:
    return inspect.getdoc(thing) or ""


def _line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(page(), encoding="utf-8")
