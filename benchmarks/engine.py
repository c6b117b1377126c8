"""Tokens per second of the torch engine against transformers' `generate` and continuous batching.

Each request has its own budget of new tokens (log-normal, cut to [32, 1024]) and all three produce
exactly the budgeted tokens: stop tokens are off. `generate` runs the requests as one padded batch, as
long as the longest; only budgeted tokens count. Rounds are interleaved, so that noise on the machine
hits all alike; the medians and the ratio of medians are reported.

    OMP_NUM_THREADS=1 python benchmarks/engine.py [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config
from transformers.utils import logging as transformers_logging

from millrace.core.types import Sampling, Work
from millrace.rollout.engine import Engine
from millrace.rollout.load import load_engine

PROMPT_TOKENS = 24


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    new_tokens: int


def make_model(directory: str, hidden: int, layers: int) -> int:
    """A random Qwen3 without a stop token; returns its number of parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    return model.num_parameters()


def make_requests(count: int, longest: int) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randn(count, generator=generator).mul(0.8).add(5.3).exp().clamp(32, longest)
    prompts = torch.randint(512, (count, PROMPT_TOKENS), generator=generator)
    return [Request(p, n) for p, n in zip(prompts.tolist(), lengths.int().tolist(), strict=True)]


def ours(engine: Engine, requests: list[Request], round_index: int) -> int:
    engine.submit(
        Work(i, i, round_index, r.prompt, [], Sampling(max_tokens=r.new_tokens), seed=round_index)
        for i, r in enumerate(requests)
    )
    tokens = 0
    while engine.has_work or engine.has_finished:
        engine.step()
        tokens += sum(len(progress.tokens) for progress in engine.take_progress())
    return tokens


def padded_generate(model: Any, requests: list[Request]) -> int:
    prompts = torch.tensor([request.prompt for request in requests])
    longest = max(request.new_tokens for request in requests)
    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        max_new_tokens=longest,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert out.sequences.shape[1] == PROMPT_TOKENS + longest
    return sum(request.new_tokens for request in requests)


def continuous_batching(manager: Any, requests: list[Request]) -> int:
    for request in requests:
        manager.add_request(request.prompt, max_new_tokens=request.new_tokens)
    tokens, left = 0, len(requests)
    while left:
        result = manager.get_result(timeout=60)
        assert result is not None, "continuous batching gave nothing for 60 s"
        if result.is_finished():
            tokens, left = tokens + len(result.generated_tokens), left - 1
    return tokens


@contextmanager
def continuous_batching_manager(model: Any, longest: int) -> Iterator[Any]:
    """One manager for all rounds: starting it is not part of the measurement."""
    config = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=longest, pad_token_id=0, eos_token_id=-1
    )
    with model.continuous_batching_context_manager(generation_config=config) as manager:
        yield manager


def measure(contestants: dict[str, Callable[[int], int]], rounds: int) -> dict[str, float]:
    """Median tokens per second of each, rounds interleaved, after one round of warm-up."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for round_index in range(rounds + 1):
        for name, run in contestants.items():
            started = time.perf_counter()
            tokens = run(round_index)
            if round_index:
                rates[name].append(tokens / (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--skip-continuous", action="store_true", help="without transformers' own batching")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        parameters = make_model(directory, options.hidden, options.layers)
        engine = load_engine(directory, device="cpu", slots=options.requests, max_sequence_tokens=1088)
        model = AutoModelForCausalLM.from_pretrained(directory).eval()
    requests = make_requests(options.requests, options.longest)
    contestants: dict[str, Callable[[int], int]] = {
        "millrace": lambda index: ours(engine, requests, index),
        "generate": lambda _: padded_generate(model, requests),
    }
    with ExitStack() as stack:
        if not options.skip_continuous:
            manager = stack.enter_context(continuous_batching_manager(model, options.longest))
            contestants["continuous_batching"] = lambda _: continuous_batching(manager, requests)
        rates = measure(contestants, options.rounds)
    result = {
        "parameters": parameters,
        "requests": len(requests),
        "tokens": sum(request.new_tokens for request in requests),
        **{f"{name}_tokens_per_s": round(rate, 1) for name, rate in rates.items()},
        **{f"ratio_vs_{n}": round(rates["millrace"] / r, 2) for n, r in rates.items() if n != "millrace"},
    }
    for key, value in result.items():
        print(f"{key:34} {value}", file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
