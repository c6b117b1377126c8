"""The text part of a model that also reads images, as a model directory of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open

from millrace.core.errors import DataError
from millrace.core.supported import TRAINER
from millrace.placement.model_directory import read_model_config
from millrace.trainer.files.rewritten import Tensors, rewrite

NAMES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
"""How names of the text part begin in files, and how they begin in a model of text."""
SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
"""Keys that files have beside the text part's configuration, and that are about its tokens or numbers."""


def write_text_part(model: Path, out: Path) -> None:
    """Write the text part of `model` to `out`, tensor by tensor as it is.

    Raises: DataError: `model` has no text part, or one of a family that the trainer does not run.
    """
    rewrite(model, out, _text_config(model), _of_text)


def _text_config(model: Path) -> dict[str, Any]:
    config = read_model_config(model)
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise DataError(f"{model} has no text part: its config.json has no `text_config`. Use it as it is")
    if text.get("model_type") not in TRAINER.families:
        raise DataError(
            f"{model}: its text part is of the family {text.get('model_type')!r}, which the trainer does not "
            f"run.\n  It runs {', '.join(TRAINER.families)}"
        )
    return {key: config[key] for key in SHARED if key in config} | text


def _of_text(path: Path) -> Tensors:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            for begin, replaced in NAMES.items():
                if name.startswith(begin):
                    yield replaced + name.removeprefix(begin), file.get_tensor(name)
                    break
