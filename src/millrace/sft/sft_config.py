"""Configuration of a supervised warm start (`millrace sft`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from millrace.config.tables.section import COUNT_MAX, Count, Device, Section, Seed


class WarmStartModel(Section):
    path: str
    """The model directory to start from."""
    out: str
    """Directory for the trained model. It must not exist yet."""
    device: Device = "auto"
    """`cpu`, `cuda`, `cuda:N` (GPU number N alone, from 0), or `auto`: cuda where there is a GPU."""


class Demonstrations(Section):
    path: str
    """A .jsonl file. Each line is an object with `prompt` and `completion`, as strings or as lists of chat
    messages. Or it has `messages` or `conversations`: each turn of the assistant is learnt."""
    append_eos: bool = True
    """End every completion with the tokenizer's end-of-sequence token. A chat template's own end stays."""


class SupervisedConfig(Section):
    """A warm start: the mean negative log-prob of completion tokens, prompts not trained on."""

    steps: Count = 100
    """Optimizer steps. Examples are drawn without replacement and reshuffled every epoch."""
    seed: Seed = 0
    """Seed of the order of the examples."""
    lr: float = Field(default=1e-5, gt=0, le=1)
    """Peak learning rate. The rate rises over the first 5 % of the steps, then falls to zero."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the matrices of the layers, AdamW for the rest. Often faster from scratch."""
    batch_tokens: int = Field(default=4096, ge=64, le=COUNT_MAX)
    """Tokens per optimizer step, prompts included."""
    token_budget: int = Field(default=8192, ge=64, le=COUNT_MAX)
    """Tokens per packed micro-batch. The budget changes speed and memory, never a gradient."""
    model: WarmStartModel
    data: Demonstrations
