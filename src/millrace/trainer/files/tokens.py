"""The files of a tokenizer, and whether two of them call tokens alike. Names no torch: asked before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from millrace.core.errors import DataError, boundary

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
                   "chat_template*", "generation_config.json")  # fmt: skip


def read_tokenizer(source: str | Path) -> dict[str, bytes]:
    """The files of a model directory's tokenizer, by name: taken while that directory is there."""
    return {
        file.name: file.read_bytes() for pattern in TOKENIZER_FILES for file in Path(source).glob(pattern)
    }


def refuse_other_tokens(teacher: str, student: str) -> None:
    """Directories. Raises: DataError: the teacher's is no model, or calls its tokens otherwise."""
    if not (Path(teacher) / "config.json").is_file():
        raise DataError(f"`algorithm.teacher` ({teacher}) is not a model directory: it has no config.json")
    (vocabulary, added), (own, own_added) = _tokens(teacher), _tokens(student)
    if vocabulary != own or (odd := sorted(own_added - added)):
        differ = "the vocabulary" if vocabulary != own else f"the added tokens {odd[:4]}"
        raise DataError(
            f"`algorithm.teacher` ({teacher}) has other tokens than `model.path` ({student}): their "
            f"tokenizers differ in {differ}, so log-probs of a token cannot be compared.\n"
            "  Name a teacher of the same family"
        )


def _tokens(path: str) -> tuple[Any, set[tuple[int, str]]]:
    """The vocabulary, and what is added to it. A teacher may have more of the latter."""
    with boundary("trainer", f"read the tokenizer in {path}", DataError):
        files = read_tokenizer(path)
        if "tokenizer.json" not in files:
            return files.get("tokenizer.model"), set()
        found = json.loads(files["tokenizer.json"])
        added = {(token["id"], token["content"]) for token in found.get("added_tokens", ())}
        return found["model"].get("vocab"), added
