"""Supervised training from a file of demonstrations, so that rewards have something to reinforce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from millrace.conversations.tokenizer import check_characters, encode, encode_prompt
from millrace.core.errors import DataError
from millrace.sft.sft_config import SupervisedConfig
from millrace.tasks.data_files import refuse_packed
from millrace.tasks.row_lines import JsonLines, Row

LINES = 20  # of progress, at most

Example = tuple[list[int], list[int]]


def warm_start(config: SupervisedConfig, report: Any) -> None:
    """Train and save. `report` gets about twenty lines of progress."""
    from millrace.conversations.tokenizer import load_tokenizer
    from millrace.sft.supervised import SFTStep, sft

    examples = read_examples(
        Path(config.data.path), load_tokenizer(config.model.path), append_eos=config.data.append_eos
    )
    every = max(1, config.steps // LINES)

    def on_step(step: SFTStep) -> None:
        if (step.step + 1) % every == 0 or step.step + 1 == config.steps:
            speed = step.tokens / step.step_s
            report(f"step {step.step + 1}/{config.steps}  loss {step.loss:.4f}  {speed:,.0f} tokens/s")

    sft(
        config.model.path,
        examples,
        out_dir=config.model.out,
        steps=config.steps,
        lr=config.lr,
        batch_tokens=config.batch_tokens,
        optimizer=config.optimizer,
        row_tokens=config.token_budget,
        seed=config.seed,
        device=config.model.device,
        on_step=on_step,
    )


def read_examples(path: Path, tokenizer: Any, *, append_eos: bool) -> list[Example]:
    """Token ids of each line's prompt and completion.

    They are tokenized apart, as in training with rewards: the completion's tokens never depend on how
    the prompt ends.

    Raises: DataError naming the line.
    """
    if not path.is_file():
        raise DataError(f"`data.path` ({path}) is not a file")
    if append_eos and tokenizer.eos_token_id is None:
        raise DataError(
            "`data.append_eos` is true, but the tokenizer has no end-of-sequence token.\n"
            "  Give it one (`eos_token` in tokenizer_config.json), or set `data.append_eos` to false"
        )
    refuse_packed(path)
    end = [tokenizer.eos_token_id] if append_eos else []
    examples = []
    rows = JsonLines(path)
    for index in range(len(rows)):
        prompt, completion = _pair(rows[index], f"{path}:{rows.place(index)}")
        examples.append((encode_prompt(tokenizer, prompt), encode(tokenizer, completion) + end))
    if not examples:
        raise DataError(f"`data.path` ({path}) has no lines")
    return examples


def _pair(row: Row, where: str) -> tuple[str, str]:
    if not {"prompt", "completion"} <= row.keys():
        raise DataError(f"{where}: a line is an object with `prompt` and `completion`; this has {list(row)}")
    pair = row["prompt"], row["completion"]
    if not all(isinstance(text, str) for text in pair):
        raise DataError(f"{where}: `prompt` and `completion` must be strings")
    for name, text in zip(("prompt", "completion"), pair, strict=True):
        check_characters(f"{where}: the {name}", text)
    return pair
