"""What the parts of a node are given: models, GPUs and sizes, and the configuration of a run."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sparse_models import SHAPES
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config

from gpu import Sizes
from millrace.conversations.tokenizer import load_tokenizer, make_character_tokenizer

Figures = dict[str, Any]
Note = Callable[[Figures], None]

LARGE_FROM_GPUS = 4
"""With fewer GPUs the states of 7 B parameters do not fit, and the large model has 0.6 B."""
LARGE_PARAMETERS = 6_000_000_000
"""Figures that are gated at 7B count from this size on."""
RANDOM_BLOCK = 1 << 24
REWARD = Path(__file__).with_name("reward.py")


@dataclass(frozen=True)
class Setting:
    """`model`: a directory for the large model; None: random weights. `kept`: where models are made once.
    `scratch`: where runs write."""

    rehearse: bool
    gpus: int
    kept: Path
    scratch: Path
    model: Path | None = None

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    @property
    def dtype(self) -> str:
        return "float32" if self.rehearse else "bfloat16"

    def sized(self, full: Any, tiny: Any) -> Any:
        return tiny if self.rehearse else full

    def large(self) -> Path:
        """The model whose size the figures are about."""
        if self.model is not None:
            return self.model.resolve()
        return self._made("7B" if self.gpus >= LARGE_FROM_GPUS else "0.6B")

    def small(self) -> Path:
        """A model that one GPU trains."""
        return self._made("0.6B")

    def _made(self, size: str) -> Path:
        directory = self.kept / f"{size}{'-tiny' if self.rehearse else ''}"
        if not (directory / "config.json").exists():
            make_random(self._shape(size), directory)
        return directory

    def _shape(self, size: str) -> PretrainedConfig:
        if size == "0.6B":
            return Sizes(self.rehearse).config(size)
        shape = dict(SHAPES["7b"])
        if self.rehearse:
            shape |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
            shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 5120}
        return Qwen2Config(**shape, max_position_embeddings=32_768, bos_token_id=None)

    def configuration(self, path: Path, *, ranks: int = 1, replicas: int = 1, **sections: Any) -> Figures:
        """A run's configuration. `sections`: keys beside those here, or in their place."""
        tree: Figures = {
            "steps": 1,
            "seed": 1,
            "model": {"path": str(path), "device": self.device, "dtype": self.dtype, "recompute": True},
            "task": {"kind": "gym", "name": "chain_sum"},
            "reward": {"kind": "function", "path": f"{REWARD}:parity"},
            "batch": {"prompts": self.sized(16, 4), "group_size": self.sized(8, 4)},
            "sampling": {"max_tokens": self.sized(512, 48), "ignore_eos": True},
            "trainer": {"shard": ranks},
            "schedule": {"kind": "areal", "eta": 2},
            "rollout": {
                "replicas": replicas,
                "slots": self.sized(32, 8),
                "max_sequence_tokens": self.sized(1024, 192),
                "report_interval_s": self.sized(0.1, 0.01),
            },
            "observe": {"tensorboard": False},
        }
        for section, keys in sections.items():
            tree[section] = tree[section] | keys if isinstance(tree.get(section), dict) else keys
        return tree

    def prompts(self, model: Path, count: int) -> list[list[int]]:
        """Token ids of `count` questions."""
        tokenizer = load_tokenizer(model)
        questions = (
            f"What is {7 * i % 97} + {5 * i % 89} * {i % 11}? Explain each step." for i in range(count)
        )
        return [list(tokenizer.encode(question)) for question in questions]


def toml(tree: Mapping[str, Any]) -> str:
    """A configuration as the text of a file."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in _leaves(tree))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def make_random(shape: PretrainedConfig, directory: Path) -> None:
    """Random weights in bfloat16 and a tokenizer of characters, as a Hugging Face directory."""
    part = directory.with_name(f"{directory.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    make_character_tokenizer(part, string.printable)
    tokenizer = load_tokenizer(part)
    shape.eos_token_id, shape.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    block = torch.randn(RANDOM_BLOCK, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    for name, weight in model.named_parameters():
        _fill(name, weight.detach().view(-1), block)
    model.save_pretrained(part)
    part.rename(directory)


def _fill(name: str, values: torch.Tensor, block: torch.Tensor) -> None:
    """One block of random numbers again and again: quick on a host."""
    if "norm" in name:
        values.fill_(1.0)
        return
    for begin in range(0, len(values), len(block)):
        values[begin : begin + len(block)] = block[: len(values) - begin]
