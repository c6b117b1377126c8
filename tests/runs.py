"""Small real runs for tests: a random two-layer model, a gym task, real processes."""

from __future__ import annotations

import asyncio
import json
import string
from pathlib import Path
from typing import Any

from millrace.config.load import load
from millrace.core.events import Event, Sink
from millrace.observe.sinks.jsonl import read_events
from millrace.run import compose
from millrace.run_directory import run_directory
from millrace.run_directory.run_directory import RunDirectory

CONFIG = """
steps = 4
seed = 3

[model]
path = "start"
device = "cpu"

[task]
kind = "gym"
name = "spell_backward"
options = { min_word_len = 3, max_word_len = 5 }
template = "{metadata[word]}>"

[reward]
kind = "gym"
threshold = 0.0

[batch]
prompts = 4
group_size = 4

[sampling]
max_tokens = 16

[optimizer]
lr = 1e-3

[schedule]
kind = "synchronous"

[rollout]
replicas = 2
slots = 8
max_sequence_tokens = 32
exact = true
report_interval_s = 0.02

[checkpoints]
every = 2

[observe]
tensorboard = false
"""


def make_start(directory: Path, head_dim: int = 16) -> Path:
    """A model directory and a configuration file beside it. Returns the latter."""
    from millrace.conversations.tokenizer import make_character_tokenizer

    make_character_tokenizer(directory / "start", string.ascii_letters + string.digits + " >-'.")
    make_model(directory / "start", head_dim)
    path = directory / "run.toml"
    path.write_text(CONFIG)
    return path


def make_model(directory: Path, head_dim: int = 16, **shape: int) -> None:
    """A random model beside its tokenizer. `shape`: keys of its configuration that are not the usual ones."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from millrace.conversations.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(directory)
    torch.manual_seed(0)
    usual = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
    }
    config = Qwen3Config(
        **usual | shape,
        vocab_size=len(tokenizer),
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


def train(config_file: Path, run_dir: Path, *overrides: str, sinks: tuple[Sink, ...] = ()) -> RunDirectory:
    """One run in real processes, to its end."""
    run = run_directory.create(config_file.stem, run_dir)
    asyncio.run(compose.train(load(config_file, overrides), run, asyncio.Event(), *sinks))
    return run


def events(run: RunDirectory, kind: str) -> list[Event]:
    return [event for event in read_events(run.events) if event.kind == kind]


def summary(run: RunDirectory) -> dict[str, Any]:
    return dict(json.loads(run.summary.read_text()))


def weights(run: RunDirectory) -> bytes:
    """The exported model's tensors, byte for byte."""
    return (run.model / "model.safetensors").read_bytes()
