"""Configuration of a supervised warm start (`millrace sft`)."""

from __future__ import annotations

from pydantic import Field

from millrace.config.schema import Optimizer, Section


class WarmStartModel(Section):
    path: str
    """The model directory to start from."""
    out: str
    """Where the trained model is saved. Must not exist yet, or be empty."""


class Demonstrations(Section):
    path: str
    """A .jsonl file; each line an object with the strings `prompt` and `completion`."""


class SupervisedConfig(Section):
    """A warm start: next-token loss on completions only."""

    model: WarmStartModel
    data: Demonstrations
    steps: int = Field(default=100, ge=1)
    """Optimizer steps; the data are repeated in a new order as often as needed."""
    seed: int = 0
    batch_tokens: int = Field(default=4096, ge=64)
    """Tokens per optimizer step, prompts included."""
    append_eos: bool = True
    """End every completion with the tokenizer's end-of-sequence token."""
    optimizer: Optimizer = Optimizer(lr=1e-5)
