"""Prompts as a run makes them, and completions of the own engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT

from millrace.config.load import load
from millrace.conversations.tokenizer import encode
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.types import Sampling, Work
from millrace.engines.own.load_engine import load_engine
from millrace.tasks.tasks import make_task

TASKS = "arithmetic", "form", "tool"
OPEN = (
    "Write a short story about a lighthouse.",
    "Write a Python function that counts the words in a file, with comments.",
    "Tell me a joke with three emojis.",
    "Translate 'good morning, my friend' into Japanese, Russian, Arabic and Hindi.",
    "Write a table in Markdown with five planets and their moons.",
    "Write a LaTeX formula for the area of a circle and explain every symbol.",
    "Give me a recipe for pancakes, with amounts in grams.",
    "Écris un poème de quatre vers sur l'hiver.",
    "用中文写一句关于春天的话。",
    "What is the difference between TCP and UDP?",
    "Write the numbers from 990 to 1010, separated by commas.",
    "Write HTML for a page with a heading, two links and a list.",
)
"""Questions that let the model write what it likes, in several scripts."""
TEMPERATURES = 1.0, 0.7
OPEN_TOKENS = 96
SAMPLES = 8
"""Completions of a prompt, one half at each temperature."""


class Asked(NamedTuple):
    """A prompt, by the task that it is of, and the most tokens of its completions."""

    task: str
    tokens: list[int]
    max_tokens: int


class Completion(NamedTuple):
    """`logprobs`: of the distribution that it was sampled from, at its temperature; greedy: at 1."""

    asked: Asked
    temperature: float
    tokens: list[int]
    logprobs: list[float]


def prompts(model: Path, tokenizer: Any, number: int) -> list[Asked]:
    """So many prompts, in turns of each task and open ones."""
    each = [_of_task(name, model, tokenizer, -(-number // 4)) for name in TASKS]
    messages = ([{"role": "user", "content": question}] for question in OPEN)
    opened = [
        tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in messages
    ]
    each.append([Asked("open", encode(tokenizer, text), OPEN_TOKENS) for text in opened])
    return [each[n % 4][n // 4 % len(each[n % 4])] for n in range(number)]


def _of_task(name: str, model: Path, tokenizer: Any, number: int) -> list[Asked]:
    config = load(ROOT / "examples" / "real" / f"{name}.toml", [f"model.path={model.resolve()}"])
    task = make_task(config.one_task, tokenizer)
    texts = [task.prompt_text(row) for row in range(min(number, task.rows))]
    return [Asked(name, encode(tokenizer, text), config.sampling.max_tokens) for text in texts]


def sampled(model: Path, asked: Sequence[Asked], number: int) -> list[Completion]:
    """So many completions."""
    each = [(asked[n // SAMPLES % len(asked)], TEMPERATURES[n % len(TEMPERATURES)]) for n in range(number)]
    return _completed(model, each, slots=32)


def greedy(model: Path, asked: Sequence[Asked]) -> list[Completion]:
    return _completed(model, [(one, 0.0) for one in asked], slots=min(len(asked), 32))


def _completed(model: Path, each: Sequence[tuple[Asked, float]], slots: int) -> list[Completion]:
    room = max(len(asked.tokens) + asked.max_tokens for asked, _ in each)
    engine = load_engine(str(model), device="cpu", slots=slots, max_sequence_tokens=room)
    engine.submit(
        Work(
            number,
            number // SAMPLES,
            0,
            token_array(asked.tokens),
            token_array(),
            Sampling(max_tokens=asked.max_tokens, temperature=temperature),
            seed=number,
        )
        for number, (asked, temperature) in enumerate(each)
    )
    columns = [TokenColumns() for _ in each]
    while engine.has_work or engine.has_finished:
        engine.step()
        for progress in engine.take_progress():
            columns[progress.trajectory_id].extend(progress.columns)
    engine.close()
    return [
        Completion(asked, temperature, column.tokens.tolist(), column.logprobs.tolist())
        for (asked, temperature), column in zip(each, columns, strict=True)
    ]
