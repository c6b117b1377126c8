"""The two tasks of the whole-loop benchmarks, and a small start model for each. Nothing is downloaded.

short    chain_sum, 3 to 6 one-digit terms, with a scratchpad: completions are short and even.
uneven   count down from n to 1, n log-normal with p99 = 10 x median: a few completions are very long.

Both are answered by `<answer>...</answer>` or a sequence that has to be exact, and demonstrations are noisy,
so that the start samples right and wrong and reinforcement learning has something to choose.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ANSWER = r"<answer>(.*?)</answer>"
DIRECT, SLIP = 0.35, 0.10  # short: answered without a scratchpad; a step that is off by a little
COUNT_MEDIAN, COUNT_SIGMA, COUNT_MAX = 20, 0.99, 240
JUMP = 0.03  # uneven: a number that is left out


@dataclass(frozen=True)
class Task:
    """`extract` finds the answer in a completion (None: all of it)."""

    name: str
    max_tokens: int
    max_sequence_tokens: int
    extract: str | None
    sft_steps: int


QUICK = "BENCHMARK_QUICK" in os.environ
"""As `common.QUICK`, which no peer can import."""
TASKS = {
    "short": Task("short", max_tokens=96, max_sequence_tokens=160, extract=ANSWER, sft_steps=420),
    "uneven": Task("uneven", max_tokens=256, max_sequence_tokens=272, extract=None, sft_steps=260),
}
if QUICK:
    TASKS = {name: replace(task, max_tokens=16) for name, task in TASKS.items()}


def write_prompts(task: Task, path: Path, *, count: int, seed: int) -> None:
    """`count` rows {"prompt", "answer"} as JSON lines."""
    make = _sums if task.name == "short" else _countdowns
    rng = random.Random(seed)
    with path.open("w") as file:
        for _, (prompt, answer, _) in zip(range(count), make(rng, uniform=False), strict=False):
            file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")


def make_start(task: Task, directory: Path) -> Path:
    """A Hugging Face directory with the supervised start model of `task`, made once; or a random one."""
    out = directory / f"start-{task.name}"
    if QUICK and not out.exists():
        return make_untrained(task, out, hidden=32, layers=2)
    if not (out / "model.safetensors").exists():
        base = directory / f"base-{task.name}"
        shutil.rmtree(base, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
        pairs = _demonstrations(task)
        tokenizer = _tokenizer(task, [prompt + completion for prompt, completion in pairs[:2000]])
        tokenizer.save_pretrained(base)
        untrained(tokenizer).save_pretrained(base)
        _supervise(task, tokenizer, pairs, base, out)
    return out


def make_untrained(task: Task, directory: Path, *, hidden: int, layers: int, **shape: Any) -> Path:
    """A random model with the tokenizer of `task`, for what does not depend on what it says. `shape`: other
    keys of its configuration. A vocabulary beyond the tokenizer's has tokens without text."""
    tokenizer = _tokenizer(task, [prompt + completion for prompt, completion in _demonstrations(task)[:2000]])
    tokenizer.save_pretrained(directory)
    untrained(tokenizer, hidden=hidden, layers=layers, **shape).save_pretrained(directory)
    return directory


# ---------------------------------------------------------------- rows


def _sums(rng: random.Random, *, uniform: bool) -> Iterator[tuple[str, str, str]]:
    """(prompt, answer, a noisy demonstration)."""
    while True:
        terms = [rng.randint(1, 9) for _ in range(rng.randint(3, 6))]
        signs = [rng.choice("+-") for _ in terms[1:]]
        question = f"{terms[0]}" + "".join(f" {s} {t}" for s, t in zip(signs, terms[1:], strict=True))
        total = terms[0] + sum(t if s == "+" else -t for s, t in zip(signs, terms[1:], strict=True))
        prompt = f"State the final answer to the following arithmetic problem: {question} =\n"
        yield prompt, str(total), _scratchpad(terms, signs, total, rng)


def _scratchpad(terms: list[int], signs: list[str], total: int, rng: random.Random) -> str:
    if rng.random() < DIRECT:
        return f"<answer>{total}</answer>"
    so_far, lines = terms[0], []
    for sign, term in zip(signs, terms[1:], strict=True):
        after = so_far + term if sign == "+" else so_far - term
        if rng.random() < SLIP:
            after += rng.choice([-2, -1, 1, 2])
        lines.append(f"{so_far} {sign} {term} = {after}")
        so_far = after
    return "; ".join(lines) + f" <answer>{so_far}</answer>"


def _countdowns(rng: random.Random, *, uniform: bool) -> Iterator[tuple[str, str, str]]:
    while True:
        drawn = rng.lognormvariate(0.0, COUNT_SIGMA) * COUNT_MEDIAN
        first = rng.randint(2, COUNT_MAX) if uniform else min(COUNT_MAX, max(2, round(drawn)))
        numbers = range(first, 0, -1)
        shown = [n for n in numbers if n == first or rng.random() >= JUMP]
        yield f"from {first} :", " ".join(map(str, numbers)), " ".join(map(str, shown))


# ---------------------------------------------------------------- the start model


def _demonstrations(task: Task) -> list[tuple[str, str]]:
    make = _sums if task.name == "short" else _countdowns
    rows = make(random.Random(1), uniform=True)
    count = 30_000 if task.name == "short" else 6_000
    return [(prompt, shown) for _, (prompt, _, shown) in zip(range(count), rows, strict=False)]


def _tokenizer(task: Task, texts: list[str]) -> Any:
    """Short: byte pairs with single digits. Uneven: a word is a token, so a count is its length."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|pad|>", "<|end|>"]
    if task.name == "short":
        backend = Tokenizer(models.BPE())
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=special, initial_alphabet=alphabet)
        backend.train_from_iterator(texts, trainer)
    else:
        words = [*special, "from", ":", *map(str, range(1, COUNT_MAX + 1))]
        backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|pad|>"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>", padding_side="left"
    )


def untrained(tokenizer: Any, *, hidden: int = 128, layers: int = 4, **shape: Any) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    shape = {
        "vocab_size": len(tokenizer),
        "intermediate_size": 3 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
    } | shape
    config = Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **shape,
    )
    return Qwen3ForCausalLM(config)


def _supervise(task: Task, tokenizer: Any, pairs: list[tuple[str, str]], base: Path, out: Path) -> None:
    from millrace.sft.supervised import sft

    end = tokenizer.eos_token_id
    examples = [(tokenizer.encode(p), [*tokenizer.encode(c), end]) for p, c in pairs]
    sft(
        base,
        examples,
        out_dir=out,
        steps=task.sft_steps,
        lr=4e-3,
        batch_tokens=2500,
        optimizer="muon",
    )


def reward(completion: str, answer: str, extract: str | None) -> float:
    """1 if the (last extracted) answer equals the reference as text, as `reward.kind = "exact"` has it."""
    found = [completion] if extract is None else re.findall(extract, completion)
    return float(bool(found) and found[-1].strip() == answer)
