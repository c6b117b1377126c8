"""Configuration of a supervised warm start (`millrace sft`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from millrace.config.schema import COUNT_MAX, Count, Section, Seed


class WarmStartModel(Section):
    path: str
    """The model directory to start from."""
    out: str
    """Where the trained model is saved; a directory that does not exist yet."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: cuda where there is one."""


class Demonstrations(Section):
    path: str
    """A .jsonl file; each line an object with the strings `prompt` and `completion`."""
    append_eos: bool = True
    """End every completion with the tokenizer's end-of-sequence token."""


class SupervisedConfig(Section):
    """A warm start: the mean negative log-prob of completion tokens, prompts not trained on."""

    steps: Count = 100
    """Optimizer steps; examples are drawn without replacement and reshuffled every epoch."""
    seed: Seed = 0
    """Of the order of the examples."""
    lr: float = Field(default=1e-5, gt=0, le=1)
    """Peak learning rate: warms up over the first 5 % of the steps, then falls to zero."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the matrices of the layers, AdamW for the rest; often faster from scratch."""
    batch_tokens: int = Field(default=4096, ge=64, le=COUNT_MAX)
    """Tokens per optimizer step, prompts included."""
    token_budget: int = Field(default=8192, ge=64, le=COUNT_MAX)
    """Tokens per packed micro-batch; changes speed and memory, never a gradient."""
    model: WarmStartModel
    data: Demonstrations
