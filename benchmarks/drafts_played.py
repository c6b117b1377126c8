"""Batches of a task whose rows repeat over epochs, and an engine that samples them."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import sized
from peers.start import Task, write_prompts

from millrace.core.completion.columns import token_array
from millrace.core.types import Sampling, Work
from millrace.engines.own.torch_engine import TorchEngine

ROWS, PROMPTS, GROUP, EPOCHS = sized((32, 8, 4, 4), (4, 2, 2, 2))
ROWS_MAX = 8


@dataclass
class Played:
    """What an engine did since the second epoch. `columns`: tokens and log-probs, by trajectory."""

    batch_s: float = 0.0
    tail_s: float = 0.0
    tail_tokens: int = 0
    columns: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)


def batches(task: Task, tokenizer: Any, *, seed: int) -> Iterator[tuple[int, list[Work]]]:
    """Each batch with its epoch."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "rows.jsonl"
        write_prompts(task, path, count=ROWS, seed=seed)
        texts = [json.loads(line)["prompt"] for line in path.read_bytes().splitlines()]
    prompts = [token_array(tokenizer.encode(text)) for text in texts]
    sampling, rng, group = Sampling(max_tokens=task.max_tokens), random.Random(seed), 0
    for epoch in range(EPOCHS):
        order = rng.sample(range(ROWS), ROWS)
        for begin in range(0, ROWS, PROMPTS):
            works = []
            for row in order[begin : begin + PROMPTS]:
                ids = range(group * GROUP, (group + 1) * GROUP)
                works += [Work(i, group, 0, prompts[row], token_array(), sampling, seed) for i in ids]
                group += 1
            yield epoch, works


def play(engine: TorchEngine, works: list[Work], played: Played, *, timed: bool) -> None:
    engine.submit(works)
    began_s, tail_s, before = time.thread_time(), None, 0
    while engine.has_work or engine.has_finished:
        load = engine.load()
        if tail_s is None and load.running and not load.waiting and load.running <= ROWS_MAX:
            tail_s, before = time.thread_time(), load.generated_tokens
        engine.step()
        for part in engine.take_progress():
            tokens, logprobs = played.columns.setdefault(part.trajectory_id, ([], []))
            tokens += part.columns.tokens
            logprobs += part.columns.logprobs
    if timed:
        ended_s = time.thread_time()
        played.batch_s += ended_s - began_s
        played.tail_s += ended_s - (ended_s if tail_s is None else tail_s)
        played.tail_tokens += engine.load().generated_tokens - before
