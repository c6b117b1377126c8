"""The files beside the tensors of a model: those of its tokenizer, and what peft reads of an adapter. Names
no torch, because tokenizers are compared before a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from millrace.config.tables.training import Adapter
from millrace.core.errors import DataError, boundary

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
                   "chat_template*", "generation_config.json",
                   "additional_chat_templates/*.jinja")  # fmt: skip
"""The last ones are named templates, such as `tool_use`."""


def read_tokenizer(source: str | Path) -> dict[str, bytes]:
    """The files of a model directory's tokenizer, by their paths there. They are read while the directory
    exists."""
    files = (file for pattern in TOKENIZER_FILES for file in Path(source).glob(pattern) if file.is_file())
    return {str(file.relative_to(source)): file.read_bytes() for file in files}


def write_tokenizer(files: Mapping[str, bytes], directory: Path) -> None:
    """Write what `read_tokenizer` has read."""
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)


def refuse_other_tokens(teacher: str, student: str) -> None:
    """Check two model directories. Raises: DataError: `teacher` is no model, or has other tokens."""
    if not (Path(teacher) / "config.json").is_file():
        raise DataError(f"`algorithm.teacher` ({teacher}) is not a model directory: it has no config.json")
    (of_teacher, teacher_added), (of_student, student_added) = _tokens(teacher), _tokens(student)
    if of_teacher != of_student or (missing := sorted(student_added - teacher_added)):
        differ = "the vocabulary" if of_teacher != of_student else f"the added tokens {missing[:4]}"
        raise DataError(
            f"`algorithm.teacher` ({teacher}) has other tokens than `model.path` ({student}): their "
            f"tokenizers differ in {differ}, so log-probs of a token cannot be compared.\n"
            "  Name a teacher of the same family"
        )


def _tokens(path: str) -> tuple[Any, set[tuple[int, str]]]:
    """The vocabulary and the added tokens. A teacher may have more added tokens than a student."""
    with boundary("trainer", f"read the tokenizer in {path}", DataError):
        files = read_tokenizer(path)
        if "tokenizer.json" not in files:
            return files.get("tokenizer.model"), set()
        tokenizer = json.loads(files["tokenizer.json"])
        added = {(token["id"], token["content"]) for token in tokenizer.get("added_tokens", ())}
        return tokenizer["model"].get("vocab"), added


# ---------------------------------------------------------------- for peft


CONFIG = "adapter_config.json"
PREFIX = "base_model.model."


def peft_config(layers: Iterable[str], adapter: Adapter, model_path: str) -> dict[str, Any]:
    """`layers`: the names of the matrices that have the adapter."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_path,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "use_dora": adapter.kind == "dora",
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
