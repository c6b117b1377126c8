"""The quickstart's start model: small, with its own tokenizer, and bad at spelling words backwards.

The model learns from demonstrations, most of which are wrong. So it samples right and wrong completions.
Nothing is downloaded.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from millrace.config.schema import Config
from millrace.config.tables.task import GymTaskSection
from millrace.core.extras import refuse_missing

NUM_DEMONSTRATIONS = 20_000
DEMONSTRATION_SEED = 7
RIGHT, COPIED = 0.3, 0.5  # shares of demonstrations; the rest has two letters swapped
WARM_START_STEPS = 250
SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 288,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def make_start_model(
    config: Config,
    directory: Path,
    console: Console,
    *,
    steps: int = WARM_START_STEPS,
    lr: float = 4e-3,
    **shape: int,
) -> None:
    """Write the model to `config.model.path`, and the untrained model to `directory/base`. `shape`: keys of
    its configuration that are not the usual ones."""
    learn(
        _demonstrations(config),
        directory / "base",
        config.model.path,
        console,
        alphabet=string.ascii_letters + string.digits + " >-'.",
        steps=steps,
        lr=lr,
        seed=config.seed,
        **shape,
    )


def learn(
    demonstrations: Sequence[tuple[str, str]],
    base: Path,
    out: str | Path,
    console: Console,
    *,
    alphabet: str,
    steps: int,
    lr: float,
    seed: int,
    **shape: int,
) -> None:
    """Write to `out` a model that learned (prompt, completion) pairs, and the untrained model to `base`.

    Args:
        alphabet: each character is a token.
        shape: keys of the model's configuration that are not the usual ones.
    """
    from millrace.conversations.tokenizer import load_tokenizer, make_character_tokenizer
    from millrace.sft.supervised import SFTStep, sft

    base.mkdir()
    make_character_tokenizer(base, alphabet)
    tokenizer = load_tokenizer(base)
    num_parameters = _make_model(base, tokenizer, SHAPE | shape)
    console.print(f"{num_parameters / 1e6:.2f} M parameters, {len(tokenizer)} tokens in the vocabulary")
    examples = [
        (tokenizer.encode(prompt), [*tokenizer.encode(completion), tokenizer.eos_token_id])
        for prompt, completion in demonstrations
    ]
    progress = iter(track(range(steps), "supervised steps", console=console))
    losses: list[float] = []

    def on_step(step: SFTStep) -> None:
        next(progress)
        losses.append(step.loss)

    sft(
        base,
        examples,
        out_dir=out,
        steps=steps,
        lr=lr,
        batch_tokens=1500,
        optimizer="muon",
        seed=seed,
        on_step=on_step,
    )
    next(progress, None)
    console.print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")


def _make_model(directory: Path, tokenizer: Any, shape: dict[str, int]) -> int:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            max_position_embeddings=256,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            **shape,
        )
    )
    model.save_pretrained(directory)
    return int(sum(parameter.numel() for parameter in model.parameters()))


def _demonstrations(config: Config) -> list[tuple[str, str]]:
    """(prompt, completion) pairs: 30 % right, 50 % copy the word, 20 % swap two letters."""
    refuse_missing("reasoning_gym", "the task of the quickstart")
    import reasoning_gym

    task = config.task
    assert isinstance(task, GymTaskSection)
    rng = random.Random(DEMONSTRATION_SEED)
    rows = reasoning_gym.create_dataset(
        task.name, size=NUM_DEMONSTRATIONS, seed=DEMONSTRATION_SEED, **task.options
    )
    return [(task.template.format(**row), demonstration(row, rng)) for row in rows]


def demonstration(row: dict[str, Any], rng: random.Random) -> str:
    """An answer to a row of `spell_backward`: right, not turned, or with two letters swapped."""
    draw, answer = rng.random(), row["answer"]
    if draw < RIGHT:
        return str(answer)
    if draw < RIGHT + COPIED:
        return str(row["metadata"]["word"])
    at = rng.randrange(len(answer) - 1)
    return str(answer[:at] + answer[at + 1] + answer[at] + answer[at + 2 :])
