"""Turns in the torch engine, with keys and values that stay between them, and without, for `turns.py`."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
from common import medians, say, sized
from engine import make_model

from millrace.core.completion.columns import token_array
from millrace.core.types import Sampling, Work
from millrace.engines.own.load_engine import load_engine
from millrace.engines.own.torch_engine import TorchEngine

EPISODES, EPISODE_TURNS, ROUNDS = sized((8, 8, 4), (4, 3, 1))
PROMPT, OBSERVED, SAMPLED = sized((256, 96, 24), (32, 16, 8))
MODEL = sized((256, 4), (64, 1))  # hidden size, layers
ANSWER_STEPS = 12
VOCAB = 512


def engine_of(directory: str, *, keep_kv: bool) -> TorchEngine:
    longest = PROMPT + EPISODE_TURNS * (4 * SAMPLED + OBSERVED)
    options = {"slots": EPISODES, "max_sequence_tokens": longest, "keep_kv": keep_kv}
    return load_engine(directory, device="cpu", **options)


def turn_of(episode: int, lease: int, tokens: Sequence[int]) -> Work:
    """The next turn behind `tokens`. It has `SAMPLED` tokens on average, and four times as many at most."""
    ends = tuple(range(VOCAB // SAMPLED))
    sampling = Sampling(max_tokens=len(tokens) + 4 * SAMPLED, stop_token_ids=ends)
    prompt = np.random.default_rng(episode).integers(VOCAB, size=PROMPT).tolist()
    return Work(
        episode, episode, lease, prompt, token_array(tokens), sampling, seed=1, turn_start=len(tokens)
    )


def play_episodes(engine: TorchEngine, first: int) -> int:
    """Play `EPISODES` episodes from the id `first` on. Returns how many tokens were sampled."""
    text = np.random.default_rng(first)
    tokens = {first + i: list[int]() for i in range(EPISODES)}
    turns, sampled, steps = Counter[int](), 0, 0
    due = [(0, episode) for episode in tokens]  # the step at which the next turn begins
    while due or engine.has_work or engine.has_finished:
        steps += 1
        begin = [episode for step, episode in due if step <= steps]
        due = [(step, episode) for step, episode in due if step > steps]
        engine.submit(turn_of(one, turns[one], tokens[one]) for one in begin)
        engine.step()
        for part in engine.take_progress():
            tokens[part.trajectory_id] += part.columns.tokens
            sampled += len(part.columns)
            if part.finish is not None:
                turns[part.trajectory_id] += 1
                if turns[part.trajectory_id] < EPISODE_TURNS:
                    tokens[part.trajectory_id] += text.integers(VOCAB, size=OBSERVED).tolist()
                    due.append((steps + int(text.integers(2 * ANSWER_STEPS)), part.trajectory_id))
    return sampled


def kept() -> dict[str, float]:
    """After a round of warm-up, rounds of both engines in turns."""
    with tempfile.TemporaryDirectory() as directory:
        make_model(directory, *MODEL)
        engines = {name: engine_of(directory, keep_kv=name == "kept") for name in ("kept", "dropped")}
    found: list[dict[str, float]] = []
    for number in range(ROUNDS + 1):
        rates = {}
        for name, engine in engines.items():
            began_s, before = time.perf_counter(), engine.load().prefilled_tokens
            sampled = play_episodes(engine, number * EPISODES)
            rates[name] = sampled / (time.perf_counter() - began_s)
            rates[f"{name}_prefilled"] = float(engine.load().prefilled_tokens - before)
        rates["kv_kept_over_dropped"] = rates["kept"] / rates["dropped"]
        say(f"round {number} of {ROUNDS}: {rates}")
        found += [rates] if number else []
    return {"kv_kept_over_dropped": medians(found)["kv_kept_over_dropped"]}
